"""The end of a command on the terminal: a table of what was reached, and what held."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.plots import arm_label
from megatron_stare.reporting.problem_scores import Problem, ks
from megatron_stare.reporting.report import ROWS, SUMMARY_NAME
from megatron_stare.reporting.summary import check_comparison, combine_seeds, pass_at_k


def print_summary(directory: Path) -> None:
    """A comparison's table with its findings, or the last numbers of a single run."""
    path = directory / SUMMARY_NAME
    if path.is_file():
        _print_comparison(json.loads(path.read_text()))
    else:
        last = read_metrics(directory / METRICS_NAME)[-1]
        shown = ("step", "entropy", "reward", "gate", "response_length", "logprob_diff_max")
        Console().print("  ".join(f"{name} {last[name]:.4g}" for name in shown if name in last))
        print_evaluation(last)


def print_evaluation(metrics: Mapping[str, float]) -> None:
    """One row per evaluation set of eval/<name>/... metrics; 95% intervals over problems in brackets."""
    names = [key.split("/")[1] for key in metrics if key.startswith("eval/") and key.endswith("/avg_at_k")]
    if not names:
        return
    heads = ("problems", "k", "avg@k", "pass@k", "majority@k", "tokens", "right", "wrong", "truncated", "reflections")
    table = Table("set", *heads, "unverifiable")
    for name in names:
        value = {key.split("/")[2]: number for key, number in metrics.items() if key.startswith(f"eval/{name}/")}
        table.add_row(
            name,
            *(_cell(value, key, ".0f") for key in ("problems", "k")),
            *(_rate(value, f"{rate}_at_k") for rate in ("avg", "pass", "majority")),
            *(_cell(value, f"response_length{suffix}", ".1f") for suffix in ("", "_correct", "_wrong")),
            _cell(value, "truncated_fraction", ".1%"),
            _cell(value, "reflections", ".2f"),
            _cell(value, "unverifiable", ".0f"),
        )
    Console().print(table)


def _cell(value: Mapping[str, float], key: str, form: str) -> str:
    return f"{value[key]:{form}}" if key in value else "-"


def _rate(value: Mapping[str, float], key: str) -> str:
    interval = f" [{value[f'{key}_low']:.3f}, {value[f'{key}_high']:.3f}]" if f"{key}_low" in value else ""
    return escape(_cell(value, key, ".3f") + interval)


def print_problems(problems: Mapping[str, Sequence[Problem]]) -> None:
    """How many problems of each set are solved how often, and on how many the vote is wrong though some are right."""
    heads = ("never right", "under half", "half or more", "always right", "vote wrong, some right")
    table = Table("set", *heads, "pass@1, 2, 4 ...")
    for name, found in problems.items():
        n = len(found[0].responses)
        places = Counter(_solved(problem.correct, n) for problem in found)
        voted = [problem for problem in found if problem.correct and problem.answers]
        outvoted = sum(problem.majority(n) < 0.5 for problem in voted)
        rates = [fmean(pass_at_k(n, problem.correct, k) for problem in found) for k in ks(n)]
        table.add_row(
            name,
            *(str(places[head]) for head in heads[:4]),
            f"{outvoted} of {len(voted)}",
            ", ".join(f"{rate:.3f}" for rate in rates),
        )
    Console().print(table)


def _solved(correct: int, samples: int) -> str:
    if correct in (0, samples):
        return "always right" if correct else "never right"
    return "half or more" if 2 * correct >= samples else "under half"


def _print_comparison(summary: dict) -> None:
    combined = combine_seeds(summary["seeds"])
    seeds = ", ".join(summary["seeds"])
    table = Table(
        "", *(arm_label(arm) for arm in combined), title=f"target entropy {summary['target_entropy']:g}, seeds {seeds}"
    )
    k = next((run["k"] for runs in summary["seeds"].values() for run in runs.values() if run.get("k")), "k")
    for key, label, form in ROWS:
        cells = []
        for values in combined.values():
            interval = values.get(key)
            spread = f" +- {interval.half_width:{form}}" if interval and interval.half_width is not None else ""
            cells.append(f"{interval.mean:{form}}{spread}" if interval else "-")
        table.add_row(label.format(k=k), *cells)
    console = Console()
    console.print(table)
    for finding in check_comparison(summary):
        console.print(f"{'held    ' if finding.held else 'NOT held'}  {finding.text}", highlight=False)
    for caveat in summary.get("caveats", ()):
        console.print(f"note      {caveat}", highlight=False)
