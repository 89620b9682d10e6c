"""Exchange of groups between ranks: the holder has a group's tokens, others its RolloutMeta.

Every rank knows the rewards, versions and lengths of all rollouts, so that all ranks choose and
pack the same batch. Tokens and texts stay on the holder until `pack` sends the tokens to the ranks
that train on them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy
from torch import Tensor

from megatron_stare.collect.journal import group_frames
from megatron_stare.numerics.exchange import all_gather_bytes
from megatron_stare.policy.checkpoints.actor_state import ShardedBytes
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, RolloutMeta

_FIELDS = [each.name for each in dataclasses.fields(RolloutMeta)]


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
    if topology.world_size == 1:
        return group_frames(groups)
    places = [place for place, group in enumerate(groups) if group.holder == topology.rank]
    return concatenated(group_frames((groups[place] for place in places), places), topology)


def concatenated(part: Tensor, topology: Topology) -> Tensor | ShardedBytes:
    """The bytes of all ranks as one entry of a checkpoint, in rank order. Collective."""
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
