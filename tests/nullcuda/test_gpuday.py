"""Every stage of the acceptance kit, with tiny shapes, on the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.commands.gpuday import models
from megatron_stare.commands.gpuday.rows import Day
from megatron_stare.commands.gpuday.stages import STAGES, Stage, run_stages

pytestmark = pytest.mark.nullcuda
# K0 finds this machine's faults: it has no driver.
EXPECTED_FAULTS = {"K0": {"driver", "node", "SGLang", "servers' NCCL"}}


# Stages with servers are rehearsed on a CPU (tests/commands/gpuday), K10 under Slurm (tests/slurm).
HERE = [
    pytest.param(stage, id=stage.name, marks=[pytest.mark.slow] if stage.name == "K4" else [])
    for stage in STAGES
    if not stage.on_cpu and stage.name != "K10"
]


@pytest.mark.parametrize("stage", HERE)
def test_the_stage_runs_to_its_end(stage: Stage, tmp_path: Path) -> None:
    day = Day(tmp_path, gpus=2, rehearsal=True)
    # A stage's limit is one of a GPU machine, and this one may be slow and busy.
    (result,) = run_stages(day, [dataclasses.replace(stage, limit=3600.0)])
    log = (tmp_path / f"{stage.name}.log").read_text()
    assert result.status == "finished" and result.rows, f"{result.reason}\n{log[-3000:]}"
    assert "(null)" in result.machine
    faults = {row.what for row in result.rows if row.verdict == "FAIL"}
    assert faults <= EXPECTED_FAULTS.get(stage.name, set()), log[-3000:]


def test_the_weights_of_a_real_model_are_drawn_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tools.nullcuda.counters import counting

    shape = models.model_shape("Qwen3-8B")
    small = type(shape)(**shape.to_dict() | {"layer_types": None} | models.TINY)
    monkeypatch.setattr(models, "model_shape", lambda _: small)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with counting() as counts:
        directory = models.random_model(Day(tmp_path, gpus=1), "Qwen3-8B")
    assert counts.launches > 0
    assert torch.cuda.memory_reserved() <= before, "the runs of the stage need the memory"
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"].float()
    assert abs(float(embedding.std()) - models.TINY["initializer_range"]) < 0.01
