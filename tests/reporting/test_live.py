"""Steps as they come: a table on a terminal, sparse lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest
from rich.console import Console

from megatron_stare.reporting.live import NEWEST, table_of, training


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int, **more: float) -> dict[str, float]:
    return {"step": step, "entropy": 0.5 - step / 100, "reward": step / 10, **more}


def drawn(rows: list[dict[str, float]], named: bool = False) -> list[list[str]]:
    """The cells of the table's lines, its heading first."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table_of(rows, named))
    return [re.split(r"\s{2,}", line.strip()) for line in console.file.getvalue().splitlines()]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")


def test_a_column_exists_if_any_row_has_it():
    heading, *cells = drawn([row(1), row(2, weight_w=1.25)])
    assert heading == ["step", "entropy", "W", "reward"]
    assert cells == [["1", "0.490", "0.100"], ["2", "0.480", "1.25", "0.200"]]
    heading, cells = drawn([row(3, **{"eval/hard/avg_at_k": 0.25, "eval/hard/pass_at_k": 1.0})])
    assert heading[-1] == "hard avg@k" and cells[-1] == "0.250"


def test_a_run_shows_its_newest_steps():
    output = Terminal()
    with training("stare", 20, completed=5, stream=output) as live:
        for step in range(6, 21):
            live.step(row(step))
    last = output.getvalue().rpartition("step")[2]
    shown = [int(number) for number in re.findall(r"^ *(\d+) +0\.", last, re.MULTILINE)]
    assert shown == list(range(21 - NEWEST, 21))
    assert "20/20" in last


def test_several_runs_show_the_newest_step_of_each():
    output = Terminal()
    with training("training", 4, stream=output) as live:
        live.step(row(1, **{"eval/hard/avg_at_k": 0.125}), run="seed0/stare")
        live.step(row(1), run="seed0/grpo")
        live.step(row(2), run="seed0/stare")
    last = output.getvalue().rpartition("run  ")[2]
    assert re.search(r"seed0/stare +2 +0\.480 +0\.200 +0\.125", last)  # of an earlier step
    assert re.search(r"seed0/grpo +1 +0\.490 +0\.100 *\n", last)
    assert "3/4" in last


def test_a_log_whose_reader_has_gone_does_not_end_the_run():
    ours, theirs = os.pipe()
    stream = open(theirs, "w")  # noqa: SIM115 (closing it fails too)
    with training("run", 3, stream=stream) as live:
        live.step(row(1))
        os.close(ours)
        live.step(row(2))
        live.step(row(3))
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_a_log_has_few_lines():
    output = io.StringIO()
    with training("stare", 100, stream=output) as live:
        for step in range(1, 101):
            live.step(row(step))
    lines = output.getvalue().splitlines()
    assert len(lines) == 11 and "entropy 0.49  reward 0.1" in lines[0]
    output = io.StringIO()
    with training("training", 2, stream=output) as live:
        live.step(row(1), run="a")
        live.step(row(1), run="b")
    assert "a entropy 0.49  b entropy 0.49" in output.getvalue().splitlines()[-1]
    silent = io.StringIO()
    with training("stare", 1, enabled=False, stream=silent) as live:
        live.step(row(1))
    assert not silent.getvalue()
