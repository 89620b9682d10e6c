"""slurm/convert.sbatch and evaluate.sbatch, on the files of a finished run."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slurm


def test_a_run_is_converted_and_evaluated(cluster, calm):
    exported = cluster.folder / "exported"
    converted = cluster.submit(
        "--mem=1G", "convert", "megatron-to-hf", str(calm.arm), str(exported)
    )
    small = ("evaluation.n_samples_per_eval_prompt=1", "evaluation.eval_max_response_len=4")
    evaluated = cluster.submit("--nodes=2", "evaluate", str(calm.arm), *small)
    converted.ended()
    evaluated.ended()
    assert json.loads((exported / "config.json").read_text())["model_type"] == "qwen2"
    found = json.loads((calm.arm / "evaluation.json").read_text())
    assert any("heldout_hard" in name for name in found)
    assert "trainers: n" in evaluated.text and "written: " in evaluated.text
