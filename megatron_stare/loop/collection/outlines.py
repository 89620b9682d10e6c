"""Groups whole on the rank that sampled them, in outline on all others.

What decides over a batch (rewards, versions, lengths, counts) every rank knows of all rollouts, so
that all choose, number and pack alike; the tokens and texts stay where they are until `pack` sends
the tokens to those that train on them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy
from torch import Tensor

from megatron_stare.loop.collection.frames import group_frames
from megatron_stare.numerics.exchange import gather_bytes
from megatron_stare.policy.checkpoints.spread import Spread
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Outline, Prompt

_FIELDS = [each.name for each in dataclasses.fields(Outline)]


def shared(groups: Sequence[Group], topology: Topology) -> list[list[Group]]:
    """Each rank's groups, on every rank: whole on theirs, in outline on others. Collective."""
    if topology.world_size == 1:
        return [list(groups)]
    own = [dataclasses.replace(group, holder=topology.rank) for group in groups]
    told = gather_bytes(json.dumps([_row(group) for group in own]).encode(), topology.host)
    return [
        own if rank == topology.rank else [_outlined(row, rank) for row in json.loads(content)]
        for rank, content in enumerate(told)
    ]


def dealt_out(groups: Sequence[Group], topology: Topology) -> list[Group]:
    """Groups that every rank has read whole: each is kept by one, in turn."""
    if topology.world_size == 1:
        return list(groups)
    holders = [place % topology.world_size for place in range(len(groups))]
    return [
        dataclasses.replace(group, holder=rank)
        if rank == topology.rank
        else _outlined(_row(group), rank)
        for group, rank in zip(groups, holders, strict=True)
    ]


def kept(groups: Sequence[Group], topology: Topology) -> Tensor | Spread:
    """What a checkpoint keeps of the groups (frames.py): each rank of those it holds, with their
    places among all. Collective.
    """
    if topology.world_size == 1:
        return group_frames(groups)
    places = [place for place, group in enumerate(groups) if group.holder == topology.rank]
    part = group_frames((groups[place] for place in places), places)
    sizes = topology.gather(len(part))
    return Spread(part, sum(sizes[: topology.rank]), sum(sizes)) if any(sizes) else part


def _row(group: Group) -> list[Any]:
    """The group's outline as plain values."""
    names = _FIELDS[1:]
    rollouts = [[getattr(rollout, name) for name in names] for rollout in group.rollouts]
    return [group.prompt.index, group.prompt_length, rollouts]


def _outlined(row: list[Any], holder: int) -> Group:
    index, prompt_length, rollouts = row
    known = tuple(Outline(prompt_length, *values) for values in rollouts)
    return Group(Prompt(index, numpy.zeros(0, numpy.int32), label=""), known, holder)
