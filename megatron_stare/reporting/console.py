"""Tables of results on the terminal, printed at the end of a command."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.problem_scores import Problem, average_keys, ks, pass_at_k
from megatron_stare.reporting.summary import (
    SUMMARY_NAME,
    Interval,
    Row,
    arm_label,
    check_comparison,
    combine_seeds,
    table_rows,
)


def print_summary(directory: Path) -> None:
    """A comparison's table with its claims, or the last numbers of a single run."""
    path = directory / SUMMARY_NAME
    if path.is_file():
        _print_comparison(json.loads(path.read_text()))
    else:
        rows = read_metrics(directory / METRICS_NAME)
        last = rows[-1] if rows else {}  # none where the task was solved before the first step
        shown = ("step", "entropy", "reward", "gate", "response_length", "logprob_diff_max")
        if rows:
            Console().print("  ".join(f"{name} {last[name]:.4g}" for name in shown if name in last))
        print_evaluation(last)


def print_evaluation(metrics: Mapping[str, float]) -> None:
    """Two rows per evaluation set of eval/<name>/... metrics:
    rates in percent (95% interval), and the responses.
    """
    names = [key.split("/")[1] for key in average_keys(metrics)]
    if not names:
        return
    rates = Table("in percent", "problems", "k", "avg@k", "pass@k", "majority@k")
    responses = Table(
        "tokens", "mean", "correct", "wrong", "truncated", "reflections", "unverifiable"
    )
    for name in names:
        value = {
            key.split("/")[2]: number
            for key, number in metrics.items()
            if key.startswith(f"eval/{name}/")
        }
        counts = [_cell(value, key, ".0f") for key in ("problems", "k")]
        rates.add_row(
            name, *counts, *(_rate(value, f"{rate}_at_k") for rate in ("avg", "pass", "majority"))
        )
        responses.add_row(
            name,
            *(
                _cell(value, f"response_length{suffix}", ".1f")
                for suffix in ("", "_correct", "_wrong")
            ),
            _cell(value, "truncated_fraction", ".1%"),
            _cell(value, "reflections", ".2f"),
            _cell(value, "unverifiable", ".0f"),
        )
    Console().print(rates)
    Console().print(responses)


def _cell(value: Mapping[str, float], key: str, form: str) -> str:
    return f"{value[key]:{form}}" if key in value else "-"


def _rate(value: Mapping[str, float], key: str) -> str:
    if key not in value:
        return "-"
    interval = (
        f" ({100 * value[f'{key}_low']:.0f}-{100 * value[f'{key}_high']:.0f})"
        if f"{key}_low" in value
        else ""
    )
    return f"{100 * value[key]:.1f}{interval}"


def print_problems(problems: Mapping[str, Sequence[Problem]]) -> None:
    """The number of problems per set by how often they are solved, and the number whose majority
    answer is wrong although some responses are right.
    """
    table = Table("problems", *_SOLVED, "outvoted", "pass@1, 2, 4 ... %")
    for name, found in problems.items():
        n = len(found[0].responses)
        places = Counter(_solved(problem.correct, n) for problem in found)
        voted = [problem for problem in found if problem.correct and problem.answers]
        outvoted = sum(problem.majority(n) < 0.5 for problem in voted)
        rates = [fmean(pass_at_k(n, problem.correct, k) for problem in found) for k in ks(n)]
        numbers = (str(places[head]) for head in _SOLVED)
        table.add_row(
            name,
            *numbers,
            f"{outvoted}/{len(voted)}",
            " ".join(f"{100 * rate:.1f}" for rate in rates),
        )
    Console().print(table)


_SOLVED = ("never", "< 1/2", ">= 1/2", "always")


def _solved(correct: int, samples: int) -> str:
    if correct in (0, samples):
        return "always" if correct else "never"
    return ">= 1/2" if 2 * correct >= samples else "< 1/2"


MOST_COLUMNS = 3  # arms side by side; with more, each arm is a row of these columns
_NARROW = {
    "entropy_final": "entropy\nat end",
    "entropy_in_band_fraction": "in\nband",
    "train_reward_final": "reward",
    "seconds_per_step": "s/step",
}
_WEIGHTS = ("weight_last_half", "gate_open_fraction")
MOST_EVALUATED = 3  # columns of evaluation in 80 characters


def _print_comparison(summary: dict) -> None:
    combined = combine_seeds(summary["seeds"])
    rows = table_rows(run for runs in summary["seeds"].values() for run in runs.values())
    targets = {run["target_entropy"] for runs in summary["seeds"].values() for run in runs.values()}
    target = ", ".join(f"{each:g}" for each in sorted(targets))
    title = f"target entropy {target}, seeds {', '.join(summary['seeds'])}"
    console = Console()
    if len(combined) > MOST_COLUMNS:
        console.print(_by_row(combined, _narrow(rows), title))
        weighted = {arm: found for arm, found in combined.items() if found.get("weight_last_half")}
        if weighted:
            console.print(_by_row(weighted, [row for row in rows if row[0] in _WEIGHTS], ""))
    else:
        table = Table("", *map(arm_label, combined), title=title)
        for key, label, form in rows:
            if not any(values.get(key) for values in combined.values()):
                continue
            cells = (_mean_cell(values.get(key), form, " +- ") for values in combined.values())
            table.add_row(label, *cells)
        console.print(table)
    for claim in check_comparison(summary):
        console.print(f"{'held    ' if claim.held else 'NOT held'}  {claim.text}", highlight=False)
    for caveat in summary.get("caveats", ()):
        console.print(f"note      {caveat}", highlight=False)


def _narrow(rows: Sequence[Row]) -> list[Row]:
    """The columns of a table with a row for each arm: short heads, three of evaluation at most."""
    evaluated = [
        (key, label.removeprefix("Held-out ").replace(", ", "\n"), form)
        for key, label, form in rows
        if key.startswith("eval/")
    ]
    heads = [(key, _NARROW[key], form) for key, _, form in rows if key in _NARROW]
    return [*heads[:-1], *evaluated[:MOST_EVALUATED], heads[-1]]


def _by_row(
    combined: Mapping[str, Mapping[str, Interval | None]], columns: Sequence[Row], title: str
) -> Table:
    """A row for each arm, with these columns."""
    heads = (label for _, label, _ in columns)
    table = Table("", *heads, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for arm, values in combined.items():
        cells = (_mean_cell(values.get(key), form, "\n+-") for key, _, form in columns)
        table.add_row(arm_label(arm), *cells)
    return table


def _mean_cell(interval: Interval | None, form: str, between: str) -> str:
    """The mean over seeds, with half its interval if there are several seeds."""
    if interval is None:
        return "-"
    half = interval.half_width
    return f"{interval.mean:{form}}" + (f"{between}{half:{form}}" if half is not None else "")
