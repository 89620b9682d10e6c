"""Groups -> this rank's TokenBatch: the sequences of each rank and of each micro-batch.

Every rank knows the lengths of all sequences and assigns them by the same rule, so that the
numbering of sequences and tokens is the same under every layout. The tokens are then sent from the
rank that holds them to the ranks that train on them. policy/layout.py turns a micro-batch into
tensors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy
import torch

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.numerics.exchange import Parcel, deliver, to_device
from megatron_stare.policy import layout, runtime
from megatron_stare.policy.layout import Alignment, TrainSequence
from megatron_stare.policy.topology import Topology
from megatron_stare.records import (
    EVERY_RANK,
    Group,
    Rollout,
    RolloutMeta,
    RoutingShape,
    TokenBatch,
    TrainedSequence,
    trained_sequences,
    turns_of,
)


class Slice(NamedTuple):
    """A stretch [a, b) of positions that one context rank trains (layout.held_stretches), with what
    they predict: the ids at a .. b, and of the response the tokens among a + 1 .. b, with the turn
    of the first; and the bytes of the rollout's routing at those of a .. b - 1 that it has.
    """

    ids: slice
    response: slice
    routing: slice


# A sequence that another rank holds: the bytes of its slices.
Received = tuple[numpy.ndarray, list[Slice]]
# What is sent of a sequence, in this order. Of its versions nothing where they are all the same.
_KINDS = {
    "ids": numpy.dtype(numpy.int32),
    "logprobs": numpy.dtype(numpy.float32),
    "versions": numpy.dtype(numpy.int32),
    "mask": numpy.dtype(numpy.bool_),
    "turns": numpy.dtype(numpy.int32),
    "routing": numpy.dtype(numpy.uint8),
}


def pack(
    groups: Sequence[Group],
    topology: Topology,
    policy: PolicyConfig,
    *,
    hidden_size: int,
    weight_version: int,
    routing: RoutingShape | None = None,
) -> TokenBatch:
    """This rank's share of the groups,
    in micro-batches within max_tokens_per_gpu (times the context ranks).

    Sequences are balanced over data ranks, and over a rank's micro-batches, by what they cost. All
    data ranks get equally many micro-batches; one without a sequence joins every collective and
    adds nothing. A sequence over the budget is never cut: UserError, or a micro-batch of its own by
    policy.on_long_sequence. UserError also: a prompt has no token, which would predict the next.

    `routing`: of a model with experts. Where policy.routing_replay=rollout the choices that the
    rollouts have come along, of all its layers.
    """
    trained = trained_sequences(groups)
    for group in (each.group for each in trained if not each.group.prompt_length):
        raise UserError(
            f"prompt {group.prompt.index} has no token, so that nothing predicts the first token "
            "of its response; give every prompt some text"
        )
    length_n = numpy.array(
        [each.group.prompt_length + each.rollout.length - 1 for each in trained], numpy.int64
    )
    alignment = Alignment.of(topology, policy)
    size_n = alignment.alone(length_n)
    too_long_n = size_n > alignment.budget
    if policy.on_long_sequence == "error" and too_long_n.any():
        place = int(too_long_n.argmax())
        raise UserError(
            f"a sequence has {length_n[place]} tokens ({size_n[place]} with its alignment), "
            f"more than policy.max_tokens_per_gpu={policy.max_tokens_per_gpu} x "
            f"context_parallel_size={topology.context_size}; raise it, set "
            "policy.on_long_sequence=own_micro_batch, or lower "
            "rollout.rollout_max_response_len or data.rollout_max_prompt_len"
        )
    units = [[number] for number in range(len(trained))]
    if policy.shared_prompts:
        units = _units(trained, length_n, alignment.room)
    shared = {n: trained[n].group.prompt_length for unit in units for n in unit[1:]}
    own_n = length_n - numpy.array([shared.get(n, 0) for n in range(len(trained))], numpy.int64)
    evened = _assigned(units, own_n, topology, alignment, hidden_size)
    mine = evened[topology.data_rank]
    replayed = routing if policy.routing_replay == "rollout" else None
    there = _fetched(trained, evened, length_n, topology, alignment, replayed)
    # One after another: a batch is not held a second time as its sequences.
    batches = (
        [
            _train_sequence(trained[n], there.get(n), weight_version, replayed, shared.get(n, 0))
            for n in batch
        ]
        for batch in mine
    )
    most = sum(trained[n].rollout.loss_tokens for batch in mine for n in batch)
    return _token_batch(batches, most, _of_rollouts(groups), topology, alignment, routing)


def _assigned(
    units: Sequence[list[int]],
    own_n: numpy.ndarray,
    topology: Topology,
    alignment: Alignment,
    hidden_size: int,
) -> list[list[list[int]]]:
    """The sequence numbers of each data rank's micro-batches. A unit is not divided; `own_n`: the
    positions that each sequence does not leave to an earlier one of its unit.
    """
    rows_u = numpy.array([own_n[unit].sum() for unit in units], numpy.int64)
    shares = _balanced(numpy.arange(len(units)), rows_u, topology.data_size, hidden_size)
    split = [_split(share, rows_u, alignment) for share in shares]
    count = max(len(batches) for batches in split)
    if topology.virtual_size > 1:  # the interleaved schedule goes round the stages in whole turns
        count = -(-count // topology.pipeline_size) * topology.pipeline_size
    return [
        [
            [number for unit in batch for number in units[unit]]
            for batch in _evened(batches, rows_u, count, hidden_size, alignment)
        ]
        for batches in split
    ]


def _units(
    trained: Sequence[TrainedSequence], length_n: numpy.ndarray, room: int
) -> list[list[int]]:
    """The sequences as runs that go into one micro-batch: those of a group, as many as there is
    room for, of which the first holds the prompt.
    """
    units: list[list[int]] = []
    rows = 0
    for number, each in enumerate(trained):
        own = int(length_n[number]) - each.group.prompt_length
        if units and trained[units[-1][0]].group is each.group and rows + own <= room:
            units[-1].append(number)
            rows += own
        else:
            units.append([number])
            rows = int(length_n[number])
    return units


def _of_rollouts(groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """TokenBatch's values of each rollout: an episode weighs the same however it is split."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    reward_n = [math.nan if one.reward is None else one.reward for one in rollouts]
    group_n = [number for number, group in enumerate(groups) for _ in group.rollouts]
    return {
        "reward_Q": torch.tensor(reward_n, dtype=torch.float64),
        "group_Q": torch.tensor(group_n, dtype=torch.int64),
        "server_Q": torch.tensor([one.server for one in rollouts], dtype=torch.int64),
    }


