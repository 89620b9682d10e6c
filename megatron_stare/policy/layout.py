"""The tensors of one micro-batch: right-padded or packed,
whole or this context-parallel rank's part.

Packed (policy.packed_sequences): sequences lie end to end in one row, separated by cumulative
lengths. Context parallelism cuts every sequence into 2 C chunks for C ranks; rank r holds chunks r
and 2 C - 1 - r, so that causal attention costs each rank the same. Sequences are padded at their
end to a multiple of 2 C, and the whole to what sequence parallelism and fp8 divide; causality
keeps padding out of every real token's sight.

With policy.shared_prompts a sequence may lack its prompt: the rows of the nearest earlier sequence
that has it are its first positions (MicroBatch.prefixes).

Shape legend: N loss tokens held here, B sequences, S positions held here, R = S B, L layers with
experts, K experts a token.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
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
# The rows of an fp8 matrix product's operands are a multiple of it, by policy.tuning.fp8_recipe:
# a product's own demand, or the length of a block that shares a scale.
FP8_ROWS = {"mxfp8": 32, "blockwise": 128}
PLAIN_FP8_ROWS = 16
_POSITION_BITS = 32
_COLUMNS = {"rollout_logprob_T": "logprobs", "fresh_T": "fresh", "turn_T": "turns"}


@dataclass(frozen=True)
class TrainSequence:
    """One training sequence: its rollout's global number, all its tokens, and which of the last
    ones are loss tokens. Of what other context ranks train the arrays may hold anything, and
    `loss_mask` nothing; `loss_tokens` counts all of them.
    """

    number: int
    token_ids: numpy.ndarray
    prompt_length: int
    loss_mask: numpy.ndarray
    logprobs: numpy.ndarray
    advantage: float
    fresh: numpy.ndarray  # per response token: whether the current weights sampled it
    turns: numpy.ndarray  # per response token: its turn (records.turns_of)
    loss_tokens: int
    rollout_tokens: int  # loss tokens of all sequences of its rollout
    offset: int = 0  # of its response in the rollout's arrays
    # [P, L, K]: the experts of the first P positions, as the rollout has them
    routing: numpy.ndarray | None = None
    off_temperature: bool = False  # sampled at another temperature than the policy's
    scored: bool = False  # its log-probs are pi_old's
    shared: int = 0  # its first positions, if an earlier sequence of the micro-batch holds them

    @property
    def input_length(self) -> int:
        """Positions the model runs: the last token is only ever a target."""
        return len(self.token_ids) - 1

    @property
    def own_length(self) -> int:
        """The number of positions that no earlier sequence holds."""
        return self.input_length - self.shared


# One value per loss token: the fields of TokenBatch that packing fills, and their kinds.
FLAT: dict[str, torch.dtype] = {
    "advantage_T": torch.float32,
    "rollout_logprob_T": torch.float32,
    "sequence_T": torch.int64,
    "sequence_tokens_T": torch.int64,
    "token_index_T": torch.int64,
    "microbatch_T": torch.int64,
    "fresh_T": torch.bool,
    "turn_T": torch.int32,
    "off_temperature_T": torch.bool,
    "scored_T": torch.bool,
}


def response_position(token_index_T: Tensor) -> Tensor:
    """Each token's place in its rollout's arrays, from the batch's `token_index_T`."""
    return token_index_T & ((1 << _POSITION_BITS) - 1)


def multiples(topology: Topology, policy: PolicyConfig) -> tuple[int, int]:
    """The numbers that divide a packed sequence's padded length, and a micro-batch's whole length.
    Context parallelism cuts every sequence, sequence parallelism cuts the positions of a rank, and
    fp8 needs a multiple of its number of rows.
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
    """The padded lengths of a micro-batch of sequences, over all context ranks; one without a
    sequence has one of padding alone.
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
    """The stretches of positions (first, end) that lie on this context rank, of a sequence with
    `length` inputs, `padded` with its padding.
    """
    if context_size == 1:
        return [(0, length)]
    chunk = padded // (2 * context_size)
    begins = (context_rank * chunk, (2 * context_size - 1 - context_rank) * chunk)
    return [(min(begin, length), min(begin + chunk, length)) for begin in begins]


