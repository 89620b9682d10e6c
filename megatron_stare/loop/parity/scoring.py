"""Log-probs of whole responses from the trainer, whichever rank has a token."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.policy.layout import response_position
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Rollout, RolloutMeta, TokenBatch

AT_ONCE = 64  # rollouts that every rank sees whole


def packed(
    model: PolicyModel, groups: Sequence[Group], version: int, temperature: float
) -> list[numpy.ndarray]:
    """ln pi of every loss token of every rollout, scored as a training step scores them. On every
    rank. Collective.
    """
    with _at(model, temperature):
        batch = model.score(model.pack(groups, version))
    assert batch.surprisal_T is not None, "it was scored"
    return by_sequence(-batch.surprisal_T, batch, _lengths(groups), model.topology)


def alone(
    model: PolicyModel, groups: Sequence[Group], version: int, temperature: float
) -> list[numpy.ndarray]:
    """The same, each group in a pass of its own. Collective."""
    return [column for group in groups for column in packed(model, [group], version, temperature)]


def likeliest(model: PolicyModel, groups: Sequence[Group], version: int) -> list[numpy.ndarray]:
    """The trainer's likeliest id in the place of every loss token. Collective."""
    found = []
    for group in groups:
        batch = model.pack([group], version)
        ids_T = model.likeliest(batch, 1)[0][:, 0]
        found += by_sequence(ids_T, batch, _lengths([group]), model.topology)
    return found


def by_sequence(
    value_T: Tensor, batch: TokenBatch, lengths: Sequence[int], topology: Topology
) -> list[numpy.ndarray]:
    """The values of every sequence, [length] fp64: those of its loss tokens, NaN elsewhere; nothing
    of a sequence of length 0. The same on every rank. Collective.
    """
    begin_n = numpy.cumsum([0, *lengths])
    wanted_T = torch.tensor(lengths, device=value_T.device)[batch.sequence_T] > 0
    begin_T = torch.from_numpy(begin_n).to(value_T.device)[batch.sequence_T]
    place = (begin_T + response_position(batch.token_index_T))[wanted_T]
    table = value_T.new_zeros((2, int(begin_n[-1])), dtype=torch.float64)
    table[0, place] = value_T[wanted_T].double()
    table[1, place] = 1.0
    if topology.across.group is not None:
        dist.all_reduce(table, group=topology.across.group)  # each token is on one rank alone
    values, there = table.cpu().numpy()
    values[there == 0] = numpy.nan
    return [values[a:b] for a, b in itertools.pairwise(begin_n)]


def held(
    value_T: Tensor,
    batch: TokenBatch,
    groups: Sequence[Group],
    chosen: Callable[[RolloutMeta], bool],
    topology: Topology,
) -> list[list[numpy.ndarray | None]]:
    """The values of every chosen rollout that this rank holds, by its group: [length] fp32, NaN
    where it has no loss token; None for the others. A few rollouts at a time. Collective.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    wanted = [number for number, rollout in enumerate(rollouts) if chosen(rollout)]
    found: dict[int, numpy.ndarray] = {}
    for part in itertools.batched(wanted, AT_ONCE):
        lengths = [one.length if n in part else 0 for n, one in enumerate(rollouts)]
        columns = by_sequence(value_T, batch, lengths, topology)
        mine = [number for number in part if isinstance(rollouts[number], Rollout)]
        found |= {number: columns[number].astype(numpy.float32) for number in mine}
    numbers = itertools.count()
    return [[found.get(next(numbers)) for _ in group.rollouts] for group in groups]


def _lengths(groups: Sequence[Group]) -> list[int]:
    return [rollout.length for group in groups for rollout in group.rollouts]


@contextlib.contextmanager
def _at(model: PolicyModel, temperature: float) -> Iterator[None]:
    before, model.temperature = model.temperature, temperature
    try:
        yield
    finally:
        model.temperature = before
