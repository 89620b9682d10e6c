"""`train --dry-run`: every check has a line, all faults are printed, and no file remains."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_stare.__main__ import main
from megatron_stare.config import Config, UserError, dump, override
from megatron_stare.debug.dry_run import _memory
from megatron_stare.loop.run_directory import claim_prompts
from megatron_stare.planning.plan import GIB
from megatron_stare.recipes import find_recipe
from tests.small_run import small_config


def dry(recipe: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, list[str]]:
    """Exit code, and the lines."""
    code = main(["train", str(recipe), "--dry-run", *overrides])
    return code, capsys.readouterr().out.splitlines()


def test_the_checkpoint_of_load_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = tmp_path / "small.yaml", tmp_path / "run"
    dump(small_config(tmp_path, f"run.dir={run}"), recipe)
    (run / "checkpoints/step_00000002").mkdir(parents=True)
    for load, line in (
        ("step_00000002", f"OK   --load: step_00000002 of {run}/checkpoints"),
        ("step_00000001", f"not in {run}/checkpoints; there are step_00000002"),
        ("best", "--load best: none in "),
    ):
        code, lines = dry(recipe, capsys, "--load", load)
        assert line in lines[-2] and code == (2 if lines[-2].startswith("FAIL") else 0), lines
    assert main(["train", "quickstart", "--dry-run", "--load", "best", f"run.dir={run}"]) == 2
    assert "load=best names a checkpoint of one run" in capsys.readouterr().err


def test_the_dry_run_lists_ready_and_missing_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "small.yaml"
    dump(
        small_config(tmp_path, "evaluation.eval_data.same=" + str(tmp_path / "problems.jsonl")),
        recipe,
    )
    before = sorted(tmp_path.rglob("*"))
    code, lines = dry(recipe, capsys)
    checks = {line[5:].partition(":")[0]: line for line in lines}
    assert code == 0, lines
    assert {"objective", "checkpoint", "memory", "tokenizer", "data", "evaluation"} <= checks.keys()
    assert "36 prompts of" in checks["data"] and "same: 36 problems x 8" in checks["evaluation"]
    assert "would be a new run" in checks["run.dir"] and lines[-1].endswith("all is ready")
    verifier = checks["verifier tests.rewards.even_characters"]
    assert "the first label as a response is" in verifier

    with (tmp_path / "problems.jsonl").open("a") as file:
        file.write("{not json\n")
    model = tmp_path / "model/config.json"
    kept = model.read_text()
    model.write_text(json.dumps(json.loads(kept) | {"vocab_size": 300}))
    code, lines = dry(
        recipe, capsys, "scoring.reward=no.such.reward", "loss.name=stair", "run.dir=/proc/run"
    )
    failed = {line[5:].partition(":")[0]: line for line in lines if line.startswith("FAIL ")}
    assert code == 2 and {"objective", "checkpoint", "data", "run.dir"} <= failed.keys(), lines
    assert "did you mean 'stare'" in failed["objective"]
    assert "vocab_size=300" in failed["checkpoint"] and "not a JSON object" in failed["data"]
    model.write_text(kept)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is left behind"


def test_a_dry_run_refuses_to_continue_a_run_on_other_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, recipe = small_config(tmp_path), tmp_path / "small.yaml"
    dump(config, recipe)
    (tmp_path / "run").mkdir()
    dump(config, tmp_path / "run/config.yaml")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    claim_prompts(config, 35, "0123456789abcdef")
    code, lines = dry(recipe, capsys)
    (fault,) = (line for line in lines if line.startswith("FAIL "))
    assert code == 2 and "data: " in fault and "35 with digest 0123456789abcdef" in fault


def test_a_dry_run_of_the_quickstart_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    code = main(["train", "quickstart", f"run.dir={tmp_path / 'run'}", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and "OK   objective of stare: stare" in lines
    assert any(line.startswith("OK   memory: 3 ranks") for line in lines)
    assert any(line.endswith(", 0.0 wanted for checkpoints") for line in lines)
    assert not list(tmp_path.iterdir())
    code = main(["train", "quickstart", f"run.dir={tmp_path}", "--dry-run", "compare.run=[stair]"])
    assert code == 2 and "names arm 'stair'" in capsys.readouterr().err


def test_memory_is_planned_for_the_gpu_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path)
    assert _memory("small", config).count("of an 80 GB GPU") == 1
    properties = SimpleNamespace(total_memory=140 << 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: properties)
    assert "of the 140.0 GiB of this GPU" in _memory("small", config)
    properties.total_memory = 1 << 30
    with pytest.raises(UserError, match=r"1\.0"):
        _memory("small", config)


def test_memory_without_a_known_number_of_ranks_is_that_of_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight ranks hold the experts of one copy. Two of them are too few for a model that four can
    train.
    """
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = ["policy.hf_checkpoint=Qwen3-30B-A3B", "policy.dtype=bf16", "adapters.rank=8"]
    words += ["policy.expert_model_parallel_size=8", "policy.recompute_granularity=full"]
    words += ["rollout.engine=sglang"]
    assert _memory("mine.yaml", override(Config(), words)).startswith("8 ranks, ")
    with pytest.raises(UserError, match="this is the plan of 2 ranks, one copy of the model"):
        _memory("mine.yaml", find_recipe("short_cot_7b"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert _memory("mine.yaml", find_recipe("short_cot_7b")).startswith("4 ranks, ")


@pytest.mark.nullcuda
def test_memory_is_that_of_the_device(tmp_path: Path) -> None:
    size = torch.cuda.get_device_properties(0).total_memory / GIB
    assert f"of the {size:.1f} GiB of this GPU" in _memory("small", small_config(tmp_path))


def test_memory_is_planned_before_the_model_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model whose shape is known by its name; that its files are missing is another line."""
    command = ["train", "short_cot_7b", "policy.hf_checkpoint=Qwen2.5-7B", "--dry-run"]
    assert main(command) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("OK   memory: 4 ranks, ") for line in lines)
    assert any(line.startswith("FAIL") and "Qwen2.5-7B: no config.json" in line for line in lines)
