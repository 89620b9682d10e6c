"""Prompts to the rollout workers of all ranks, and judged groups back: the rank that sampled a
group holds its tokens, the others its RolloutMeta.

Every rank knows the rewards, versions and lengths of all rollouts, so that all ranks choose and
pack the same batch. Tokens and texts stay on the holder until `pack` sends the tokens to the ranks
that train on them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_stare.collect.journal import (
    PartialRollouts,
    group_frames,
    groups_in,
    partial_frames,
    partial_in,
)
from megatron_stare.collect.rollout_worker import RolloutWorker
from megatron_stare.collect.sampling_settings import Resampling
from megatron_stare.numerics.exchange import all_gather_bytes
from megatron_stare.policy.checkpoints.actor_state import ShardedBytes
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group, Prompt, RolloutMeta
from megatron_stare.rollout.engine import Engine

_FIELDS = [each.name for each in dataclasses.fields(RolloutMeta)]


@dataclass(frozen=True)
class RolloutWorkers:
    """The workers of a run, one on each of `ranks`; `own` is this rank's, if it has one."""

    ranks: Sequence[int]
    own: RolloutWorker | None


@dataclass(frozen=True)
class SamplingRound:
    """The prompts of `start_round`."""

    engine: Engine
    topology: Topology
    ranks: Sequence[int]  # that samples each prompt
    mine: Sequence[Future[Group]]  # those of this rank

    def finish(self) -> list[Group]:
        """The judged groups in prompt order, on every rank; only the rank that sampled a group has
        its tokens. A failure on one rank is raised on all. Collective.
        """
        agreed(self.topology, lambda: self.engine.wait(self.mine))
        mine = [group.result() for group in self.mine]
        everyone = [iter(groups) for groups in all_gather_groups(mine, self.topology)]
        return [next(everyone[rank]) for rank in self.ranks]


def start_round(
    engine: Engine,
    workers: RolloutWorkers,
    prompts: Sequence[Prompt],
    topology: Topology,
    again: Resampling | None = None,
) -> SamplingRound:
    """Send each prompt to its worker, under the engine's weights; with `again` for more rollouts of
    a judged prompt.
    """
    ranks = [workers.ranks[prompt.index % len(workers.ranks)] for prompt in prompts]
    mine: list[Future[Group]] = []
    if workers.own is not None:
        own = [p for p, rank in zip(prompts, ranks, strict=True) if rank == topology.rank]
        workers.own.set_step(engine.version)
        mine = workers.own.start(own, resampling=again)
    return SamplingRound(engine, topology, ranks, mine)


def all_gather_groups(groups: Sequence[Group], topology: Topology) -> list[list[Group]]:
    """The groups of each rank, on every rank; with tokens on their own rank only. Collective."""
    if topology.world_size == 1:
        return [list(groups)]
    own = [dataclasses.replace(group, holder=topology.rank) for group in groups]
    rows = all_gather_bytes(json.dumps([_meta_row(group) for group in own]).encode(), topology.host)
    return [
        own if rank == topology.rank else [_meta_group(row, rank) for row in json.loads(content)]
        for rank, content in enumerate(rows)
    ]


def scatter_groups(
    groups: Sequence[Group], topology: Topology, ranks: Sequence[int] = ()
) -> list[Group]:
    """Groups that every rank has read with their tokens; each of `ranks`, by default all, becomes
    the holder of some, in turn, and the others keep the metadata.
    """
    if topology.world_size == 1:
        return list(groups)
    ranks = ranks or range(topology.world_size)
    holders = [ranks[place % len(ranks)] for place in range(len(groups))]
    return [
        dataclasses.replace(group, holder=rank)
        if rank == topology.rank
        else _meta_group(_meta_row(group), rank)
        for group, rank in zip(groups, holders, strict=True)
    ]


def group_state(groups: Sequence[Group], topology: Topology) -> Tensor | ShardedBytes:
    """The groups as bytes for a checkpoint (journal.py): each rank writes those that it holds, with
    their places among all. Collective.
    """
    places: Sequence[int] = range(len(groups))
    if topology.world_size > 1:
        places = [place for place in places if groups[place].holder == topology.rank]
    return _stored(group_frames((place, groups[place]) for place in places), topology)


def groups_of(state: Tensor) -> list[Group]:
    """The groups of `group_state`, of all ranks. ValueError: a frame is damaged."""
    return groups_in(state.numpy().tobytes())


def partial_state(partial: PartialRollouts, topology: Topology) -> Tensor | ShardedBytes:
    """The rollouts of prompts that are not judged, of this rank's worker, as bytes for a
    checkpoint. Collective.
    """
    return _stored(partial_frames(partial), topology)


def partial_of(state: Tensor) -> PartialRollouts:
    """The rollouts of `partial_state`, of all ranks. ValueError: a frame is damaged."""
    return partial_in(state.numpy().tobytes())


def _stored(frames: Iterable[bytes], topology: Topology) -> Tensor | ShardedBytes:
    """The frames of all ranks as one entry of a checkpoint, in rank order. Collective."""
    # One copy: the frames of a run with long responses are gigabytes.
    part = torch.from_numpy(numpy.asarray(memoryview(bytearray().join(frames))))
    sizes = topology.gather(len(part))
    if topology.world_size == 1 or not any(sizes):
        return part
    return ShardedBytes(part, sum(sizes[: topology.rank]), sum(sizes))


def _meta_row(group: Group) -> list[Any]:
    """The metadata of a group that every rank receives, as plain values."""
    rollouts = [[getattr(rollout, name) for name in _FIELDS] for rollout in group.rollouts]
    return [group.prompt.index, group.prompt_length, group.prompt_key, rollouts]


def _meta_group(row: list[Any], holder: int) -> Group:
    """The group of `_meta_row`; rank `holder` has its tokens."""
    index, prompt_length, prompt_key, rollouts = row
    metas = tuple(RolloutMeta(**dict(zip(_FIELDS, values, strict=True))) for values in rollouts)
    prompt = Prompt(index, numpy.zeros(0, numpy.int32), label="")
    return Group(prompt, metas, holder, prompt_length, prompt_key)
