#!/usr/bin/env python
"""The planner's memory against the real model's: what autograd keeps and what the optimizer holds,
on tiny models under several layouts, on this CPU.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/planner.py

One update of the real Actor runs in real gloo ranks. Every tensor that is saved for the backward
pass is counted from when it is saved to when it is freed, each storage once and without the model's
own parameters. The peak over the schedule, and the bytes of the optimizer's moments and fp32
copies, are compared with planning/memory.py. Ratios are planned / measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_stare.config import Config, LossConfig, PolicyConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.planning.memory import optimizer_bytes, stage_bytes
from megatron_stare.planning.shapes import model_shape, sizes, stage_counts
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.huggingface.shape import shape_of
from megatron_stare.policy.optimizer import MOMENTS, mains
from megatron_stare.records import Group, Prompt, Rollout
from tests.distributed import run_distributed
from tests.tiny_models import tiny_config, write_checkpoint

TP, PP, CP, EP = (
    f"policy.{name}_parallel_size=2"
    for name in ("tensor_model", "pipeline_model", "context", "expert_model")
)
SP, SPREAD = "policy.sequence_parallel=true", "policy.use_distributed_optimizer=true"
FULL, HALF = "policy.recompute_granularity=full", "policy.dtype=bf16"
SELECTIVE = "policy.recompute_granularity=selective"
# name -> (family, ranks, overrides)
LAYOUTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "one rank": ("qwen2", 1, (HALF,)),
    "one rank, full recompute": ("qwen3", 1, (HALF, FULL)),
    "one rank, core attention again": ("qwen2", 1, (HALF, SELECTIVE)),
    "one rank, MLP again": ("qwen3", 1, (HALF, SELECTIVE, "policy.recompute_modules=mlp")),
    "one rank, experts again": (
        *("qwen3_moe", 1),
        (HALF, SELECTIVE, "policy.recompute_modules=moe"),
    ),
    "one rank, delta nets": ("qwen3_5_text", 1, (HALF,)),
    "one rank, delta nets in fp32": ("qwen3_5_text", 1, ()),
    "one rank, delta nets, full recompute": ("qwen3_5_text", 1, (HALF, FULL)),
    "TP2 SP, delta nets and experts": ("qwen3_5_moe_text", 2, (TP, SP, HALF)),
    "TP2": ("qwen3", 2, (TP,)),
    "TP2 SP": ("qwen2", 2, (TP, SP, HALF)),
    "PP2": ("qwen2", 2, (PP, HALF)),
    "CP2, distributed optimizer": ("qwen3", 2, (CP, HALF, SPREAD)),
    "DP2, distributed optimizer": ("qwen2", 2, (SPREAD,)),
    "TP2 SP EP2, whole experts": (
        *("qwen3_moe", 2),
        (TP, SP, EP, HALF, "policy.expert_tensor_parallel_size=1"),
    ),
}
BUDGET, SEQUENCES, LENGTH = 512, 16, 128  # tokens on a rank, tokens of a sequence


@dataclass(frozen=True)
class Measurement:
    """Bytes on one rank."""

    layout: str
    rank: int
    stage: int
    activations: int
    optimizer: int


@dataclass(frozen=True)
class Compared:
    """Bytes on one rank, planned and measured."""

    measured: Measurement
    activations: float
    optimizer: float

    @property
    def ratios(self) -> tuple[float, float]:
        """Planned / measured: of activations, of optimizer state."""
        return (
            self.activations / self.measured.activations,
            self.optimizer / self.measured.optimizer,
        )


@contextmanager
def kept_bytes(parameters: Iterator[Tensor]) -> Iterator[list[int]]:
    """[peak] of the bytes that saved tensors hold alive at a time; a storage counts once, and with
    the bytes it has then: recomputation empties some.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    holders: Counter[int] = Counter()
    storages: dict[int, torch.UntypedStorage] = {}
    peak = [0]

    class Kept:
        """The object that autograd holds instead of the tensor."""

        def __init__(self, value: Tensor) -> None:
            self.value = value

    def release(place: int) -> None:
        holders[place] -= 1
        if not holders[place]:
            del storages[place]

    def keep(value: Tensor) -> Kept:
        kept, storage = Kept(value), value.untyped_storage()
        if storage.data_ptr() not in own:
            place = storage._cdata
            holders[place] += 1
            storages[place] = storage
            weakref.finalize(kept, release, place)
            peak[0] = max(peak[0], sum(one.nbytes() for one in storages.values()))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.value):
        yield peak


