"""The predicted change of entropy against that of an update, and the cost of the prediction.

    export OMP_NUM_THREADS=1
    python benchmarks/entropy_prediction.py                 two short runs of the quickstart
    python benchmarks/entropy_prediction.py --start DIRECTORY   from that cold-started model
    python benchmarks/entropy_prediction.py --runs RUN...   runs that are there

The quickstart's two arms after its cold start, each step with its own Adam update. `predicted` is
entropy_change/predicted, (dL/ds) g summed over the batch before the update
(megatron_stare/loop/metrics.py); `realised` is the entropy of the same tokens scored
again after it, less that before (diagnostics.realised); `next` is the entropy of the next step's
batch, of other prompts, less this one's. Correlations are Pearson's over steps, `sign` is the
fraction of steps in which both have the same sign, `scale` the ratio of realised to predicted by
least squares; both means are nats per step. Quadrants: the mean predicted change, and the fraction
of steps with the theory's sign. `cost` is seconds_diagnose over the step's seconds, in runs of
their own with the recipe's interval and without diagnostics.realised.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._phases import quickstart_runs
from megatron_stare.loop.metrics import QUADRANTS
from megatron_stare.policy.topology import session
from megatron_stare.recipes import find_recipe
from megatron_stare.reporting.logbook import read_metrics

PREFIX = "entropy_change/"
# The columns of a table: the figures of each row, and their formats.
FORMATS = {
    "steps": "d",
    "correlation": ".2f",
    "sign": ".0%",
    "scale": ".2f",
    "predicted": "+.4f",
    "realised": "+.4f",
}
SIGNS = dict(zip(QUADRANTS, (1, -1, -1, 1), strict=True))


def correlated(rows: list[dict[str, Any]], one: str, other: str) -> dict[str, float]:
    """Pearson's correlation of two columns, how often their signs agree, and their means."""
    pairs = [(row[one], row[other]) for row in rows if one in row and other in row]
    moved = numpy.array([pair for pair in pairs if pair[0] != 0.0], numpy.float64).reshape(-1, 2)
    if len(moved) < 3:
        return {}
    return {
        "steps": len(moved),
        "correlation": float(numpy.corrcoef(moved.T)[0, 1]),
        "sign": float((numpy.sign(moved[:, 0]) == numpy.sign(moved[:, 1])).mean()),
        "scale": float((moved[:, 0] * moved[:, 1]).sum() / (moved[:, 0] ** 2).sum()),
        "predicted": float(moved[:, 0].mean()),
        "realised": float(moved[:, 1].mean()),
    }


def findings(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that is measured of one run."""
    found: dict[str, Any] = {
        "same tokens": correlated(rows, f"{PREFIX}predicted", f"{PREFIX}realised"),
        "next step": correlated(rows, f"{PREFIX}previous_predicted", f"{PREFIX}previous_realised"),
    }
    for name, sign in SIGNS.items():
        values = numpy.array([row[PREFIX + name] for row in rows if PREFIX + name in row])
        values = values[values != 0]
        if len(values):
            agreeing = float((sign * values > 0).mean())
            found[name] = {"sign": agreeing, "predicted": float(values.mean())}
    later = rows[1:] or rows
    seconds = [row.get("seconds_diagnose", 0.0) for row in later]
    found["cost"] = sum(seconds) / sum(row["seconds_total"] for row in later)
    return found


def table_of(run: str, found: dict[str, Any]) -> Table:
    """The findings of one run."""
    table = Table("", *FORMATS, title=f"{run}, cost {found['cost']:.2%} of a step")
    for what, values in found.items():
        if isinstance(values, dict) and values:
            cells = (
                format(values[key], form) if key in values else "" for key, form in FORMATS.items()
            )
            table.add_row(what, *cells)
    return table


def trained(options: argparse.Namespace, folder: Path, *overrides: str) -> dict[str, Path]:
    """The two arms' run directories."""
    if options.start:
        shutil.copytree(options.start, folder / "start")
    with session(find_recipe("quickstart").policy) as topology:
        runs = quickstart_runs(options, topology, folder, *overrides)
        return {name: trainer.directory for name, trainer in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="predicted and realised change of entropy")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cold-start-steps", type=int, default=400)
    parser.add_argument("--start", type=Path, help="a model after its cold start")
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        runs = {str(path): path for path in options.runs}
        if not runs:
            folder = Path(name)
            runs = trained(options, folder / "asked", "diagnostics.realised=true")
            plain = trained(options, folder / "plain")
        for run, path in runs.items():
            results[run] = findings(read_metrics(path / "metrics.jsonl"))
            if not options.runs:
                rows = read_metrics(plain[run] / "metrics.jsonl")
                results[run]["cost"] = findings(rows)["cost"]
    for run, found in results.items():
        Console(width=118).print(table_of(run, found))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
