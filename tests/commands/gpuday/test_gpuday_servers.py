"""The stages of the kit that need servers, rehearsed on SGLang's real servers for CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.commands.gpuday.rows import Day
from megatron_stare.commands.gpuday.stages import STAGES, Stage, run_stages

pytestmark = [pytest.mark.sglang, pytest.mark.slow]  # minutes each
# rows that each stage must have
ROWS = {
    "K6": (
        "broadcast: checksums are equal",
        "tensor: seconds of a bucket",
        "disk: seconds of a sync",
    ),
    "K7": (
        "seconds from kill -9 to the second next step",
        "the trainer still runs 33 s after the kill",
        "the server is started again",
        "3 cycles of release and resume",
        "memory stays flat",
    ),
    "K8": ("parity, bf16 cache", "decoding 32 sequences", "decode_latency"),
}


@pytest.mark.parametrize("stage", [each for each in STAGES if each.on_cpu], ids=lambda s: s.name)
def test_a_stage_with_servers_runs_to_its_end(stage: Stage, tmp_path: Path) -> None:
    day = Day(tmp_path, gpus=0, rehearsal=True)
    (result,) = run_stages(day, [stage])
    log = (tmp_path / f"{stage.name}.log").read_text()
    assert result.status == "finished", f"{result.reason}\n{log[-3000:]}"
    found = {row.what: row for row in result.rows}
    assert set(ROWS[stage.name]) <= found.keys()
    assert not [row for row in result.rows if row.verdict == "FAIL"], log[-3000:]
    assert not {row.what for row in result.rows if row.measured != row.measured}, "no NaN"
