"""Which tokens STARE selects: the ids of L+ and L- in the diagnostics of runs, decoded.

    python benchmarks/selected_tokens.py runs/smollm2_135m/seed0/stare ...

Sums over every step that diagnostics were written for, and over the runs: how often an id was
selected, its mean surprisal in nats and its share of the selected tokens. A step's diagnostics name
the 16 ids with the largest effect of each side; `other ids` are not in this count.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.reporting import diagnostics


def main() -> None:
    """Print a table for each side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument("--rows", type=int, default=12, help="ids of each side (12)")
    options = parser.parse_args()
    found = [diagnostics.read(run, step) for run in options.runs for step in diagnostics.steps(run)]
    for side, name in (("chosen_positive", "L+"), ("chosen_negative", "L-")):
        Console().print(table_of(found, side, name, options.rows))


def table_of(found: list[diagnostics.Diagnostics], side: str, name: str, rows: int) -> Table:
    """The most frequent ids of one side."""
    counts: dict[str, int] = defaultdict(int)
    nats: dict[str, float] = defaultdict(float)
    for one in found:
        for row in one.tokens.get(side, []):
            counts[row.text] += row.count
            nats[row.text] += row.count * row.surprisal
    total = sum(counts.values())
    table = Table("token", "times", "share", "surprisal", title=f"{name}: {total} tokens")
    for text in sorted(counts, key=counts.__getitem__, reverse=True)[:rows]:
        share, mean = counts[text] / total, nats[text] / counts[text]
        table.add_row(repr(text), str(counts[text]), f"{share:.0%}", f"{mean:.2f}")
    return table


if __name__ == "__main__":
    main()
