"""A run on a model with gated delta nets and vision: cold start, rollouts, updates, and the
whole model at the end.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.__main__ import main
from megatron_stare.config import dump, override
from megatron_stare.reporting.logbook import read_metrics
from tests.policy.conversion.test_convert_text_part import vision_language
from tests.small_run import small_config


@pytest.mark.parametrize(
    ("kind", "packed"), [("qwen3_5", "true"), ("qwen3_5", "false"), ("qwen3_5_moe", "true")]
)
def test_a_run_trains_the_text_part_and_keeps_the_others(
    kind: str, packed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, f"policy.packed_sequences={packed}", "run.save_interval=2")
    source, run, shown = (
        vision_language(tmp_path / "vision_language", kind),
        tmp_path / "run",
        tmp_path / "shown.jsonl",
    )
    rows = [{"prompt": f"{a}+1=", "response": f"{a + 1}."} for a in range(8)]
    shown.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = (f"cold_start.data={shown}", "cold_start.batch_size=4", "cold_start.steps=2")
    recipe = tmp_path / "recipe.yaml"
    more = (f"policy.hf_checkpoint={source}", "train.num_rollout=2", "policy.dtype=fp32", *first)
    dump(override(config, list(more)), recipe)
    assert main(["train", str(recipe), "--dry-run"]) == 0
    assert "GiB of an 80 GB GPU at the peak" in capsys.readouterr().out
    assert main(["train", str(recipe)]) == 0
    metrics = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert row["grad_norm"] > 0 and row["logprob_diff_mean"] < 1e-4
    assert (
        main(["convert", "megatron-to-hf", str(run), str(tmp_path / "hf"), "--base", str(source)])
        == 0
    )
    before = load_file(source / "model.safetensors")
    for directory in (run / "cold_start", tmp_path / "hf"):
        after = load_file(directory / "model.safetensors")
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            trained = name.startswith("model.language_model.") or name == "lm_head.weight"
            same = torch.equal(after[name].float(), tensor.float())
            assert (not same or "norm" in name) if trained else same, name