def micro_batch(
    sequences: Sequence[TrainSequence],
    number: int,
    flat: Mapping[str, Tensor],
    start: int,
    topology: Topology,
    policy: PolicyConfig,
    routing: RoutingShape | None = None,
) -> MicroBatch:
    """This rank's tensors of micro-batch `number`; the values of its loss tokens are written to the
    rank's flat tensors (FLAT), from `start` on. `routing`: of a model with experts.
    """
    packed = policy.packed_sequences
    padded_n = padded_lengths(_whole([one.own_length for one in sequences]), topology, policy)
    shared_n = numpy.zeros_like(padded_n)
    shared_n[: len(sequences)] = [one.shared for one in sequences]
    held_n = padded_n // topology.context_size
    position = _held_positions(padded_n, topology) + numpy.repeat(shared_n, held_n)
    tokens = _padded_tokens(sequences, padded_n)
    begin_n = numpy.cumsum(padded_n) - padded_n
    shape = (1, -1) if packed else (len(padded_n), -1)
    place, index, loss_n = _loss_tokens(sequences, padded_n, topology)
    begin_held_n = numpy.cumsum(held_n) - held_n
    whole = topology.context_size == 1
    source = slice(None) if whole else numpy.repeat(begin_n, held_n) + position
    sequence = numpy.repeat(numpy.arange(len(loss_n)), loss_n)
    if packed:
        row = _rows(place, sequence, shared_n, begin_held_n)
    else:
        row = place * len(padded_n) + sequence
    device = runtime.device()

    def on_device(values: numpy.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values), device)

    rows = slice(start, start + len(row))
    of_tokens = {name: values[rows].numpy() for name, values in flat.items()}
    _fill(of_tokens, sequences, number, loss_n, index)
    return MicroBatch(
        token_BS=on_device(tokens[source].reshape(shape)),
        position_BS=on_device(position.reshape(shape)),
        row_N=on_device(row),
        target_N=on_device(
            _at(index, _concatenated(sequences, _response_ids, numpy.int32)).astype(numpy.int64)
        ),
        sequence_N=on_device(sequence),
        num_sequences=len(sequences),
        loss_tokens_B=on_device(_whole([one.loss_tokens for one in sequences])),
        offset_B=on_device(_whole([one.offset for one in sequences])),
        rows=rows,
        cumulative_lengths=torch.from_numpy(
            numpy.concatenate([[0], numpy.cumsum(padded_n)]).astype(numpy.int32)
        )
        if packed
        else None,
        prefixes=_prefixes(shared_n, begin_n),
        longest=int((padded_n + shared_n).max()),
        **_of_routers(sequences, padded_n, source, shape, routing, on_device),
    )


def _holders(shared_n: numpy.ndarray) -> numpy.ndarray:
    """The number of the sequence that holds each one's first positions: its own number, or that of
    the nearest earlier one that shares none.
    """
    return numpy.maximum.accumulate(numpy.where(shared_n, 0, numpy.arange(len(shared_n))))


def _prefixes(shared_n: numpy.ndarray, begin_n: numpy.ndarray) -> tuple[tuple[int, int], ...]:
    """MicroBatch's `prefixes` of sequences that begin there."""
    if not shared_n.any():
        return ()
    return tuple(zip(begin_n[_holders(shared_n)].tolist(), shared_n.tolist(), strict=True))


def _rows(
    place: numpy.ndarray,
    sequence: numpy.ndarray,
    shared_n: numpy.ndarray,
    begin_held_n: numpy.ndarray,
) -> numpy.ndarray:
    """The rows of a packed micro-batch that hold these places of these sequences."""
    own = begin_held_n[sequence] + place - shared_n[sequence]
    shared = begin_held_n[_holders(shared_n)[sequence]] + place
    return numpy.where(place < shared_n[sequence], shared, own)


