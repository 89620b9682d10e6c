"""The end of a command on the terminal: a table of what was reached, and what held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.plots import arm_label
from megatron_stare.reporting.report import ROWS, SUMMARY_NAME
from megatron_stare.reporting.summary import check_comparison, combine_seeds


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
    """One row per evaluation set of eval/<name>/... metrics."""
    names = [key.split("/")[1] for key in metrics if key.startswith("eval/") and key.endswith("/avg_at_k")]
    if not names:
        return
    table = Table("problems", "k", "avg@k", "pass@k", "response length", "truncated")
    for name in names:
        value = {key.split("/")[2]: number for key, number in metrics.items() if key.startswith(f"eval/{name}/")}
        rates = [f"{value[key]:.3f}" for key in ("avg_at_k", "pass_at_k")]
        table.add_row(
            name, f"{value['k']:.0f}", *rates, f"{value['response_length']:.1f}", f"{value['truncated_fraction']:.1%}"
        )
    Console().print(table)


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
