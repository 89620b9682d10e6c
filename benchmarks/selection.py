"""The exact k largest of a value spread over ranks:
radix selection against gathering everything and torch.topk.

    python benchmarks/selection.py [--ranks 4] [--json PATH]

For each number of values: time on the slowest rank (fastest of several rounds, one thread per rank,
gloo on this machine) and bytes that one rank hands to its collectives. The gather is what a batch
quantile costs without radix selection: values and indices of all ranks on every rank. Both answers
are compared.

Shape legend: T values of one rank.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.numerics.selection import Across
from tests.distributed import run_distributed

SHARE = 0.1


def by_radix(value_T: Tensor, index_T: Tensor, k: int) -> Tensor:
    """bool mask_T by `Across.top_k`."""
    return Across(dist.group.WORLD).top_k(value_T, index_T, k)


def by_gather(value_T: Tensor, index_T: Tensor, k: int) -> Tensor:
    """bool mask_T: everything to every rank, torch.topk for the threshold,
    ties to the smallest indices.
    """
    ranks = dist.get_world_size()
    length = torch.tensor([value_T.numel()])
    lengths = [torch.empty_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length)
    longest = int(torch.stack(lengths).max())
    pieces = []
    for tensor in (value_T, index_T):
        padded = torch.zeros(longest, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor
        everyone = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(everyone, padded)
        pieces.append(
            torch.cat([part[: int(n)] for part, n in zip(everyone, lengths, strict=True)])
        )
    threshold = torch.topk(pieces[0], k, sorted=False).values.min()
    mask_T, tied_T = value_T > threshold, value_T == threshold
    missing = k - int((pieces[0] > threshold).sum())
    last_index = pieces[1][pieces[0] == threshold].sort().values[missing - 1]
    return mask_T | (tied_T & (index_T <= last_index))


def on_rank(rank: int, world_size: int, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """One rank's times and traffic for every size."""
    found = []
    for total in sizes:
        generator = torch.Generator().manual_seed(total)
        value_T = torch.rand(total, generator=generator).exp()
        index_T = (
            (torch.randint(0, world_size, (total,), generator=generator) == rank)
            .nonzero()
            .squeeze(1)
        )
        value_T, k = value_T[index_T], int(total * SHARE)
        entry: dict[str, Any] = {"values": total}
        masks = {}
        for name, function in (("radix", by_radix), ("gather", by_gather)):
            entry[name + "_bytes"] = _traffic(function, value_T, index_T, k)
            seconds = []
            for _ in range(rounds):
                dist.barrier()
                start = time.perf_counter()
                masks[name] = function(value_T, index_T, k)
                seconds.append(time.perf_counter() - start)
            entry[name] = min(seconds)
        entry["same"] = torch.equal(masks["radix"], masks["gather"])
        found.append(entry)
    return found


def _traffic(function: Any, *arguments: Any) -> int:
    """Bytes this rank hands to collectives in one call."""
    sent = [0]
    originals = {"all_reduce": dist.all_reduce, "all_gather": dist.all_gather}

    def counted(name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            tensor = given[0] if name == "all_reduce" else given[1]
            sent[0] += tensor.numel() * tensor.element_size()
            return originals[name](*given, **options)

        return call

    for name in originals:
        setattr(dist, name, counted(name))
    try:
        function(*arguments)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return sent[0]


def merged(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The slowest rank's times, the largest traffic,
    and whether all ranks chose alike both ways.
    """
    return [
        {
            name: all(entry[name] for entry in entries)
            if name == "same"
            else max(entry[name] for entry in entries)
            for name in entries[0]
        }
        for entries in zip(*ranks, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 4_000_000]
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rows = merged(run_distributed(on_rank, options.ranks, options.sizes, options.rounds))
    table = Table(title=f"{SHARE:.0%} largest over {options.ranks} gloo ranks, one thread each")
    for name in ("values", "radix ms", "gather ms", "radix KiB", "gather KiB", "same tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        times = (f"{row['radix'] * 1e3:.1f}", f"{row['gather'] * 1e3:.1f}")
        table.add_row(
            f"{row['values']:,}",
            *times,
            f"{row['radix_bytes'] >> 10}",
            f"{row['gather_bytes'] >> 10}",
            str(row["same"]),
        )
    Console(width=100).print(table)
    if options.json:
        document = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "ranks": options.ranks,
        }
        options.json.write_text(json.dumps({**document, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
