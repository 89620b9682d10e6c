"""K4: one rank of every recipe in an imagined world: its peak of memory, and the seconds of
its own work, against the plan.

The rank holds its own shards with random weights and takes two steps on micro-batches that are full
to policy.max_tokens_per_gpu. Nothing is sent: what others would send is this rank's own, or what
the memory held. So sizes are true, and values are not.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.commands.gpuday.kernels import peak_bytes
from megatron_stare.commands.gpuday.models import made_up_groups, model_of
from megatron_stare.commands.gpuday.rows import Day, Measurement, at_least, at_most, holds
from megatron_stare.config import Config, override
from megatron_stare.debug.cluster import synchronize
from megatron_stare.losses import find_objective
from megatron_stare.numerics.selection import Across
from megatron_stare.planning.machine import H100
from megatron_stare.planning.plan import GIB, RunPlan, make_plan
from megatron_stare.planning.shapes import model_shape, stage_counts
from megatron_stare.planning.work import Tokens, largest_share, training
from megatron_stare.policy import model
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.topology import Topology
from megatron_stare.recipes import CLUSTERS, find_recipe
from megatron_stare.records import RoutingShape

PROMPT, MICRO_BATCHES, STEPS = 64, 2, 2
LAST = (f"score {STEPS}", f"update {STEPS}")
LARGEST = "long_cot_32b"  # it is also run with expandable segments
REHEARSED = ("short_cot_7b", "short_cot_14b")
Work = Callable[..., Any]  # run(name, function, *arguments, **settings): its result


def run(day: Day) -> Iterator[Measurement]:
    """Peaks of torch's allocator of the first rank of every recipe, what it reserves, and seconds;
    then the matrix_share with which the planner would have found those of dense models.
    """
    _answer()
    names = REHEARSED if day.rehearsal else tuple(CLUSTERS)
    ratios: list[float] = []
    for name in names:
        ratios += yield from _rows(day, name, name)
    if not (day.rehearsal and day.gpus):  # the null device has no expandable segments
        if torch.cuda.is_available():
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        again = names[0] if day.rehearsal else LARGEST
        yield from _rows(day, again, f"{again}, expandable")
    if ratios:
        share, name = H100.matrix_share * statistics.median(ratios), "matrix_share"
        yield at_least("matrix_share of dense models", share, H100.matrix_share, "of peak", name)


def _rows(day: Day, name: str, title: str) -> Generator[Measurement, None, list[float]]:
    """The rows of a recipe: its peaks [GiB], and the seconds of the second step. A recipe that
    fails, perhaps for memory, does not end those after it. The result: the planned seconds over the
    measured ones, of a dense model.
    """
    plan = make_plan(override(find_recipe(name), _words(day, name)), CLUSTERS[name])
    updated, fault, own, allocated = False, "", 0.0, 0.0

    def timed(part: str, work: Work, *arguments: Any, **settings: Any) -> Any:
        nonlocal own
        synchronize()
        begin = time.perf_counter()
        result = work(*arguments, **settings)
        synchronize()
        own += (part in LAST) * (time.perf_counter() - begin)
        return result

    def two_steps() -> None:
        nonlocal updated
        with topologies.imagined(plan.config.policy, 0, plan.sizes.world) as topology:
            updated = steps(plan.config, topology, timed)[2]

    gc.collect()
    topologies.release_workspaces()
    left = torch.cuda.memory_allocated()  # by the recipes before
    try:
        allocated = peak_bytes(two_steps) / GIB
    except Exception as error:
        traceback.print_exc()
        fault = f"{type(error).__name__}: {error}"
    yield holds(f"{title}: two steps of rank 0 of {plan.sizes.world}", updated, fault)
    if not (updated and allocated):  # a CPU has no peak
        return []
    planned = (plan.worst.training - plan.worst.communication) / GIB
    reserved, seconds = (torch.cuda.max_memory_reserved() - left) / GIB, _seconds(plan)
    yield at_most(f"{title}: allocated", allocated, planned, "GiB")
    yield at_most(f"{title}: reserved", reserved, allocated, "GiB")
    yield at_most(f"{title}: score and update, nothing sent", own, seconds, "s")
    return [] if plan.shape.experts else [seconds / own]


def _seconds(plan: RunPlan) -> float:
    """The plan's seconds of one of the rank's steps without its messages."""
    config, data = plan.config, plan.sizes.data
    count, response = _full(config)
    tokens = Tokens(data * count, PROMPT, response, equal=True)
    counts = stage_counts(model_shape(config.policy.hf_checkpoint), config.policy, plan.sizes.world)
    work = training(config, plan.shape, tuple(counts), plan.sizes, tokens, plan.machine)
    alone = largest_share(tokens, plan.sizes, config.train.num_steps_per_rollout)
    return work.compute_seconds / alone + work.optimizer_seconds


def _full(config: Config) -> tuple[int, int]:
    """Sequences of a data rank that fill its micro-batches, and the tokens of each response."""
    budget = config.policy.sequence_budget
    each = budget // -(-budget // config.longest_sequence)  # nothing of the budget is left
    return MICRO_BATCHES * (budget // each), each - PROMPT + 1 - 16  # alignment


def _words(day: Day, name: str) -> list[str]:
    """The recipe's overrides: a model directory without weights; a tiny model in a rehearsal."""
    if day.rehearsal:
        sizes = ["policy.max_tokens_per_gpu=256", "rollout.rollout_max_response_len=192"]
        tiny = f"policy.hf_checkpoint={model_of(day)}"
        return [tiny, "data.rollout_max_prompt_len=64", *sizes]
    folder = day.path / "models" / f"shape-{name}"
    model_shape(find_recipe(name).policy.hf_checkpoint).save_pretrained(folder)
    return [f"policy.hf_checkpoint={folder}"]


