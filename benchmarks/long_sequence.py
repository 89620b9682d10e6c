"""Peak memory and time of one training step on long packed sequences,
whole and under context parallelism.

    OMP_NUM_THREADS=1 python benchmarks/long_sequence.py       4k, 8k, 16k tokens; one rank, and two
    OMP_NUM_THREADS=1 python benchmarks/long_sequence.py --recompute full --context 2
    OMP_NUM_THREADS=1 python benchmarks/long_sequence.py --json long.json

One step is Actor.update with the dapo loss and the fused head: forward, backward, clip, AdamW.
Every case is one packed micro-batch: one sequence alone, or one of half the tokens next to shorter
ones. "peak" is by how much Linux's VmHWM rises in that step over the resident memory before it, of
the rank on which it rises most; weights, gradients and optimizer state are there before, a first
short step has made them. "bytes per token" divides the peak by all tokens of the micro-batch;
"added" is the growth since the case of half as many tokens, per token: constant where memory is
linear. "score tensor" is one layer's [heads, S, S] in fp32, which the step never makes; Megatron's
local attention would keep several. glibc is set to give freed memory back at once, which costs
time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import PeakMemory, machine
from tests.distributed import run_distributed
from tests.tiny_models import tiny_config, write_checkpoint

HEADS, WARM_UP = 4, 256
# glibc maps every larger tensor by itself, so that freed memory leaves the counters at once.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}
Case = tuple[str, list[int]]


def cases(longest: int) -> list[Case]:
    """(name, sequence lengths): a quarter, a half and all of `longest` alone,
    then all of it in a pack.
    """
    alone = [(f"1 x {length}", [length]) for length in (longest // 4, longest // 2, longest)]
    mixed = [longest // 2, longest // 4, longest // 8, longest // 8]
    return [*alone, (f"packed {' + '.join(map(str, mixed))}", mixed)]


def groups_of(lengths: list[int], vocabulary: int) -> list[Any]:
    """One group per sequence: a prompt of 16 tokens and a response that
    fills it up to `length` input positions.
    """
    from megatron_stare.records import Group, Prompt, Rollout

    generator = torch.Generator().manual_seed(0)
    made = []
    for number, length in enumerate(lengths):
        token_ids = torch.randint(1, vocabulary, (length + 1,), generator=generator).numpy()
        size = length + 1 - 16
        rollout = Rollout(
            response_ids=token_ids[16:],
            logprobs=numpy.full(size, -7.0),
            loss_mask=numpy.ones(size, bool),
            status="completed",
            weight_version=0,
            advantage=1.0 - 0.5 * (number % 2),
        )
        made.append(Group(Prompt(number, token_ids[:16], ""), (rollout,)))
    return made


def train(
    rank: int, world_size: int, checkpoint: str, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """On every rank: one update per case, its loss, gradient norm,
    seconds and peak memory on this rank.
    """
    from megatron_stare.config import Config, override
    from megatron_stare.losses import find_objective
    from megatron_stare.policy import topology as topologies
    from megatron_stare.policy.actor import Actor

    config = override(
        Config(),
        [
            f"policy.hf_checkpoint={checkpoint}",
            f"policy.context_parallel_size={world_size}",
            f"policy.max_tokens_per_gpu={settings['tokens'] // world_size}",
            f"policy.recompute_granularity={settings['recompute']}",
            f"policy.head_workspace_mib={settings['workspace_mib']}",
            "loss.name=dapo",
            "optimizer.lr=1e-5",
        ],
    )
    objective, rows = find_objective("dapo"), []
    topology = topologies.start(config.policy)
    actor = Actor(config, topology, 10)
    for name, lengths in [("warm-up", [WARM_UP]), *cases(settings["tokens"])]:
        batch = actor.pack(groups_of(lengths, settings["vocabulary"]), 0)
        assert len(batch.microbatches) == 1 and batch.microbatches[0].cumulative_lengths is not None
        signals = objective.plan(batch, config.loss, topology.across, {})
        gc.collect()
        start = time.perf_counter()
        with PeakMemory(torch.device("cpu")) as peak:
            metrics, seen = actor.update(batch, objective.bind(config.loss), signals)
        seconds = time.perf_counter() - start
        assert seen.surprisal_T is not None, "the update has seen it"
        surprisal = topology.across.mean(seen.surprisal_T)
        found = {"case": name, "tokens": sum(lengths), "seconds": seconds, "surprisal": surprisal}
        rows.append(
            found | {"grad_norm": metrics["grad_norm"], "peak": peak.bytes, "longest": max(lengths)}
        )
        del batch, seen, signals
    return rows[1:]


def measure(options: argparse.Namespace) -> dict[int, list[dict[str, Any]]]:
    """Rows per context-parallel size;
    the slowest rank's time, the largest rank's peak, what every rank agrees on.
    """
    os.environ.update(MALLOC)
    disable_progress_bar()
    settings = {
        "tokens": options.tokens,
        "recompute": options.recompute,
        "workspace_mib": options.workspace_mib,
        "vocabulary": options.vocabulary,
    }
    found: dict[int, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="long-") as folder:
        config = tiny_config(
            "qwen2",
            vocab_size=options.vocabulary,
            hidden_size=64,
            intermediate_size=176,
            max_position_embeddings=options.tokens,
        )
        write_checkpoint(Path(folder), config)
        for size in options.context:
            ranks = run_distributed(train, size, folder, settings)
            found[size] = [
                first
                | {
                    "seconds": max(row["seconds"] for row in all_),
                    "ranks": [row["peak"] for row in all_],
                }
                for first, all_ in ((rows[0], rows) for rows in zip(*ranks, strict=True))
            ]
    return found


def report(
    found: dict[int, list[dict[str, Any]]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Print the table; return its rows."""
    title = (
        f"one packed micro-batch, hidden 64, 2 layers, {HEADS} heads / 2 KV, vocabulary "
        f"{options.vocabulary}, fp32, "
    )
    table = Table(
        title=title + f"fused head ({options.workspace_mib} MiB), recompute {options.recompute}"
    )
    left = ("CP", "micro-batch")
    columns = (
        *left,
        "s",
        "peak MiB",
        "bytes per token",
        "added",
        "score tensor MiB",
        "surprisal",
        "grad norm",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    rows: list[dict[str, Any]] = []
    for size, many in found.items():
        previous: dict[str, Any] | None = None
        for row in many:
            peak = max(row["ranks"])
            row |= {
                "context": size,
                "bytes_per_token": peak / row["tokens"],
                "scores": HEADS * row["longest"] ** 2 * 4,
            }
            if previous and row["tokens"] == 2 * previous["tokens"]:
                row["added_per_token"] = (peak - max(previous["ranks"])) / (
                    row["tokens"] - previous["tokens"]
                )
            previous = row
            rows.append(row)
            added = f"{row['added_per_token']:.0f}" if "added_per_token" in row else ""
            memory = (
                f"{peak / 2**20:.0f}",
                f"{row['bytes_per_token']:.0f}",
                added,
                f"{row['scores'] / 2**20:.0f}",
            )
            statistics = (f"{row['surprisal']:.6f}", f"{row['grad_norm']:.6f}")
            table.add_row(str(size), row["case"], f"{row['seconds']:.1f}", *memory, *statistics)
        table.add_section()
    Console(width=132).print(table)
    return rows


def agreement(found: dict[int, list[dict[str, Any]]]) -> float:
    """The largest relative difference of surprisal and gradient norm
    between the context-parallel sizes.
    """
    first, *others = found.values()
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    names = ("surprisal", "grad_norm")
    return max(
        (abs(a[name] - b[name]) / abs(a[name]) for a, b in pairs for name in names), default=0.0
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=16_384, help="of the largest micro-batch, over all ranks"
    )
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--workspace-mib", type=int, default=4, help="of the fused head")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    parser.add_argument(
        "--context", type=int, nargs="+", default=[1, 2], help="context-parallel sizes to run"
    )
    parser.add_argument("--json", type=Path, help="write the table and the machine here")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    if not Path("/proc/self/clear_refs").exists():
        print("long_sequence.py needs Linux's peak counter (/proc/self/clear_refs)")
        return
    found = measure(options)
    rows = report(found, options)
    if len(found) > 1:
        print(
            "largest relative difference of surprisal and gradient norm between the layouts: "
            f"{agreement(found):.1e}"
        )
    if options.json:
        document = {"machine": machine(torch.device("cpu")), "options": vars(options), "rows": rows}
        options.json.write_text(json.dumps(document, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
