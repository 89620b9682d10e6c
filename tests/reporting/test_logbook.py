"""The logbook: kills at any byte, resumes, what JSON cannot hold, copies that fail."""

from __future__ import annotations

import errno
import math
import re
import resource
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config import UserError
from megatron_stare.reporting.logbook import (
    Alarm,
    Logbook,
    Tail,
    append_alarm,
    read_alarms,
    read_metrics,
)
from megatron_stare.reporting.trackers import Row


def write_steps(directory: Path, steps: range, **constants: float) -> None:
    with Logbook(directory) as book:
        for step in steps:
            book.write(step, {"entropy": 0.1 * step, **constants})


def test_a_written_step_is_read_back(tmp_path):
    with Logbook(tmp_path) as book:
        book.write(1, {"entropy": torch.tensor(0.25), "gate": True, "note": "a", "k": np.int64(8)})
        on_disk = (tmp_path / "metrics.jsonl").read_bytes()
        assert on_disk.endswith(b"\n"), "the line is flushed before close"
        book.write(3, {"step": 3, "entropy": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "entropy": 0.25, "gate": True, "note": "a", "k": 8},
        {"step": 3, "entropy": 0.5},
    ]


@pytest.mark.parametrize("bad", [torch.zeros(2), None, [1.0]])
def test_a_value_that_json_cannot_hold_is_refused_by_name_and_nothing_is_written(tmp_path, bad):
    with Logbook(tmp_path) as book:
        book.write(1, {"loss": 1.0})
        with pytest.raises(ValueError, match="'grad_norm'"):
            book.write(2, {"loss": 1.0, "grad_norm": bad})
        book.write(2, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(book.path)] == [1, 2]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_value_that_is_not_finite_is_left_out_with_one_warning(tmp_path, capsys, odd):
    with Logbook(tmp_path) as book:
        for step in (1, 2):
            book.write(step, {"loss": 1.0, "grad_norm": odd})
    assert read_metrics(book.path) == [{"step": step, "loss": 1.0} for step in (1, 2)]
    assert capsys.readouterr().err.count("grad_norm is") == 1


