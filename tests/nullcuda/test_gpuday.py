"""Every stage of the acceptance kit, with tiny shapes, on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.commands.gpuday.results import Day
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
    day = Day(str(tmp_path), gpus=2, rehearsal=True)
    day.write()
    (result,) = run_stages(day, [stage])
    log = (tmp_path / f"{stage.name}.log").read_text()
    assert result.status == "finished" and result.rows, f"{result.reason}\n{log[-3000:]}"
    assert "(null)" in result.machine
    faults = {row.what for row in result.rows if row.verdict == "FAIL"}
    assert faults <= EXPECTED_FAULTS.get(stage.name, set()), log[-3000:]
