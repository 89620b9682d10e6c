"""What a run writes down: metrics.jsonl, one JSON object per step,
an optional TensorBoard mirror, a progress bar.

metrics.jsonl survives a kill at any moment: a line is written and flushed whole, a torn last line
is forgiven by `read_metrics` and cut off on resume, and a resumed run drops the lines of the steps
it is about to repeat.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from megatron_stare.config import RunConfig, UserError

METRICS_NAME = "metrics.jsonl"
SHOWN = ("entropy", "reward")  # beside the progress bar


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in file order.

    A last line without its line feed that is no JSON was torn by a kill and is left out; anything
    else that is not a JSON object with an integer `step` raises UserError naming the line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}; a run directory holds a {METRICS_NAME}"
        ) from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parse_row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise UserError(
                f"{path}:{number}: not a JSON object with an integer step; remove the line"
            )
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


class Logbook:
    """Appends to `directory`/metrics.jsonl.

    `resume_from_step` is the last step to keep: later lines, and a torn last one, are cut off
    before anything is appended (-1 cuts all). None means a new run: steps that are already there
    are not written over but refused with UserError. `tensorboard` mirrors every number to
    `directory`/tensorboard.
    """

    def __init__(
        self, directory: Path, *, resume_from_step: int | None = None, tensorboard: bool = False
    ) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / METRICS_NAME
        self.last_step = self._cut(resume_from_step)
        self._file: TextIO = self.path.open("a", encoding="ascii")
        self._board = _open_board(self.directory, self.last_step) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step. Values are numbers, strings or booleans, or tensors of one element.

        Raises ValueError naming the key for a value that is not finite or not of these types, and
        for a step that is not later than the last one written. Nothing is written then.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"logbook: step {step} is not after step {self.last_step}, the last one in "
                f"{self.path}"
            )
        if metrics.get("step", step) != step:
            raise ValueError(
                f"logbook: metrics['step'] is {metrics['step']!r} in a line for step {step}"
            )
        row: dict[str, Any] = {"step": int(step)} | {
            key: _plain(key, value) for key, value in metrics.items() if key != "step"
        }
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self.last_step = row["step"]
        if self._board is not None:
            for key, value in row.items():
                if key != "step" and not isinstance(value, str):
                    self._board.add_scalar(key, value, row["step"])
            self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Logbook:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _cut(self, resume_from_step: int | None) -> int | None:
        """Rewrite the file with the steps to keep; the last of them, or None."""
        rows = read_metrics(self.path) if self.path.exists() else []
        if resume_from_step is None and rows:
            raise UserError(
                f"{self.path} already holds steps up to {rows[-1]['step']}; resume that run or "
                "choose another run.dir"
            )
        kept = [
            row for row in rows if resume_from_step is not None and row["step"] <= resume_from_step
        ]
        if self.path.exists():
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="ascii")
            temporary.replace(self.path)
        return kept[-1]["step"] if kept else None


def open_logbook(
    run: RunConfig, done: int, *, enabled: bool
) -> AbstractContextManager[Logbook | None]:
    """The run's logbook, its lines beyond step `done` cut off; of the one process that writes it,
    None in the others.
    """
    if not enabled:
        return nullcontext()
    return Logbook(Path(run.dir), resume_from_step=done, tensorboard=run.tensorboard)


def _plain(key: str, value: Any) -> float | int | str | bool:
    """`value` as what JSON can hold exactly; ValueError naming `key` otherwise."""
    if not isinstance(value, (bool, int, float, str)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            raise ValueError(f"logbook: {key!r} is a tensor of more than one element") from None
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(
            f"logbook: {key!r} is a {type(value).__name__}; numbers, strings and booleans can be "
            "logged"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"logbook: {key!r} is {value}; leave out what has no value, and mend what should have "
            "one"
        )
    return value


def _open_board(directory: Path, last_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "run.tensorboard=true needs tensorboard; pip install 'megatron-stare[tracking]'"
        ) from None
    return SummaryWriter(
        str(directory / "tensorboard"), purge_step=None if last_step is None else last_step + 1
    )


class Bar(Protocol):
    """What `progress` hands out."""

    def advance(self, count: int = 1, **numbers: float | str) -> None:
        """`count` more units are done; `numbers` are shown next to the bar."""


@contextmanager
def progress(
    description: str,
    total: int,
    *,
    completed: int = 0,
    enabled: bool = True,
    stream: TextIO | None = None,
) -> Iterator[Bar]:
    """A progress bar for a long phase; sparse plain lines where the output (stderr) is no terminal.

        with progress("SFT", total=400) as bar:
            for ...:
                bar.advance(loss=0.5)

    `completed` counts what an earlier, interrupted run has done. `enabled=False` (ranks other than
    0) is silent.
    """
    output = sys.stderr if stream is None else stream
    if not enabled:
        yield _Silent()
    elif output.isatty():
        with _rich_progress(output) as bars:
            yield _RichBar(
                bars, bars.add_task(description, total=total, completed=completed, numbers="")
            )
    else:
        yield _PlainLines(description, total, completed, output)


class _Silent:
    def advance(self, count: int = 1, **numbers: float | str) -> None:
        pass


class _RichBar:
    def __init__(self, bars: Any, task: Any) -> None:
        self._bars, self._task = bars, task

    def advance(self, count: int = 1, **numbers: float | str) -> None:
        self._bars.update(self._task, advance=count, numbers=_show(numbers))


class _PlainLines:
    """A line for the first unit, for every tenth of the work, for the last unit,
    and at least once a minute.
    """

    SECONDS = 60.0

    def __init__(self, description: str, total: int, completed: int, output: TextIO) -> None:
        self._description, self._total, self._completed, self._output = (
            description,
            total,
            completed,
            output,
        )
        self._first = completed
        self._started_at = self._printed_at = time.monotonic()

    def advance(self, count: int = 1, **numbers: float | str) -> None:
        before, self._completed = self._completed, self._completed + count
        if self._is_due(before):
            self._printed_at = time.monotonic()
            print(self._line(_show(numbers)), file=self._output, flush=True)

    def _is_due(self, before: int) -> bool:
        if self._completed >= self._total or before == self._first:
            return True
        passed_a_tenth = self._completed * 10 // self._total > before * 10 // self._total
        return passed_a_tenth or time.monotonic() - self._printed_at >= self.SECONDS

    def _line(self, shown: str) -> str:
        elapsed = time.monotonic() - self._started_at
        left = (
            elapsed / max(self._completed - self._first, 1) * max(self._total - self._completed, 0)
        )
        count = f"{self._completed:{len(str(self._total))}d}/{self._total}"
        return f"{self._description}  {count}  {_clock(elapsed)} < {_clock(left)}  {shown}".rstrip()


def _rich_progress(output: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[numbers]}"),
        console=Console(file=output),
    )


def _show(numbers: Mapping[str, float | str]) -> str:
    return "  ".join(
        f"{name.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in numbers.items()
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
