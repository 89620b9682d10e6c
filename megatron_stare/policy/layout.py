"""The tensors of one micro-batch: right-padded or packed,
whole or this context-parallel rank's part.

Packed (policy.packed_sequences): sequences lie end to end in one row, told apart by cumulative
lengths. Context parallelism cuts every sequence into 2 C chunks for C ranks; rank r holds chunks r
and 2 C - 1 - r, so that causal attention costs each rank the same. Sequences are padded at their
end to a multiple of 2 C, and the whole to what sequence parallelism and fp8 divide; causality
keeps padding out of every real token's sight.

Shape legend: N loss tokens held here, B sequences, S positions held here, R = S B, L layers with
experts, K experts a token.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_stare.config import PolicyConfig
from megatron_stare.numerics.transfer import to_device
from megatron_stare.policy import runtime
from megatron_stare.policy.topology import Topology
from megatron_stare.records import MicroBatch, RoutingShape

PAD_ID = 0  # any id will do: no loss token sees it
# What the rows of an fp8 matrix product's operands are a multiple of, by policy.tuning.fp8_recipe:
# a product's own demand, or the length of a block that shares a scale.
FP8_ROWS = {"mxfp8": 32, "blockwise": 128}
PLAIN_FP8_ROWS = 16
_POSITION_BITS = 32


@dataclass(frozen=True)
class TrainSequence:
    """One training sequence: its global number, all its tokens, and which of the last ones are loss
    tokens. Of what other context ranks train the arrays may hold anything, and `loss_mask` nothing;
    `loss_tokens` counts all of them.
    """

    number: int
    token_ids: numpy.ndarray
    prompt_length: int
    loss_mask: numpy.ndarray
    logprobs: numpy.ndarray
    advantage: float
    group: int
    fresh: numpy.ndarray  # per response token: whether the current weights sampled it
    turns: numpy.ndarray  # per response token: its turn (records.turns_of)
    loss_tokens: int
    # [P, L, K]: the experts of the first P positions, as the rollout has them
    routing: numpy.ndarray | None = None
    off_temperature: bool = False  # sampled at another temperature than the policy's
    scored: bool = False  # its log-probs are pi_old's

    @property
    def input_length(self) -> int:
        """Positions the model runs: the last token is only ever a target."""
        return len(self.token_ids) - 1


@dataclass(frozen=True)
class FlatValues:
    """One value per loss token, under the names of TokenBatch."""

    advantage_T: Tensor
    rollout_logprob_T: Tensor
    sequence_T: Tensor
    sequence_tokens_T: Tensor
    token_index_T: Tensor
    microbatch_T: Tensor
    fresh_T: Tensor
    turn_T: Tensor
    group_T: Tensor
    off_temperature_T: Tensor
    scored_T: Tensor


def response_position(token_index_T: Tensor) -> Tensor:
    """Each token's place in its response, from the batch's `token_index_T`."""
    return token_index_T & ((1 << _POSITION_BITS) - 1)


def multiples(topology: Topology, policy: PolicyConfig) -> tuple[int, int]:
    """What a packed sequence's padded length, and what a micro-batch's whole length is a multiple
    of: context parallelism cuts every sequence, and sequence parallelism what a rank holds, of
    which fp8 takes so many rows at a time.
    """
    single = 2 * topology.context_size if topology.context_size > 1 else 1
    held = topology.tensor_size if policy.sequence_parallel else 1
    if policy.fp8 != "none":
        held *= FP8_ROWS.get(policy.tuning.fp8_recipe or "", PLAIN_FP8_ROWS)
    return single, math.lcm(single, held * topology.context_size)


def aligned_lengths(
    length_n: numpy.ndarray, topology: Topology, policy: PolicyConfig
) -> numpy.ndarray:
    """The length of each sequence with its padding, were it alone."""
    _, whole = multiples(topology, policy)
    return -(-length_n // whole) * whole


def padded_lengths(
    length_n: numpy.ndarray, topology: Topology, policy: PolicyConfig
) -> numpy.ndarray:
    """Of a micro-batch of sequences of these lengths, over all context ranks;
    one without a sequence has one of padding alone.
    """
    plain_n = length_n if len(length_n) else numpy.ones(1, numpy.int64)
    if not policy.packed_sequences:
        return aligned_lengths(numpy.full_like(plain_n, plain_n.max()), topology, policy)
    single, whole = multiples(topology, policy)
    padded_n = -(-plain_n // single) * single
    padded_n[-1] += -int(padded_n.sum()) % whole
    return padded_n


def held_stretches(
    length: int, padded: int, context_rank: int, context_size: int
) -> list[tuple[int, int]]:
    """Of a sequence with `length` inputs, `padded` with its padding: from where to where positions
    lie on this context rank.
    """
    if context_size == 1:
        return [(0, length)]
    chunk = padded // (2 * context_size)
    begins = (context_rank * chunk, (2 * context_size - 1 - context_rank) * chunk)
    return [(min(begin, length), min(begin + chunk, length)) for begin in begins]


def micro_batch(
    sequences: Sequence[TrainSequence],
    number: int,
    start: int,
    topology: Topology,
    policy: PolicyConfig,
    routing: RoutingShape | None = None,
) -> tuple[MicroBatch, FlatValues]:
    """This rank's tensors of micro-batch `number`;
    its loss tokens begin at `start` of the rank's flat tensors. `routing`: of a model with experts.
    """
    packed = policy.packed_sequences
    length_n = numpy.array([one.input_length for one in sequences], numpy.int64)
    padded_n = padded_lengths(length_n, topology, policy)
    held_n = padded_n // topology.context_size
    position = _held_positions(padded_n, topology)
    tokens = _padded_tokens(sequences, padded_n)
    begin_n = numpy.cumsum(padded_n) - padded_n
    shape = (1, -1) if packed else (len(padded_n), -1)
    place, sequence, index = _loss_tokens(sequences, padded_n, topology)
    begin_held_n = numpy.cumsum(held_n) - held_n
    source = numpy.repeat(begin_n, held_n) + position
    row = begin_held_n[sequence] + place if packed else place * len(padded_n) + sequence
    device = runtime.device()

    def on_device(values: numpy.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values), device)

    micro = MicroBatch(
        token_BS=on_device(tokens[source].reshape(shape)),
        position_BS=on_device(position.reshape(shape)),
        row_N=on_device(row),
        target_N=on_device(_concatenated(sequences, _response_ids, numpy.int64)[index]),
        sequence_N=on_device(sequence),
        num_sequences=len(sequences),
        rows=slice(start, start + len(row)),
        cumulative_lengths=torch.from_numpy(
            numpy.concatenate([[0], numpy.cumsum(padded_n)]).astype(numpy.int32)
        )
        if packed
        else None,
        longest=int(padded_n.max()),
        **_of_routers(sequences, padded_n, source, shape, routing, on_device),
    )
    return micro, _flat_values(sequences, number, sequence, index)


def _of_routers(
    sequences: Sequence[TrainSequence],
    padded_n: numpy.ndarray,
    source: numpy.ndarray,
    shape: tuple[int, int],
    routing: RoutingShape | None,
    on_device: Callable[[numpy.ndarray], Tensor],
) -> dict[str, Any]:
    """MicroBatch's `real_R` and, where a rollout has its choices, `routing_RLK`, of all layers; in
    the routers' order, that of [S, B] flattened. `source`: where each position held here comes
    from.
    """
    if routing is None:
        return {}

    def ordered(values: numpy.ndarray) -> Tensor:
        held = values[source].reshape(*shape, *values.shape[1:])
        return on_device(
            numpy.ascontiguousarray(held.swapaxes(0, 1)).reshape(-1, *values.shape[1:])
        )

    begins = (numpy.cumsum(padded_n) - padded_n).tolist()
    real = numpy.zeros(int(padded_n.sum()), numpy.bool_)
    for begin, one in zip(begins, sequences, strict=False):
        real[begin : begin + one.input_length] = True
    found = {"real_R": ordered(real)}
    if any(one.routing is not None for one in sequences):
        chosen = numpy.full((len(real), len(routing.layers), routing.top_k), -1, numpy.int16)
        for begin, one in zip(begins, sequences, strict=False):
            if one.routing is not None:
                chosen[begin : begin + len(one.routing)] = one.routing
        found["routing_RLK"] = ordered(chosen)
    return found


def _loss_tokens(
    sequences: Sequence[TrainSequence], padded_n: numpy.ndarray, topology: Topology
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Of every loss token whose predicting position this rank holds: that position among those of
    its sequence that are held here, the sequence's place, and the token's among all responses.
    """
    count_n = numpy.array([len(one.loss_mask) for one in sequences], numpy.int64)
    prompt_n = numpy.array([one.prompt_length for one in sequences], numpy.int64)
    index = numpy.flatnonzero(_concatenated(sequences, lambda one: one.loss_mask, numpy.bool_))
    sequence = numpy.repeat(numpy.arange(len(sequences)), count_n)[index]
    response = index - (numpy.cumsum(count_n) - count_n)[sequence]
    position = response + prompt_n[sequence] - 1  # the one before a token predicts it
    if topology.context_size == 1:
        return position, sequence, index
    chunk = padded_n[sequence] // (2 * topology.context_size)
    number, within = numpy.divmod(position, chunk)
    last = 2 * topology.context_size - 1 - topology.context_rank
    here = (number == topology.context_rank) | (number == last)
    place = within + numpy.where(number == last, chunk, 0)
    return place[here], sequence[here], index[here]