def steps(config: Config, topology: Topology, run: Work) -> tuple[Actor, Any, bool]:
    """The actor and batch of two steps, whose parts are passed to `run` with their names; and
    whether every update found finite gradients. Every data rank has micro-batches full of the
    longest sequences. Where there are experts, each gets as many of the tokens as every other
    (policy.routing_replay=rollout).
    """
    model.hf_weights.load_hf = _random  # type: ignore[assignment]
    actor = run("build", Actor, config, topology, 1000)
    objective = find_objective(config.loss.name)
    count, response = _full(config)
    shape = actor.routers.shape if actor.routers else None
    routing = _balanced(shape, PROMPT + response - 1) if shape else None
    groups = made_up_groups(topology.data_size * count, PROMPT, (response,), routing)
    batch = run("pack", actor.pack, groups, 0)
    bound, updated = objective.bind(config.loss), True
    for step in range(1, STEPS + 1):
        scored = run(f"score {step}", actor.score, batch, sensitivity=True)
        # All ranks hold the same tokens, and a plan over all of them wants each once.
        signals = run(f"plan {step}", objective.plan, scored, config.loss, Across(), {})
        updated &= bool(run(f"update {step}", actor.update, scored, bound, signals)[0])
    return actor, batch, updated


@torch.no_grad()
def _random(chunks: list[Any], *_: Any) -> None:
    """Random weights in place of a checkpoint's: no size changes."""
    for parameter in (value for chunk in chunks for value in chunk.parameters()):
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)


def _balanced(shape: RoutingShape, positions: int) -> numpy.ndarray:
    """Token t goes to the experts K t, ..., K t + K - 1 modulo their number, in every layer."""
    places = (positions, len(shape.layers), shape.top_k)
    choices = numpy.arange(positions * shape.top_k).reshape(positions, 1, shape.top_k)
    return shape.encoded(numpy.broadcast_to(choices % shape.experts, places))


def _answer() -> None:
    """Let outputs of collectives that no process fills be finite: this rank's own, or zero.
    torch's "fake" groups copy for gathers alone.
    """

    def filled(output: Tensor, given: Tensor, *_: Any, **settings: Any) -> Any:
        size = min(output.numel(), given.numel())
        output.zero_().view(-1)[:size].copy_(given.reshape(-1)[:size])
        return dist.all_reduce(output, async_op=True) if settings.get("async_op") else None

    def received(operations: list[dist.P2POp]) -> list[Any]:
        for one in operations:
            if one.op is dist.irecv:
                one.tensor.zero_()
        return []

    for name in ("reduce_scatter_tensor", "all_to_all_single"):
        setattr(dist, name, filled)
    dist.batch_isend_irecv = received  # type: ignore[assignment]
