"""The logbook: kills at any byte, resumes, what JSON cannot hold, progress."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config import UserError
from megatron_stare.reporting.logbook import Logbook, progress, read_metrics


def write_steps(directory: Path, steps: range, **constants: float) -> None:
    with Logbook(directory) as book:
        for step in steps:
            book.write(step, {"entropy": 0.1 * step, **constants})


def test_what_is_written_is_read_back(tmp_path):
    with Logbook(tmp_path) as book:
        book.write(1, {"entropy": torch.tensor(0.25), "gate": True, "note": "a", "k": np.int64(8)})
        on_disk = (tmp_path / "metrics.jsonl").read_bytes()
        assert on_disk.endswith(b"\n"), "the line is flushed before close"
        book.write(3, {"step": 3, "entropy": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "entropy": 0.25, "gate": True, "note": "a", "k": 8},
        {"step": 3, "entropy": 0.5},
    ]


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, torch.tensor(math.nan), torch.zeros(2), None, [1.0]]
)
def test_a_value_that_json_cannot_hold_is_refused_by_name_and_nothing_is_written(tmp_path, bad):
    with Logbook(tmp_path) as book:
        book.write(1, {"loss": 1.0})
        with pytest.raises(ValueError, match="'grad_norm'"):
            book.write(2, {"loss": 1.0, "grad_norm": bad})
        book.write(2, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(book.path)] == [1, 2]


def test_steps_only_go_up(tmp_path):
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
    with Logbook(directory, resume_from_step=resume) as book:
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


def test_a_new_run_does_not_write_over_an_old_one(tmp_path):
    write_steps(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="steps up to 3"):
        Logbook(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_tensorboard_mirror(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Logbook(tmp_path, tensorboard=True) as book:
        book.write(1, {"entropy": 0.5, "note": "a"})
        book.write(2, {"entropy": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["entropy"]
    assert [(event.step, event.value) for event in events.Scalars("entropy")] == [
        (1, 0.5),
        (2, 0.25),
    ]


def test_progress_is_sparse_without_a_terminal():
    output = io.StringIO()
    with progress("SFT", 400, completed=100, stream=output) as bar:
        for step in range(300):
            bar.advance(loss=1 / (step + 3))
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
        bar.advance(2, loss=1.0)
    assert silent.getvalue() == ""


def test_progress_draws_a_bar_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    output = Terminal()
    with progress("RL", 3, stream=output) as bar:
        for _ in range(3):
            bar.advance(reward=0.5)
    assert "3/3" in output.getvalue() and "RL" in output.getvalue()