def test_a_full_disk_delays_rows_and_loses_none(tmp_path, capsys):
    """A file size limit refuses writes as a full disk does: after a part of a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Logbook(tmp_path) as book:
        book.write(1, {"entropy": 0.5})
        whole = book.path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 7, hard))
        try:
            for step in (2, 3):
                book.write(step, {"entropy": 0.5})
            assert book.path.read_bytes().startswith(whole)
            assert [row["step"] for row in read_metrics(book.path)] == [1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        book.write(4, {"entropy": 0.5})
        assert [row["step"] for row in read_metrics(book.path)] == [1, 2, 3, 4]
    printed = capsys.readouterr().err
    assert printed.count("warning:") == 1 and "metrics wait in memory until" in printed


def test_rows_that_were_never_written_are_counted_at_the_end(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3, hard))
    try:
        with Logbook(tmp_path) as book:
            book.write(1, {})
            book.write(2, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "metrics.jsonl lacks 2 steps" in capsys.readouterr().err


def test_steps_increase(tmp_path):
    with Logbook(tmp_path) as book:
        book.write(5, {})
        for step in (5, 4):
            with pytest.raises(ValueError, match="not after step 5"):
                book.write(step, {})
        with pytest.raises(ValueError, match="in a line for step 6"):
            book.write(6, {"step": 7})


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400), st.integers(-1, 12))
def test_a_run_cut_at_any_byte_resumes_with_every_kept_step_once(tmp_path_factory, cut, resume):
    """Naive twin: a step survives where its whole object is before
    the cut and it is not to be repeated.
    """
    directory = tmp_path_factory.mktemp("run")
    write_steps(directory, range(1, 11))
    path = directory / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    ends = [match.end() for match in re.finditer(rb"\}", whole)]
    survivors = [step for step, end in enumerate(ends, start=1) if end <= cut]
    assert [row["step"] for row in read_metrics(path)] == survivors
    kept = [step for step in survivors if step <= resume]
    with Logbook(directory, resume) as book:
        book.write(50, {"entropy": 1.0})
    assert [row["step"] for row in read_metrics(path)] == [*kept, 50]
    assert [child.name for child in directory.iterdir()] == ["metrics.jsonl"], (
        "no temporary file is left"
    )


def test_a_damaged_line_elsewhere_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for damaged in ('{"step": 2, "lo', "[1]", '{"loss": 1}', '{"step": 1.5}'):
        path.write_text('{"step": 1}\n' + damaged + '\n{"step": 3}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
            read_metrics(path)
        path.write_text('{"step": 1}\n' + damaged + "\n")
        with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
            read_metrics(path)  # ended by a line feed: not torn by a kill
    with pytest.raises(UserError, match="nowhere"):
        read_metrics(tmp_path / "nowhere")


class Failing:
    """A place that takes one line and no more."""

    name = "failing"

    def __init__(self, when: str) -> None:
        self.when, self.rows = when, list[Row]()

    def open(self, last_step: int | None) -> None:
        if self.when == "open":
            raise ConnectionError("no network")

    def write(self, row: Row) -> None:
        if self.when == "write" and self.rows:
            raise ConnectionError("no network any more")
        self.rows.append(row)

    def close(self) -> None:
        if self.when == "close":
            raise ConnectionError("no goodbye")


@pytest.mark.parametrize("when", ["open", "write", "close"])
def test_a_failing_tracker_is_reported_once_and_loses_no_line(tmp_path, capsys, when):
    tracker = Failing(when)
    with Logbook(tmp_path, trackers=[tracker]) as book:
        for step in (1, 2, 3):
            book.write(step, {"entropy": 0.5})
    assert [row["step"] for row in read_metrics(book.path)] == [1, 2, 3]
    assert len(tracker.rows) == {"open": 0, "write": 1, "close": 3}[when]
    assert capsys.readouterr().err.count("warning: failing ") == 1


def test_a_tail_gives_each_step_once_through_torn_lines_and_resumes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    with path.open("w") as file:
        file.write('{"step": 1}\n{"step": 2}\n{"st')
        file.flush()
        assert [row["step"] for row in tail.read()] == [1, 2]
        assert tail.read() == []
        file.write('ep": 3}\n')
    assert [row["step"] for row in tail.read()] == [3] and tail.step == 3
    with Logbook(tmp_path, 1) as logbook:  # cut, and longer again than it was
        for step in range(2, 7):
            logbook.write(step, {"entropy": 0.5})
    assert [row["step"] for row in tail.read()] == [4, 5, 6]
    assert tail.read() == []


def test_a_tail_leaves_damaged_lines_out(tmp_path):
    """Those of a comparison that continues: the run that reads them next is refused by number."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\0\0\n\n[2]\n{"step": 3}\n')
    assert [row["step"] for row in Tail(path).read()] == [1, 3]


def test_an_alarm_that_a_full_disk_refuses_damages_no_other(tmp_path):
    alarms = [Alarm(step, "entropy", "low", step, "lower optimizer.lr") for step in (1, 2, 3)]
    append_alarm(tmp_path, alarms[0])
    size = (tmp_path / "alarms.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            append_alarm(tmp_path, alarms[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append_alarm(tmp_path, alarms[2])
    assert read_alarms(tmp_path) == [alarms[0], alarms[2]]


class FullDisk(FileIO):
    """Takes 7 bytes of a line, then neither more nor the end of the file back."""

    taken = 0

    def write(self, line):
        if self.taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken = super().write(line[:7])
        return self.taken

    def truncate(self, size=None):
        if self.taken:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return super().truncate(size)


def test_part_of_a_line_that_could_not_be_removed_damages_no_later_line(tmp_path):
    with Logbook(tmp_path) as book:
        book.write(1, {"entropy": 1.0})
        works, book._file = book._file, FullDisk(book.path, "ab")
        book.write(2, {"entropy": 2.0})
        book._file.close()
        book._file = works
        book.write(3, {"entropy": 3.0})
        assert [row["step"] for row in read_metrics(book.path)] == [1, 2, 3]
    alarms = [Alarm(step, "entropy", "low", step, "lower optimizer.lr") for step in (1, 2)]
    append_alarm(tmp_path, alarms[0])
    with (tmp_path / "alarms.jsonl").open("ab") as file:
        file.write(b'{"step"')
    append_alarm(tmp_path, alarms[1])
    assert read_alarms(tmp_path) == alarms