def _flat_values(
    sequences: Sequence[TrainSequence],
    microbatch: int,
    sequence: numpy.ndarray,
    index: numpy.ndarray,
) -> FlatValues:
    """The values of the loss tokens at `index` of all responses, of sequences at these places."""

    def of_sequences(values: list[Any], kind: type[numpy.generic]) -> Tensor:
        return torch.from_numpy(numpy.array(values, kind)[sequence])

    def of_tokens(name: str, kind: type[numpy.generic]) -> Tensor:
        values = _concatenated(sequences, operator.attrgetter(name), kind)
        return torch.from_numpy(values[index])

    count_n = numpy.array([len(one.loss_mask) for one in sequences], numpy.int64)
    begin = torch.from_numpy((numpy.cumsum(count_n) - count_n)[sequence])
    number_T = of_sequences([one.number for one in sequences], numpy.int64)
    return FlatValues(
        advantage_T=of_sequences([one.advantage for one in sequences], numpy.float32),
        rollout_logprob_T=of_tokens("logprobs", numpy.float32),
        sequence_T=number_T,
        sequence_tokens_T=of_sequences([one.loss_tokens for one in sequences], numpy.int64),
        token_index_T=(number_T << _POSITION_BITS) + torch.from_numpy(index) - begin,
        microbatch_T=torch.full((len(index),), microbatch, dtype=torch.long),
        fresh_T=of_tokens("fresh", numpy.bool_),
        turn_T=of_tokens("turns", numpy.int32),
        group_T=of_sequences([one.group for one in sequences], numpy.int64),
        off_temperature_T=of_sequences([one.off_temperature for one in sequences], numpy.bool_),
        scored_T=of_sequences([one.scored for one in sequences], numpy.bool_),
    )


