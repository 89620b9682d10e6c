"""The planner agrees with published runs, also with those that it was not fitted to."""

from __future__ import annotations

import pytest

from megatron_stare.__main__ import main
from megatron_stare.planning.calibration import ROWS, Cited, Decoding, Pretraining, Sync

# Published rows that the planner misses by more than a fifth, and the ratio planned / published.
MISSED = {
    "pretraining Qwen3-235B-A22B, 256 GPUs, FP8 products [s]": 3.1,
    "weights Qwen3-30B-A3B by handles, SGLang of August 2025 [s]": 0.3,
    "weights Qwen3-30B-A3B by handles, slime of July 2025 [s]": 0.2,
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.published:g}")
def test_published_figures_are_met(row: Cited) -> None:
    """Within a fifth, or at the ratio that the documentation admits."""
    ratio = row.planned() / row.published
    if row.name in MISSED:
        assert not row.fit and ratio == pytest.approx(MISSED[row.name], abs=0.06)
    else:
        assert 0.8 < ratio < 1.2


def test_a_half_of_the_steps_is_held_out() -> None:
    steps = [row for row in ROWS if not isinstance(row, Decoding | Pretraining | Sync)]
    assert sum(row.fit for row in steps) <= len(steps) / 2
    assert all(row.source and row.published > 0 for row in ROWS)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--calibration"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["case", "published"] and len(lines) == len(ROWS)
    assert any("held out" in line for line in lines)
