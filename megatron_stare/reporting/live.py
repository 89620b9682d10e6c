"""Training progress: a table of the newest steps on a terminal, sparse lines in a log.

    with training("stare", total=400) as live:      one run: its newest steps, a row each
        live.step(metrics)
    with training("training", total=800) as live:   several: the newest step of each, a row per run
        live.step(metrics, run="seed0/stare")

Evaluations are rarer than steps: a row of several runs keeps the last one's avg@k.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from megatron_stare.reporting.bars import SHOWN, progress, rich_progress
from megatron_stare.reporting.problem_scores import average_keys

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

    bars = rich_progress(Console(file=output))
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
