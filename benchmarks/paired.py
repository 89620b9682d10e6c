"""The difference of two policies on the same problems, with a 95% interval over problems.

    python benchmarks/paired.py --first runs/a/problems.jsonl --second runs/b/problems.jsonl

The files are `evaluation/problems.jsonl` of two runs; several on each side are seeds, whose
differences are averaged problem by problem. A problem that both policies find hard does not widen
the interval, as it widens that of each policy alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.reporting.problem_scores import bootstrap_interval

Scores = dict[tuple[str, int], dict[str, float]]  # set and index of a problem -> its numbers


def main() -> None:
    """Print a row for every number."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for side in ("--first", "--second"):
        parser.add_argument(side, type=Path, nargs="+", required=True, metavar="problems.jsonl")
    options = parser.parse_args()
    if len(options.first) != len(options.second):
        raise SystemExit(
            f"--first has {len(options.first)} files and --second {len(options.second)}; give both "
            "files of every seed"
        )
    pairs = [
        (scores(one), scores(two)) for one, two in zip(options.first, options.second, strict=True)
    ]
    Console().print(table_of(differences(pairs)))


def scores(file: Path) -> Scores:
    """avg@k and pass@k of every problem of a file."""
    with file.open(encoding="utf-8") as lines:  # splitlines would also split inside of texts
        rows = list(map(json.loads, lines))
    return {
        (row["set"], row["index"]): {f"avg@{row['k']}": row["correct"] / row["k"]}
        | {f"pass@{k}": value for k, value in row["pass_at_k"].items() if k != "1"}
        for row in rows
    }


def differences(pairs: list[tuple[Scores, Scores]]) -> dict[str, list[float]]:
    """Number -> its difference, second minus first, for every problem; the mean over the pairs.
    SystemExit: the files hold other problems, or other numbers of responses.
    """
    first = pairs[0][0]
    names = next(iter(first.values())).keys()
    for each in (each for pair in pairs for each in pair):
        if each.keys() != first.keys() or any(one.keys() != names for one in each.values()):
            raise SystemExit("the files differ in their problems or in the number of responses")
    return {
        name: [
            statistics.fmean(two[problem][name] - one[problem][name] for one, two in pairs)
            for problem in first
        ]
        for name in names
    }


def table_of(found: dict[str, list[float]]) -> Table:
    """A row for each number: the mean difference and its interval."""
    table = Table("second minus first", "difference", "95% interval", "problems")
    for name, values in found.items():
        low, high = bootstrap_interval(values, 0) or (float("nan"),) * 2
        mean = f"{statistics.fmean(values):+.3f}"
        table.add_row(name, mean, f"{low:+.3f} to {high:+.3f}", str(len(values)))
    return table


if __name__ == "__main__":
    main()