def cost[Length: (int, numpy.ndarray)](length: Length, hidden_size: int) -> Length:
    """Work of one sequence (or of each of several), up to a constant:
    matrix products linear in its length, attention quadratic.

    Per layer and token 24 h^2 operations in the linear layers and 2 h S in causal attention (arXiv
    2204.02311, B).
    """
    return length * (12 * hidden_size + length)


def _balanced(
    numbers: Sequence[int] | numpy.ndarray,
    length_n: numpy.ndarray,
    count: int,
    hidden_size: int,
) -> list[list[int]]:
    """Longest first, each to the share of least cost so far (longest-processing-time rule)."""
    chosen = numpy.asarray(numbers, numpy.int64)
    chosen = chosen[numpy.lexsort((chosen, -length_n[chosen]))]
    costs = cost(length_n[chosen], hidden_size).tolist()
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for sequence, its_cost in zip(chosen.tolist(), costs, strict=True):
        load, number = loads[0]
        shares[number].append(sequence)
        heapq.heapreplace(loads, (load + its_cost, number))
    return shares


def _split(share: list[int], length_n: numpy.ndarray, alignment: Alignment) -> list[list[int]]:
    """A share (longest first) in as few micro-batches as first-fit finds; at least an empty one."""
    if not alignment.packed:
        return _split_padded(share, length_n, alignment)
    size_n = -(-length_n[share] // alignment.single) * alignment.single
    room_b = numpy.zeros(len(share), numpy.int64)  # of the batches so far, in their order
    batches: list[list[int]] = []
    for sequence, size in zip(share, size_n.tolist(), strict=True):
        place = int((room_b[: len(batches)] >= size).argmax()) if batches else 0
        if not batches or room_b[place] < size:
            place = len(batches)
            batches.append([])
            room_b[place] = alignment.room
        batches[place].append(sequence)
        room_b[place] -= size
    return batches or [[]]


def _split_padded(
    share: list[int], length_n: numpy.ndarray, alignment: Alignment
) -> list[list[int]]:
    """Padded batches hold sequences of similar length, so only the newest batch is a candidate."""
    size_n = alignment.alone(length_n[share]).tolist()
    batches: list[list[int]] = []
    size = 0  # of every row of the newest: its first is its longest
    for sequence, its_size in zip(share, size_n, strict=True):
        if not batches or (len(batches[-1]) + 1) * size > alignment.budget:
            batches.append([])
            size = its_size
        batches[-1].append(sequence)
    return batches or [[]]


def _evened(
    batches: list[list[int]],
    length_n: numpy.ndarray,
    count: int,
    hidden_size: int,
    alignment: Alignment,
) -> list[list[int]]:
    """The sequences in exactly `count` micro-batches: of even cost if they fit, else some empty."""
    if alignment.packed:
        together = [sequence for batch in batches for sequence in batch]
        even = _balanced(together, length_n, count, hidden_size)
        sizes = [alignment.together(length_n[batch]) for batch in even]
        if all(int(size.sum()) <= alignment.budget for size in sizes):
            return even
    return batches + [[] for _ in range(count - len(batches))]


def _fetched(
    trained: Sequence[TrainedSequence],
    evened: Sequence[list[list[int]]],
    length_n: numpy.ndarray,
    topology: Topology,
    alignment: Alignment,
    routing: RoutingShape | None,
) -> dict[int, Received]:
    """The slices that this rank trains of other ranks' sequences, by sequence number. Collective.

    evened: the micro-batches of every data rank. routing: the shape of the choices sent along.
    """
    width = routing.width if routing else 0
    if all(each.group.holder == EVERY_RANK for each in trained):
        return {}
    sent: list[tuple[int, list[Slice]]] = []
    parcels: list[Parcel] = []
    for data_rank, batches in enumerate(evened):
        numbers = [number for batch in batches for number in batch]
        padded = [alignment.together(length_n[batch]) for batch in batches if batch]
        size_n = numpy.concatenate([numpy.zeros(0, numpy.int64), *padded]).tolist()
        for context_rank in range(topology.context_size):
            ranks = topology.ranks_of_tokens(data_rank, context_rank)
            for number, size in zip(numbers, size_n, strict=True):
                _, group, rollout, *_ = trained[number]
                if group.holder == EVERY_RANK or ranks == (group.holder,):
                    continue
                slices = _slices(group, rollout, size, context_rank, topology.context_size, width)
                sent.append((number, slices))
                parcels.append(Parcel(_size(rollout, slices), group.holder, ranks))
    if not parcels:
        return {}
    found = deliver(
        lambda place: _bytes_of(*trained[sent[place][0]][1:3], sent[place][1]),
        parcels,
        topology.host,
    )
    return {sent[place][0]: (content, sent[place][1]) for place, content in found.items()}


def _train_sequence(
    trained: TrainedSequence,
    there: Received | None,
    weight_version: int,
    routing: RoutingShape | None,
    shared: int,
) -> TrainSequence:
    """A sequence to train on: from the rollout itself, or from the received slices. `shared`: its
    first positions that an earlier one holds.
    """
    group, rollout = trained.group, trained.rollout
    if isinstance(rollout, Rollout):
        arrays = _held_arrays(group, rollout)
    else:
        assert there is not None, "it was sent"
        arrays = _received_arrays(group, rollout, there)
    ids, mask, chosen = arrays["ids"], arrays["mask"], arrays["routing"]
    alike = numpy.full(len(mask), rollout.weight_version == weight_version)
    return TrainSequence(
        trained=trained,
        token_ids=ids,
        loss_mask=mask,
        logprobs=arrays["logprobs"],
        fresh=arrays["versions"] == weight_version if rollout.varied else alike,
        turns=arrays["turns"] + trained.turns_before,
        routing=routing.decoded(chosen)[: len(ids) - 1] if routing and len(chosen) else None,
        shared=shared,
    )


def _slices(
    group: Group,
    rollout: RolloutMeta,
    padded: int,
    context_rank: int,
    context_size: int,
    width: int,
) -> list[Slice]:
    """`width`: bytes of a position's routing; 0: none of it is sent."""
    prompt = group.prompt_length
    stretches = layout.held_stretches(
        prompt + rollout.length - 1, padded, context_rank, context_size
    )
    return [
        Slice(
            slice(a, b + 1),
            slice(max(0, a + 1 - prompt), max(0, b + 1 - prompt)),
            slice(*(min(place * width, rollout.routing_bytes) for place in (a, b))),
        )
        for a, b in stretches
        if a < b
    ]


def _sent(rollout: RolloutMeta, part: Slice) -> Iterator[tuple[str, slice]]:
    """The arrays of a sequence, and the places in them, that a slice is sent as: of the turns that
    of the first token, from which the mask says the others.
    """
    first = slice(part.response.start, min(part.response.start + 1, part.response.stop))
    places = {"ids": part.ids, "turns": first, "routing": part.routing}
    for name in _KINDS:
        if name != "versions" or rollout.varied:
            yield name, places.get(name, part.response)


def _size(rollout: RolloutMeta, slices: Sequence[Slice]) -> int:
    """Bytes of the slices."""
    sent = [each for part in slices for each in _sent(rollout, part)]
    return sum(_KINDS[name].itemsize * (place.stop - place.start) for name, place in sent)


def _held_arrays(group: Group, rollout: Rollout) -> dict[str, numpy.ndarray]:
    return {
        "ids": numpy.concatenate([group.prompt.token_ids, rollout.response_ids]),
        "logprobs": rollout.logprobs,
        "versions": rollout.token_versions,
        "mask": rollout.loss_mask,
        "turns": turns_of(rollout.loss_mask),
        "routing": rollout.routing,
    }


def _bytes_of(group: Group, rollout: RolloutMeta, slices: Sequence[Slice]) -> numpy.ndarray:
    assert isinstance(rollout, Rollout), "this rank holds it"
    arrays = _held_arrays(group, rollout)
    columns = [arrays[name][place] for part in slices for name, place in _sent(rollout, part)]
    return numpy.concatenate(
        [numpy.zeros(0, numpy.uint8), *(column.view(numpy.uint8) for column in columns)]
    )


def _received_arrays(
    group: Group, rollout: RolloutMeta, there: Received
) -> dict[str, numpy.ndarray]:
    """The same arrays: the slices at their places; zeros elsewhere."""
    (content, slices), at = there, 0
    lengths = {
        "ids": group.prompt_length + rollout.length,
        "routing": max((part.routing.stop for part in slices), default=0),
    }
    arrays = {
        name: numpy.zeros(lengths.get(name, rollout.length), kind) for name, kind in _KINDS.items()
    }
    for part in slices:
        for name, place in _sent(rollout, part):
            values = numpy.frombuffer(content, _KINDS[name], place.stop - place.start, at)
            arrays[name][place], at = values, at + values.nbytes
        turns, within = arrays["turns"][part.response], turns_of(arrays["mask"][part.response])
        turns[:] = turns[:1] + within - within[:1]
    return arrays


def _token_batch(
    batches: Iterable[list[TrainSequence]],
    most: int,
    of_sequences: dict[str, torch.Tensor],
    topology: Topology,
    alignment: Alignment,
    routing: RoutingShape | None,
) -> TokenBatch:
    """`most` loss tokens lie in these sequences; of several context ranks each holds a part, and
    memory that nothing is written to is none. `of_sequences`: a value for each of all sequences.
    """
    microbatches, start = [], 0
    flat = {name: torch.empty(most, dtype=kind) for name, kind in layout.FLAT.items()}
    for number, sequences in enumerate(batches):
        micro = layout.micro_batch(sequences, number, flat, start, topology, alignment, routing)
        start = micro.rows.stop
        microbatches.append(micro)
    device, count = runtime.device(), len(of_sequences["reward_Q"])
    values = {name: value[:start] for name, value in flat.items()} | of_sequences
    held = {name: to_device(value, device) for name, value in values.items()}
    return TokenBatch(microbatches=tuple(microbatches), num_sequences=count, **held)
