"""Figures of finished runs: their summary, held-out accuracy, exactness, and the tokens that STARE
selects.

    python benchmarks/study.py runs/smollm2_135m/seed0/grpo_ds runs/smollm2_135m/seed0/stare
    python benchmarks/study.py runs/smollm2_135m/seed0/stare --curve entropy,reward
    python benchmarks/study.py runs/smollm2_135m_lcm/seed0/stare --responses gcd

The summary is that of `compare`. z is the mean and the standard deviation over steps. The tables of
L+ and L- count, over the steps with diagnostics, the ids that these name: those with the largest
effect of each side, at most diagnostics.tokens a step. `--curve` prints means of metrics over every
ten steps instead; `--responses` how many of the diagnostics' responses match a regular expression,
and the mean reward of these and of the others.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.recipes import config_of
from megatron_stare.reporting import diagnostics
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.summary import summarize_run, table_rows


def main() -> None:
    """Print the tables of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--curve", type=lambda names: names.split(","), metavar="METRIC,METRIC,...")
    parser.add_argument("--responses", type=expression, metavar="REGEX")
    options, console = parser.parse_args(), Console()
    for run in options.runs:
        if options.curve:
            console.print(curve_of(run, options.curve))
        if options.responses:
            console.print(responses_of(run, options.responses))
        if options.curve or options.responses:
            continue
        console.print(summary_of(run))
        for side, name in (("chosen_positive", "L+"), ("chosen_negative", "L-")):
            if (table := selected(run, side, name)).row_count:
                console.print(table)


def expression(text: str) -> re.Pattern[str]:
    """A regular expression of the command line. ArgumentTypeError: it is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def curve_of(run: Path, metrics: list[str]) -> Table:
    """Means of these metrics over every ten steps. SystemExit: a step lacks one of them."""
    rows = read_metrics(run / METRICS_NAME)
    for metric in metrics:
        if any(metric not in row for row in rows):
            raise SystemExit(f"--curve: {metric!r} is not in every row of {run / METRICS_NAME}")
    table = Table("steps", *metrics, title=str(run))
    for start in range(0, len(rows), 10):
        ten = rows[start : start + 10]
        means = [statistics.mean(row[metric] for row in ten) for metric in metrics]
        table.add_row(f"{ten[0]['step']} to {ten[-1]['step']}", *(f"{mean:.3f}" for mean in means))
    return table


def responses_of(run: Path, pattern: re.Pattern[str]) -> Table:
    """The responses of both halves of the steps with diagnostics: those that match, by reward."""
    steps = diagnostics.steps(run)
    columns = ("steps", "responses", "match", "their reward", "reward of the others")
    table = Table(*columns, title=f"{run}: {pattern.pattern}")
    middle = -(-len(steps) // 2)
    for half in filter(None, (steps[:middle], steps[middle:])):
        shown = [each for step in half for each in diagnostics.read(run, step).rollouts]
        rewards: dict[bool, list[float]] = {True: [], False: []}
        for each in shown:
            if each.reward is not None:
                rewards[bool(pattern.search("".join(each.text)))].append(each.reward)
        means = [f"{statistics.mean(rewards[k]):.3f}" if rewards[k] else "-" for k in (True, False)]
        judged = len(rewards[True]) + len(rewards[False])
        share = f"{len(rewards[True]) / judged:.0%}" if judged else "-"
        table.add_row(f"{half[0]} to {half[-1]}", str(judged), share, *means)
    return table


def summary_of(run: Path) -> Table:
    """The run's summary, its evaluations and z."""
    found = summarize_run(run, config_of(str(run), []).loss.target_entropy)
    table = Table("", "", title=str(run))
    for key, words, form in table_rows([found]):
        if found.get(key) is not None:
            table.add_row(words, format(found[key], form))
    rows = read_metrics(run / METRICS_NAME)
    for row in rows:
        for key in row:
            if key.endswith(("avg_at_k", "pass_at_k", "majority_at_k")):
                table.add_row(f"{key}, step {row['step']}", interval(row, key))
    for key in ("logprob_diff_mean", "adapters/merge_error", "seconds_update"):
        if values := [row[key] for row in rows if key in row]:
            last = values[-max(1, len(values) // 10) :]
            table.add_row(f"{key}, last tenth", f"{statistics.mean(last):.3g}")
    z = [row["exactness_z"] for row in rows if "exactness_z" in row]
    if len(z) > 1:
        table.add_row("z", f"{statistics.mean(z):.2f}, {statistics.stdev(z):.2f}")
    return table


def interval(row: dict[str, Any], key: str) -> str:
    """A value with its 95% interval."""
    return f"{row[key]:.3f} ({row[f'{key}_low']:.3f} to {row[f'{key}_high']:.3f})"


def selected(run: Path, side: str, name: str, most: int = 12) -> Table:
    """The most frequent ids of one side, with their mean surprisal in nats."""
    counts: dict[str, int] = defaultdict(int)
    nats: dict[str, float] = defaultdict(float)
    for step in diagnostics.steps(run):
        for row in diagnostics.read(run, step).tokens.get(side, []):
            counts[row.text] += row.count
            nats[row.text] += row.count * row.surprisal
    total = sum(counts.values())
    table = Table("token", "times", "share", "surprisal", title=f"{name}: {total} tokens")
    for text in sorted(counts, key=counts.__getitem__, reverse=True)[:most]:
        share, mean = counts[text] / total, nats[text] / counts[text]
        table.add_row(repr(text), str(counts[text]), f"{share:.0%}", f"{mean:.2f}")
    return table


if __name__ == "__main__":
    main()
