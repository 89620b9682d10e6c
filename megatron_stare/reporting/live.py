"""Progress on a terminal: bars, and a table of the newest training steps; sparse lines in a log.

    with progress("SFT", total=400) as bar:         a long phase
        bar.update(loss=0.5)
    with training("stare", total=400) as live:      one run: its newest steps, a row each
        live.step(metrics)
    with training("training", total=800) as live:   several: the newest step of each, a row per run
        live.step(metrics, run="seed0/stare")

Evaluations are rarer than steps: a row of several runs keeps the last one's avg@k.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from megatron_stare.reporting.problem_scores import average_keys

SHOWN = ("entropy", "reward")  # of a training run in a log
NEWEST = 8  # rows of a single run
# heading, metric, format; a column without any value is left out
COLUMNS = (
    ("step", "step", "d"),
    ("entropy", "entropy", ".3f"),
    ("gate", "gate", ".0f"),
    ("W", "weight_w", ".2f"),
    ("reward", "reward", ".3f"),
    ("length", "response_length", ".0f"),
    ("cut", "truncated_fraction", ".0%"),
    ("gradient", "grad_norm", ".2g"),
    ("mismatch", "logprob_diff_mean", ".1g"),
    ("stale", "stale_token_fraction", ".0%"),
    ("seconds", "seconds_total", ".1f"),
)
Row = Mapping[str, Any]


class Bar:
    """What `progress` yields. This one is silent."""

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

    `completed` is the work done by an earlier, interrupted run. `enabled=False` (ranks other than
    0) is silent.
    """
    output = sys.stderr if stream is None else stream
    if not enabled:
        yield Bar()
    elif output.isatty():
        from rich.console import Console

        with _rich_progress(Console(file=output)) as bars:
            task = bars.add_task(description, total=total, completed=completed, numbers="")
            yield _RichBar(bars, task)
    else:
        yield _PlainLines(description, total, completed, output)


class _RichBar(Bar):
    def __init__(self, bars: Any, task: Any) -> None:
        self._bars, self._task = bars, task

    def update(self, count: int = 1, **numbers: float | str) -> None:
        self._bars.update(self._task, advance=count, numbers=_show(numbers))


class _PlainLines(Bar):
    """A line for the first unit, for every tenth of the work, for the last unit,
    and at least once a minute. The estimate of the remaining time leaves out the first unit, which
    includes the start-up.
    """

    SECONDS = 60.0

    def __init__(self, description: str, total: int, completed: int, output: TextIO) -> None:
        self._description, self._total, self._output = description, total, output
        self._completed = self._first = self._warm = completed
        self._started_at = self._printed_at = self._warm_at = time.monotonic()

    def update(self, count: int = 1, **numbers: float | str) -> None:
        before, self._completed = self._completed, self._completed + count
        if before == self._first:
            self._warm, self._warm_at = self._completed, time.monotonic()
        if self._is_due(before):
            self._printed_at = time.monotonic()
            # Ctrl-C ends `| tee log` as well: the run must live to save.
            with suppress(BrokenPipeError):
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


def _rich_progress(console: Any) -> Any:
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


class Live:
    """The display that `training` yields. `show` draws the newest rows: of a single run, or one of
    each of several runs.
    """

    def __init__(self, show: Callable[[list[Row], bool], None]) -> None:
        self._show, self._rows, self._runs = show, list[Row](), dict[str, Row]()

    def step(self, metrics: Row, run: str = "") -> None:
        """Show a finished step's metrics, as in the logbook; `run` names one of several runs."""
        if not run:
            self._rows = [*self._rows, metrics][-NEWEST:]
            self._show(self._rows, False)
            return
        before = self._runs.get(run, {})
        last = {key: before[key] for key in average_keys(before)}
        self._runs[run] = last | {**metrics, "run": run}
        self._show(list(self._runs.values()), True)


@contextmanager
def training(
    name: str, total: int, *, completed: int = 0, enabled: bool = True, stream: TextIO | None = None
) -> Iterator[Live]:
    """Show steps as they finish. `total` and `completed` count the steps of all runs; ranks that
    are not `enabled` are silent; the default `stream` is stderr.
    """
    output = sys.stderr if stream is None else stream
    if not (enabled and output.isatty()):
        with progress(name, total, completed=completed, enabled=enabled, stream=output) as bar:
            yield Live(lambda rows, named: bar.update(1, **_shown(rows, named)))
        return
    from rich.console import Console, Group
    from rich.live import Live as Display

    bars = _rich_progress(Console(file=output))
    task = bars.add_task(name, total=total, completed=completed, numbers="")
    with Display(bars, console=bars.console, refresh_per_second=4) as display:

        def show(rows: list[Row], named: bool) -> None:
            bars.update(task, advance=1)
            display.update(Group(table_of(rows, named), bars))

        yield Live(show)


def _shown(rows: list[Row], named: bool) -> dict[str, float]:
    """The numbers of a line in a log; of several runs the newest entropy of each."""
    if named:
        return {f"{row['run']} entropy": row["entropy"] for row in rows if "entropy" in row}
    return {key: rows[-1][key] for key in SHOWN if key in rows[-1]}


def table_of(rows: list[Row], named: bool) -> Any:
    """A rich table: the columns that any row has, and avg@k of every evaluation set."""
    from rich.table import Table

    averages = sorted({key for row in rows for key in average_keys(row)})
    columns = [("run", "run", "")] if named else []
    columns += [column for column in COLUMNS if any(column[1] in row for row in rows)]
    columns += [(f"{key.split('/')[1]} avg@k", key, ".3f") for key in averages]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, key, _ in columns:
        table.add_column(heading, justify="left" if key == "run" else "right", no_wrap=True)
    for row in rows:
        cells = (f"{row[key]:{form}}" if key in row else "" for _, key, form in columns)
        table.add_row(*cells)
    return table
