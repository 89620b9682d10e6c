"""Groups whole on the rank that sampled them, in outline on all others.

What decides over a batch (rewards, versions, lengths, counts) every rank knows of all rollouts, so
that all choose, number and pack alike; the tokens and texts stay where they are until `pack` sends
the tokens to those that train on them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from torch import Tensor

from megatron_stare.collect.frames import group_frames
from megatron_stare.numerics.exchange import gather_bytes
from megatron_stare.policy.checkpoints.actor_state import ShardedBytes
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, RolloutMeta

_FIELDS = [each.name for each in dataclasses.fields(RolloutMeta)]


def shared(groups: Sequence[Group], topology: Topology) -> list[list[Group]]:
    """Each rank's groups, on every rank: whole on theirs, in outline on others. Collective."""
    if topology.world_size == 1:
        return [list(groups)]
    own = [dataclasses.replace(group, holder=topology.rank) for group in groups]
    told = gather_bytes(json.dumps([outline_row(group) for group in own]).encode(), topology.host)
    return [
        own if rank == topology.rank else [outlined(row, rank) for row in json.loads(content)]
        for rank, content in enumerate(told)
    ]


def told(
    groups: Sequence[Group], held: Mapping[int, Group] | None, topology: Topology
) -> list[Group]:
    """Rank 0's groups on every rank: whole on the one that holds each, which is rank 0 or finds it
    in `held` by its prompt's index; in outline on the others, and, without `held`, on all but rank
    0. Collective; what other ranks give as `groups` is not looked at.
    """
    if topology.world_size == 1:
        return list(groups)
    own = [dataclasses.replace(group, holder=max(0, group.holder)) for group in groups]
    rows = [[group.holder, outline_row(group)] for group in own] if topology.is_first else []
    content = gather_bytes(json.dumps(rows).encode() if rows else b"", topology.host)[0]
    if topology.is_first:
        return own
    return [
        dataclasses.replace(held[row[0]], holder=holder)
        if holder == topology.rank and held is not None
        else outlined(row, holder)
        for holder, row in json.loads(content or b"[]")
    ]


def dealt_out(
    groups: Sequence[Group], topology: Topology, ranks: Sequence[int] = ()
) -> list[Group]:
    """Groups that every rank has read whole: each is kept by one, in turn; by one of `ranks`, where
    some are given.
    """
    if topology.world_size == 1:
        return list(groups)
    ranks = ranks or range(topology.world_size)
    holders = [ranks[place % len(ranks)] for place in range(len(groups))]
    return [
        dataclasses.replace(group, holder=rank)
        if rank == topology.rank
        else outlined(outline_row(group), rank)
        for group, rank in zip(groups, holders, strict=True)
    ]


def kept(groups: Sequence[Group], topology: Topology) -> Tensor | ShardedBytes:
    """What a checkpoint keeps of the groups (frames.py): each rank of those it holds, with their
    places among all. Collective.
    """
    if topology.world_size == 1:
        return group_frames(groups)
    places = [place for place, group in enumerate(groups) if group.holder == topology.rank]
    return in_parts(group_frames((groups[place] for place in places), places), topology)


def in_parts(part: Tensor, topology: Topology) -> Tensor | ShardedBytes:
    """Every rank's bytes in a checkpoint, in the order of the ranks. Collective."""
    sizes = topology.gather(len(part))
    if topology.world_size == 1 or not any(sizes):
        return part
    return ShardedBytes(part, sum(sizes[: topology.rank]), sum(sizes))


def outline_row(group: Group) -> list[Any]:
    """The group's outline as plain values."""
    rollouts = [[getattr(rollout, name) for name in _FIELDS] for rollout in group.rollouts]
    return [group.prompt.index, group.prompt_length, rollouts]


def outlined(row: list[Any], holder: int) -> Group:
    """The group of `outline_row`, which that rank has whole."""
    index, prompt_length, rollouts = row
    known = tuple(RolloutMeta(**dict(zip(_FIELDS, values, strict=True))) for values in rollouts)
    return Group(Prompt(index, numpy.zeros(0, numpy.int32), label=""), known, holder, prompt_length)