def _of_routers(
    sequences: Sequence[TrainSequence],
    padded_n: numpy.ndarray,
    source: numpy.ndarray | slice,
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
    its sequence that are held here, and the token's place among all responses; in the order of the
    sequences, with the count of each.
    """
    count_n = _response_lengths(sequences)
    prompt_n = numpy.array([one.prompt_length for one in sequences], numpy.int64)
    index = numpy.flatnonzero(_concatenated(sequences, lambda one: one.loss_mask, numpy.bool_))
    end_n = numpy.cumsum(count_n)
    # the position before a token predicts it
    shift_n = end_n - count_n - prompt_n + 1
    loss_n = _counts(index, end_n)
    position = index - numpy.repeat(shift_n, loss_n)
    if topology.context_size == 1:
        return position, index, loss_n
    chunk_n = padded_n[: len(loss_n)] // (2 * topology.context_size)
    chunk = numpy.repeat(chunk_n, loss_n)
    number, within = numpy.divmod(position, chunk)
    last = 2 * topology.context_size - 1 - topology.context_rank
    here = (number == topology.context_rank) | (number == last)
    place = within + numpy.where(number == last, chunk, 0)
    index = index[here]
    return place[here], index, _counts(index, end_n)


def _counts(index: numpy.ndarray, end_n: numpy.ndarray) -> numpy.ndarray:
    """The number of the rising places in each of the stretches that end there."""
    return numpy.diff(numpy.searchsorted(index, end_n), prepend=0)


def _response_lengths(sequences: Sequence[TrainSequence]) -> numpy.ndarray:
    return numpy.array([len(one.loss_mask) for one in sequences], numpy.int64)


def _fill(
    flat: Mapping[str, numpy.ndarray],
    sequences: Sequence[TrainSequence],
    microbatch: int,
    loss_n: numpy.ndarray,
    index: numpy.ndarray,
) -> None:
    """Write the values of the loss tokens at `index` of all responses, of which every sequence has
    `loss_n`.
    """
    flat["microbatch_T"].fill(microbatch)
    flat["token_index_T"][:] = index
    end, begin = 0, 0  # of a sequence's loss tokens, and of its response
    for one, count in zip(sequences, loss_n.tolist(), strict=True):
        its = slice(end, end + count)
        flat["advantage_T"][its] = one.advantage
        flat["sequence_T"][its] = one.number
        flat["sequence_tokens_T"][its] = one.rollout_tokens
        flat["token_index_T"][its] += (one.number << _POSITION_BITS) + one.offset - begin
        flat["off_temperature_T"][its] = one.off_temperature
        flat["scored_T"][its] = one.scored
        end, begin = its.stop, begin + len(one.loss_mask)
    for name, column in _COLUMNS.items():
        kind = flat[name].dtype.type
        flat[name][:] = _at(index, _concatenated(sequences, operator.attrgetter(column), kind))


def _at(index: numpy.ndarray, values: numpy.ndarray) -> numpy.ndarray:
    """values[index] of rising places: all values, where there are as many."""
    return values if len(index) == len(values) else values[index]


def _whole(numbers: list[int]) -> numpy.ndarray:
    return numpy.array(numbers, numpy.int64)


def _response_ids(sequence: TrainSequence) -> numpy.ndarray:
    return sequence.token_ids[sequence.prompt_length :]


def _concatenated(
    sequences: Sequence[TrainSequence],
    part: Callable[[TrainSequence], numpy.ndarray],
    kind: type[numpy.generic],
) -> numpy.ndarray:
    """A part of every sequence, concatenated."""
    parts = [numpy.zeros(0, kind), *map(part, sequences)]
    return numpy.concatenate(parts, dtype=kind, casting="same_kind")


def _padded_tokens(sequences: Sequence[TrainSequence], padded_n: numpy.ndarray) -> numpy.ndarray:
    """The sequences' own input tokens at their padded lengths, concatenated."""
    tokens = numpy.full(int(padded_n.sum()), PAD_ID, numpy.int64)
    begin_n = numpy.cumsum(padded_n) - padded_n
    for begin, one in zip(begin_n.tolist(), sequences, strict=False):
        tokens[begin : begin + one.own_length] = one.token_ids[one.shared : one.input_length]
    return tokens


def _held_positions(padded_n: numpy.ndarray, topology: Topology) -> numpy.ndarray:
    """The positions of each whole padded sequence that this rank holds, concatenated."""
    held_n = padded_n // topology.context_size
    within = numpy.arange(held_n.sum()) - numpy.repeat(numpy.cumsum(held_n) - held_n, held_n)
    if topology.context_size == 1:
        return within
    chunk = numpy.repeat(held_n // 2, held_n)
    last = 2 * topology.context_size - 2 - topology.context_rank
    return within + chunk * numpy.where(within < chunk, topology.context_rank, last)
