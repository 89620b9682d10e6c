"""A progress bar on a terminal, sparse plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

SHOWN = ("entropy", "reward")  # metrics next to the bar of a training run


class Bar(Protocol):
    """The bar that `progress` yields."""

    def update(self, count: int = 1, **numbers: float | str) -> None:
        """Count `count` more units as done; `numbers` are shown next to the bar."""


@contextmanager
def progress(
    description: str,
    total: int,
    *,
    completed: int = 0,
    enabled: bool = True,
    stream: TextIO | None = None,
) -> Iterator[Bar]:
    """A progress bar for a long phase; sparse plain lines if the output (stderr) is not a terminal.

        with progress("SFT", total=400) as bar:
            for ...:
                bar.update(loss=0.5)

    `completed` is the work done by an earlier, interrupted run. `enabled=False` (ranks other than
    0) is silent.
    """
    output = sys.stderr if stream is None else stream
    if not enabled:
        yield _Silent()
    elif output.isatty():
        from rich.console import Console

        with rich_progress(Console(file=output)) as bars:
            yield _RichBar(
                bars, bars.add_task(description, total=total, completed=completed, numbers="")
            )
    else:
        yield _PlainLines(description, total, completed, output)


class _Silent:
    def update(self, count: int = 1, **numbers: float | str) -> None:
        pass


class _RichBar:
    def __init__(self, bars: Any, task: Any) -> None:
        self._bars = bars
        self._task = task

    def update(self, count: int = 1, **numbers: float | str) -> None:
        self._bars.update(self._task, advance=count, numbers=_show(numbers))


class _PlainLines:
    """A line for the first unit, for every tenth of the work, for the last unit,
    and at least once a minute. The estimate of the remaining time leaves out the first unit, which
    includes the start-up.
    """

    SECONDS = 60.0

    def __init__(self, description: str, total: int, completed: int, output: TextIO) -> None:
        self._description = description
        self._total = total
        self._completed = completed
        self._output = output
        self._first = self._warm = completed
        self._started_at = self._printed_at = self._warm_at = time.monotonic()

    def update(self, count: int = 1, **numbers: float | str) -> None:
        before, self._completed = self._completed, self._completed + count
        if before == self._first:
            self._warm, self._warm_at = self._completed, time.monotonic()
        if self._is_due(before):
            self._printed_at = time.monotonic()
            print(self._line(_show(numbers)), file=self._output, flush=True)

    def _is_due(self, before: int) -> bool:
        if self._completed >= self._total or before == self._first:
            return True
        passed_a_tenth = self._completed * 10 // self._total > before * 10 // self._total
        return passed_a_tenth or time.monotonic() - self._printed_at >= self.SECONDS

    def _line(self, shown: str) -> str:
        now = time.monotonic()
        done, more = self._completed - self._warm, max(self._total - self._completed, 0)
        left = "-:--"
        if done or not more:
            left = _clock((now - self._warm_at) / max(done, 1) * more)
        count = f"{self._completed:{len(str(self._total))}d}/{self._total}"
        elapsed = _clock(now - self._started_at)
        return f"{self._description}  {count}  {elapsed} < {left}  {shown}".rstrip()


def rich_progress(console: Any) -> Any:
    """Bars on this rich console: done of total, time taken and left, and a task's `numbers`."""
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
        console=console,
    )


def _show(numbers: Mapping[str, float | str]) -> str:
    return "  ".join(
        f"{name} {f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in numbers.items()
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
