"""The cost of a batch on its ranks: metadata, exchange, pack; on worlds of gloo ranks."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._fake_rollouts import SAMPLES
from benchmarks._measuring import PeakMemory
from megatron_stare.collect.rounds import all_gather_groups
from megatron_stare.config import PolicyConfig
from megatron_stare.policy import packing
from megatron_stare.records import Group, Prompt, Rollout, TokenBatch
from tests.distributed import run_distributed

PROMPT, HIDDEN = 200, 4096
PHASES = ("metadata", "exchange", "pack")


@dataclasses.dataclass
class Place:
    """Data-parallel ranks: all that metadata and packing read of a Topology."""

    rank: int
    world_size: int
    context_size: int = 1
    context_rank: int = 0
    tensor_size: int = 1
    pipeline_size: int = 1
    virtual_size: int = 1

    @property
    def data_size(self) -> int:
        return self.world_size

    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def host(self) -> Any:
        return dist.group.WORLD

    def ranks_of_tokens(self, data_rank: int, context_rank: int) -> tuple[int, ...]:
        return (data_rank,)


@dataclasses.dataclass(frozen=True)
class Rank:
    """The measurements of one rank. `beyond`: the peak above its memory before and after."""

    seconds: dict[str, float]
    sent: dict[str, int]
    beyond: dict[str, int | None]
    held_tokens: int
    trained_tokens: int


def lengths(rollouts: int, tokens: int) -> numpy.ndarray:
    """The length of every rollout's response, 1 to `tokens`."""
    return numpy.random.default_rng(0).integers(1, tokens + 1, rollouts)


def world(size: int, rollouts: int, tokens: int) -> list[Rank]:
    """Every rank's figures."""
    return run_distributed(_rank, size, rollouts, tokens, timeout_s=3600.0)


def packed(rollouts: int, tokens: int, budget: int) -> tuple[float, int, int]:
    """For the rollouts of a single rank: processor seconds of `pack`, the tokens that are
    trained, and the micro-batches.
    """
    groups = _own_groups(0, 1, lengths(rollouts, tokens))
    policy = PolicyConfig(max_tokens_per_gpu=budget)
    place: Any = Place(0, 1)
    began = time.process_time()
    batch = packing.pack(groups, place, policy, hidden_size=HIDDEN, weight_version=3)
    return time.process_time() - began, len(batch.advantage_T), len(batch.microbatches)


def _rank(rank: int, size: int, rollouts: int, tokens: int) -> Rank:
    place: Any = Place(rank, size)
    own = _own_groups(rank, size, lengths(rollouts, tokens))
    policy = PolicyConfig(max_tokens_per_gpu=tokens + PROMPT)
    seconds: dict[str, float] = {}
    fetched: dict[str, Any] = {}
    deliver = packing.deliver

    def delivered(*given: Any) -> dict[int, numpy.ndarray]:
        began = time.process_time()
        with PeakMemory(torch.device("cpu")) as peak:
            found = deliver(*given)
        arrived = sum(content.nbytes for content in found.values())
        fetched.update(arrived=arrived, beyond=_less(peak.bytes, arrived))
        seconds["exchange"] = time.process_time() - began
        return found

    with _traffic() as sent:
        began = time.process_time()
        with PeakMemory(torch.device("cpu")) as metadata:
            received = [iter(part) for part in all_gather_groups(own, place)]
        known = [next(received[number % size]) for number in range(rollouts // SAMPLES)]
        seconds["metadata"] = time.process_time() - began
        before = Counter(sent)
        dist.barrier()
        packing.deliver = delivered
        try:
            began = time.process_time()
            with PeakMemory(torch.device("cpu")) as peak:
                batch = packing.pack(known, place, policy, hidden_size=HIDDEN, weight_version=3)
            whole = time.process_time() - began
        finally:
            packing.deliver = deliver
    seconds["pack"] = whole - seconds.setdefault("exchange", 0.0)
    share = _bytes_of(batch)
    return Rank(
        seconds,
        {"metadata": before.total(), "exchange": (sent - before).total()},
        {
            "metadata": metadata.bytes,
            "exchange": fetched.get("beyond", 0),
            # its peak begins after the exchange's, whose counter is one with it
            "pack": _less(peak.bytes, share + fetched.get("arrived", 0)),
        },
        sum(rollout.length for group in own for rollout in group.rollouts),
        len(batch.advantage_T),
    )


def _own_groups(rank: int, size: int, length_n: numpy.ndarray) -> list[Group]:
    random, made = numpy.random.default_rng(rank), []
    for index in range(rank, len(length_n) // SAMPLES, size):
        rollouts = [
            Rollout(
                random.integers(0, 1 << 17, count, numpy.int32),
                -random.random(count, numpy.float32),
                numpy.ones(count, numpy.bool_),
                status="completed",
                weight_version=3,
                reward=float(number % 2),
                advantage=1.0 - 2.0 * (number % 2),
                episode={"turns": 1.0},
                verdict="correct" if number % 2 else "wrong",
                reward_parts={"math": float(number % 2)},
            )
            for number, count in enumerate(length_n[index * SAMPLES : (index + 1) * SAMPLES])
        ]
        prompt = Prompt(index, random.integers(0, 1 << 17, PROMPT, numpy.int32), "label")
        made.append(Group(prompt, tuple(rollouts)))
    return made


@contextmanager
def _traffic() -> Iterator[Counter[str]]:
    """Bytes that this rank sends: of a sum over R ranks 2 (R - 1) / R of it, as a ring does."""
    sent: Counter[str] = Counter()
    isend, all_reduce = dist.isend, dist.all_reduce

    def sending(tensor: torch.Tensor, *rest: Any) -> Any:
        sent["isend"] += tensor.nbytes
        return isend(tensor, *rest)

    def reducing(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        size = dist.get_world_size()
        sent["all_reduce"] += 2 * (size - 1) * tensor.nbytes // size
        return all_reduce(tensor, *rest, **named)

    dist.isend, dist.all_reduce = sending, reducing
    try:
        yield sent
    finally:
        dist.isend, dist.all_reduce = isend, all_reduce


def _bytes_of(batch: TokenBatch) -> int:
    """The bytes of all its tensors."""
    holders: Sequence[Any] = (batch, *batch.microbatches)
    values = [getattr(one, each.name) for one in holders for each in dataclasses.fields(one)]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _less(peak: int | None, known: int) -> int | None:
    return None if peak is None else max(0, peak - known)
