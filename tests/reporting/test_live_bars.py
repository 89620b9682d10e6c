"""Progress: a bar on a terminal, sparse lines elsewhere."""

from __future__ import annotations

import io
import re

import pytest

from megatron_stare.reporting import live
from megatron_stare.reporting.live import progress


def test_progress_is_sparse_without_a_terminal():
    output = io.StringIO()
    with progress("SFT", 400, completed=100, stream=output) as bar:
        for step in range(300):
            bar.update(loss=1 / (step + 3))
    lines = output.getvalue().splitlines()
    assert [int(re.search(r"(\d+)/400", line)[1]) for line in lines] == [
        101,
        120,
        160,
        200,
        240,
        280,
        320,
        360,
        400,
    ]
    assert lines[0].startswith("SFT  101/400") and "loss 0.333" in lines[0]
    silent = io.StringIO()
    with progress("SFT", 2, enabled=False, stream=silent) as bar:
        bar.update(2, loss=1.0)
    assert silent.getvalue() == ""


def test_the_time_left_leaves_out_the_first_unit(monkeypatch: pytest.MonkeyPatch):
    """A run that resumes at 100 of 104 takes 30 s to start, then 2 s a unit."""
    clock = iter([0.0, 30.0, 30.0, 30.0, 32.0, 32.0, 34.0, 34.0, 36.0, 36.0])
    monkeypatch.setattr(live.time, "monotonic", lambda: next(clock))
    output = io.StringIO()
    with progress("RL", 104, completed=100, stream=output) as bar:
        monkeypatch.setattr(live._PlainLines, "_is_due", lambda *_: True)
        for _ in range(4):
            bar.update()
    times = [line.split("  ")[2] for line in output.getvalue().splitlines()]
    assert times == ["0:30 < -:--", "0:32 < 0:04", "0:34 < 0:02", "0:36 < 0:00"]


def test_progress_draws_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    output = Terminal()
    with progress("RL", 3, stream=output) as bar:
        for _ in range(3):
            bar.update(reward=0.5)
    assert "3/3" in output.getvalue() and "RL" in output.getvalue()
