"""Measured figures of a rank of each recipe next to the planned ones.

benchmarks/null_ranks.py measures them on the null device, a GPU that computes nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.planning.plan import GIB, make_plan
from megatron_stare.recipes import CLUSTERS, find_recipe

FIGURES_NAME = "null_ranks.json"  # in the folder of the pages
HEADER = (
    *("recipe", "planned GiB", "allocated GiB", "planned / allocated", "reserved GiB"),
    *("launches", "waits", "micro-batches", "TFLOP", "GB sent by group size"),
)
_SENDING = ("all_gather", "all_reduce", "reduce_scatter", "broadcast", "send", "all_to_all")


@dataclass(frozen=True)
class Executed:
    """One rank over two steps; the optimizer has its state in the second."""

    recipe: str
    planned: float  # bytes
    allocated: float  # bytes, peak of torch's allocator over all phases
    figures: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Planned / allocated."""
        return self.planned / self.allocated


def executed(directory: Path) -> list[Executed]:
    """One entry per measured rank, without the planned memory that torch's allocator does not see
    (the CUDA context, NCCL, buckets of weights for servers).
    """
    found = []
    for name, ranks in json.loads((directory / FIGURES_NAME).read_text()).items():
        plan = make_plan(find_recipe(name), CLUSTERS[name])
        for figures in ranks:
            rank = plan.ranks[figures["stage"]]
            planned = rank.training - rank.communication
            peak = max(phase["peak_bytes"] for phase in figures["phases"].values())
            found.append(Executed(name, planned, peak, figures))
    return found


def rows(directory: Path) -> list[list[str]]:
    """The table of docs/scale.md, without its header."""
    return [_row(each) for each in executed(directory)]


def _row(each: Executed) -> list[str]:
    phases = each.figures["phases"]
    update = phases["update 2"]
    sent: dict[int, float] = {}
    for key, count in update["bytes"].items():
        operation, ranks = key.split()[0], int(re.search(r"of (\d+)$", key)[1])  # type: ignore[index]
        if operation in _SENDING:
            sent[ranks] = sent.get(ranks, 0.0) + count
    reserved = max(phase["reserved_bytes"] for phase in phases.values())
    return [
        each.recipe,
        f"{each.planned / GIB:.1f}",
        f"{each.allocated / GIB:.1f}",
        f"{each.ratio:.2f}",
        f"{reserved / GIB:.1f}",
        f"{update['launches']:,}",
        str(update["syncs"]),
        str(each.figures["micro_batches"]),
        f"{update['tflop']:,.0f}",
        ", ".join(f"{ranks}: {count / 1e9:.1f}" for ranks, count in sorted(sent.items())),
    ]