def config_of(layout: str, directory: str) -> Config:
    """The layout's run on its tiny model."""
    family, _, overrides = LAYOUTS[layout]
    places = (f"policy.hf_checkpoint={directory}/{family}", f"policy.max_tokens_per_gpu={BUDGET}")
    return override(Config(), [*places, *overrides])


def measured(rank: int, world: int, directory: str, layouts: list[str]) -> list[Measurement]:
    """This rank's bytes under each of the layouts."""
    found = []
    for name in layouts:
        config = config_of(name, directory)
        actor = Actor(config, topologies.start(config.policy), 1)
        batch, settings = actor.score(actor.pack(_groups(), 0)), LossConfig(name="grpo_ds")
        objective = find_objective("grpo_ds")
        signals = objective.plan(batch, settings, actor.topology.across, {})
        parameters = (one for chunk in actor.chunks for one in chunk.parameters())
        with kept_bytes(parameters) as peak:
            actor.update(batch, objective.bind(settings), signals)
        stage = actor.topology.pipeline_rank
        found.append(Measurement(name, rank, stage, peak[0], _optimizer_bytes(actor)))
    return found


def compared(found: Measurement, directory: str) -> Compared:
    """The plan of that rank next to what was measured on it."""
    config, world = config_of(found.layout, directory), LAYOUTS[found.layout][1]
    hf, policy = model_shape(config.policy.hf_checkpoint), config.policy
    counts, group = stage_counts(hf, policy, world)[found.stage], sizes(policy, world)
    return Compared(
        measured=found,
        activations=stage_bytes(counts, shape_of(hf), policy, group, transformer_engine=False),
        optimizer=optimizer_bytes(counts, policy, group),
    )


def _optimizer_bytes(actor: Actor) -> int:
    total = 0
    for part in actor.optimizer.chained_optimizers:
        for parameter, _, main in mains(part):
            state = part.optimizer.state.get(main, {})
            total += sum(state[moment].nbytes for moment in MOMENTS if moment in state)
            total += main.nbytes if main.dtype != parameter.dtype else 0
    return total


def _groups() -> list[Group]:
    generator = numpy.random.default_rng(0)

    def rollout(advantage: float) -> Rollout:
        count = LENGTH - 15
        return Rollout(
            response_ids=generator.integers(1, 500, count),
            logprobs=numpy.full(count, -1.0),
            loss_mask=numpy.ones(count, bool),
            status="completed",
            weight_version=0,
            advantage=advantage,
        )

    return [
        Group(Prompt(number, generator.integers(1, 500, 16), label=""), (rollout(1), rollout(-1)))
        for number in range(SEQUENCES // 2)
    ]


def write_models(directory: Path) -> None:
    """Tiny checkpoints with the proportions of real ones."""
    for family in {family for family, _, _ in LAYOUTS.values()}:
        config = tiny_config(
            family, hidden_size=64, intermediate_size=160, num_hidden_layers=4, vocab_size=512
        )
        write_checkpoint(directory / family, config)


def measure(directory: Path, layouts: Iterable[str] = LAYOUTS) -> list[Compared]:
    """Each of the layouts on each of its ranks; one world for each number of ranks."""
    write_models(directory)
    found: list[Measurement] = []
    for world in sorted({LAYOUTS[name][1] for name in layouts}):
        names = [name for name in layouts if LAYOUTS[name][1] == world]
        for its in run_distributed(measured, world, str(directory), names):
            found += its
    return [compared(one, str(directory)) for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    table = Table("layout", "rank", "activations", "ratio", "optimizer", "ratio")
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), parser.parse_args().layouts)
    for row in sorted(rows, key=lambda row: list(LAYOUTS).index(row.measured.layout)):
        kept, state = (f"{ratio:.3f}" for ratio in row.ratios)
        megabytes = (row.measured.activations / 1e6, row.measured.optimizer / 1e6)
        table.add_row(
            *(row.measured.layout, str(row.measured.rank)),
            *(f"{megabytes[0]:.3f} MB", kept, f"{megabytes[1]:.3f} MB", state),
        )
    Console(width=100).print(table)
    begin = time.perf_counter()
    policy = PolicyConfig(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        context_parallel_size=2,
        sequence_parallel=True,
        dtype="bf16",
    )
    stage_counts(model_shape("Qwen2.5-32B"), policy, 512)
    print(f"Qwen2.5-32B on 512 ranks, counted in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