def _response_ids(sequence: TrainSequence) -> numpy.ndarray:
    return sequence.token_ids[sequence.prompt_length :]


def _concatenated(
    sequences: Sequence[TrainSequence],
    part: Callable[[TrainSequence], numpy.ndarray],
    kind: type[numpy.generic],
) -> numpy.ndarray:
    """A part of every sequence, behind one another."""
    parts = [numpy.zeros(0, kind), *map(part, sequences)]
    return numpy.concatenate(parts, dtype=kind, casting="same_kind")


def _padded_tokens(sequences: Sequence[TrainSequence], padded_n: numpy.ndarray) -> numpy.ndarray:
    """The input tokens of the sequences at their padded lengths, behind one another."""
    tokens = numpy.full(int(padded_n.sum()), PAD_ID, numpy.int64)
    begin_n = numpy.cumsum(padded_n) - padded_n
    for begin, one in zip(begin_n.tolist(), sequences, strict=False):
        tokens[begin : begin + one.input_length] = one.token_ids[: one.input_length]
    return tokens


def _held_positions(padded_n: numpy.ndarray, topology: Topology) -> numpy.ndarray:
    """The positions of each whole padded sequence that this rank holds, behind one another."""
    held_n = padded_n // topology.context_size
    within = numpy.arange(held_n.sum()) - numpy.repeat(numpy.cumsum(held_n) - held_n, held_n)
    if topology.context_size == 1:
        return within
    chunk = numpy.repeat(held_n // 2, held_n)
    last = 2 * topology.context_size - 2 - topology.context_rank
    return within + chunk * numpy.where(within < chunk, topology.context_rank, last)
