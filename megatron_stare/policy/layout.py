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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from megatron_stare.config import PolicyConfig
from megatron_stare.numerics.exchange import to_device
from megatron_stare.policy import runtime
from megatron_stare.policy.topology import Topology
from megatron_stare.records import MicroBatch, RoutingShape, TrainedSequence

PAD_ID = 0  # any id will do: no loss token sees it
# The rows of an fp8 matrix product's operands are a multiple of it, by policy.tuning.fp8_recipe:
# a product's own demand, which is 16, or the length of a block that shares a scale.
FP8_ROWS = {"mxfp8": 32, "blockwise": 128}
_POSITION_BITS = 32
# The flat tensors with one value of a sequence, and those with one of a token.
_OF_SEQUENCES: dict[str, Callable[[TrainedSequence], float]] = {
    "advantage_T": lambda its: 0.0 if its.rollout.advantage is None else its.rollout.advantage,
    "sequence_T": lambda its: its.number,
    "sequence_tokens_T": lambda its: its.loss_tokens,
    "off_temperature_T": lambda its: its.rollout.temperature is not None,
    "scored_T": lambda its: its.rollout.scored,
}
_OF_TOKENS = {"rollout_logprob_T": "logprobs", "fresh_T": "fresh", "turn_T": "turns"}


@dataclass(frozen=True)
class TrainSequence:
    """One sequence to train on with all its tokens. Of what other context ranks train the arrays
    may hold anything, and `loss_mask` nothing; `trained` counts all of its loss tokens.
    """

    trained: TrainedSequence
    token_ids: numpy.ndarray
    loss_mask: numpy.ndarray  # a value per response token, as of the next three
    logprobs: numpy.ndarray
    fresh: numpy.ndarray  # whether the current weights sampled it
    turns: numpy.ndarray  # its turn (records.turns_of)
    # [P, L, K]: the experts of the first P positions, as the rollout has them
    routing: numpy.ndarray | None = None
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


@dataclass(frozen=True)
class Alignment:
    """The lengths of sequences in micro-batches.

    single, whole: the numbers that divide a packed sequence's padded length, and a micro-batch's
    whole length. Context parallelism cuts every sequence, sequence parallelism cuts the positions
    of a rank, and fp8 needs a multiple of its number of rows.
    """

    single: int
    whole: int
    budget: int  # positions of a micro-batch, over all context ranks
    packed: bool

    @classmethod
    def of(cls, topology: Topology, policy: PolicyConfig) -> Alignment:
        """The alignment of a run."""
        single = 2 * topology.context_size if topology.context_size > 1 else 1
        held = topology.tensor_size if policy.sequence_parallel else 1
        if policy.fp8 != "none":
            held *= FP8_ROWS.get(policy.tuning.fp8_recipe or "", 16)
        whole = math.lcm(single, held * topology.context_size)
        return cls(single, whole, policy.sequence_budget, policy.packed_sequences)

    @property
    def room(self) -> int:
        """The positions that a packed micro-batch has room for."""
        return self.budget // self.whole * self.whole

    def alone(self, length_n: numpy.ndarray) -> numpy.ndarray:
        """The length of each sequence with its padding, were it alone."""
        return -(-length_n // self.whole) * self.whole

    def together(self, length_n: numpy.ndarray) -> numpy.ndarray:
        """The padded lengths of a micro-batch of sequences, over all context ranks; one without a
        sequence has one of padding alone.
        """
        plain_n = length_n if len(length_n) else numpy.ones(1, numpy.int64)
        if not self.packed:
            return self.alone(numpy.full_like(plain_n, plain_n.max()))
        padded_n = -(-plain_n // self.single) * self.single
        padded_n[-1] += -int(padded_n.sum()) % self.whole
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
    alignment: Alignment,
    routing: RoutingShape | None,
) -> MicroBatch:
    """This rank's tensors of micro-batch `number`; the values of its loss tokens are written to the
    rank's flat tensors (FLAT), from `start` on. `routing`: of a model with experts.
    """
    padded_n = alignment.together(_whole([one.own_length for one in sequences]))
    begin_n, held_n = numpy.cumsum(padded_n) - padded_n, padded_n // topology.context_size
    shared_n = numpy.zeros_like(padded_n)
    shared_n[: len(sequences)] = [one.shared for one in sequences]
    batch = 1 if alignment.packed else len(padded_n)
    # Of every position that this rank holds: its place among those of its sequence, and among the
    # padded positions of all sequences, in the order of [B, S] and in that of [S, B], the rows.
    within = _held_positions(padded_n, topology)
    source_BS = (numpy.repeat(begin_n, held_n) + within).reshape(batch, -1)
    source_R = source_BS.T.ravel()
    row_of = numpy.full(int(padded_n.sum()), -1)
    row_of[source_R] = numpy.arange(len(source_R))
    index, sequence, place = _loss_tokens(sequences, begin_n, shared_n)
    row_N = row_of[place]
    if topology.context_size > 1:
        here = row_N >= 0
        index, sequence, row_N = index[here], sequence[here], row_N[here]
    rows = slice(start, start + len(row_N))
    of_tokens = {name: values[rows].numpy() for name, values in flat.items()}
    _fill(of_tokens, sequences, number, sequence, index)
    tokens, device = _padded_tokens(sequences, begin_n, len(row_of)), runtime.device()

    def on_device(values: numpy.ndarray) -> Tensor:
        return to_device(torch.from_numpy(values), device)

    ends = numpy.cumsum([0, *padded_n]).astype(numpy.int32)
    responses = [one.token_ids[one.trained.group.prompt_length :] for one in sequences]
    routers = _of_routers(sequences, begin_n, len(row_of), routing)
    return MicroBatch(
        token_BS=on_device(tokens[source_BS]),
        position_BS=on_device((within + numpy.repeat(shared_n, held_n)).reshape(batch, -1)),
        row_N=on_device(row_N),
        target_N=on_device(_at(index, responses, numpy.int32).astype(numpy.int64)),
        sequence_N=on_device(sequence),
        num_sequences=len(sequences),
        loss_tokens_B=on_device(_whole([one.trained.rollout.loss_tokens for one in sequences])),
        offset_B=on_device(_whole([one.trained.offset for one in sequences])),
        rows=rows,
        cumulative_lengths=torch.from_numpy(ends) if alignment.packed else None,
        prefixes=_prefixes(shared_n, begin_n),
        longest=int((padded_n + shared_n).max()),
        **{name: on_device(values[source_R]) for name, values in routers.items()},
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


def _of_routers(
    sequences: Sequence[TrainSequence],
    begin_n: numpy.ndarray,
    padded: int,
    routing: RoutingShape | None,
) -> dict[str, numpy.ndarray]:
    """MicroBatch's `real_R` and, where a rollout has its choices, `routing_RLK`, of all layers and
    of the padded positions of all sequences.
    """
    if routing is None:
        return {}
    found = {"real_R": numpy.zeros(padded, numpy.bool_)}
    if any(one.routing is not None for one in sequences):
        shape = (padded, len(routing.layers), routing.top_k)
        found["routing_RLK"] = numpy.full(shape, -1, numpy.int16)
    for begin, one in zip(begin_n.tolist(), sequences, strict=False):
        found["real_R"][begin : begin + one.input_length] = True
        if one.routing is not None:
            found["routing_RLK"][begin : begin + len(one.routing)] = one.routing
    return found


def _loss_tokens(
    sequences: Sequence[TrainSequence], begin_n: numpy.ndarray, shared_n: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Of every loss token, in the order of the sequences: its place among all responses, its
    sequence, and the place of the position that predicts it among the padded positions.
    """
    index = numpy.flatnonzero(_concatenated([one.loss_mask for one in sequences], numpy.bool_))
    loss_n = _whole([int(numpy.count_nonzero(one.loss_mask)) for one in sequences])
    sequence = numpy.repeat(numpy.arange(len(sequences)), loss_n)
    # The position before a token predicts it.
    first_n = _whole([one.trained.group.prompt_length - 1 for one in sequences])
    position = index + numpy.repeat(first_n - _response_begins(sequences), loss_n)
    place = position + (begin_n - shared_n)[sequence]
    if shared_n.any():
        in_prompt = position < shared_n[sequence]
        place = numpy.where(in_prompt, position + begin_n[_holders(shared_n)][sequence], place)
    return index, sequence, place


def _fill(
    flat: Mapping[str, numpy.ndarray],
    sequences: Sequence[TrainSequence],
    microbatch: int,
    sequence: numpy.ndarray,
    index: numpy.ndarray,
) -> None:
    """Write the values of the loss tokens at `index` of all responses, which are in `sequence`."""
    firsts = [(one.trained.number << _POSITION_BITS) + one.trained.offset for one in sequences]
    count_n = numpy.diff(numpy.searchsorted(sequence, numpy.arange(len(sequences) + 1)))
    shift_n = _whole(firsts) - _response_begins(sequences)
    flat["microbatch_T"].fill(microbatch)
    flat["token_index_T"][:] = index + numpy.repeat(shift_n, count_n)
    for name, value in _OF_SEQUENCES.items():
        values = numpy.array([value(one.trained) for one in sequences], flat[name].dtype)
        flat[name][:] = numpy.repeat(values, count_n)
    for name, field in _OF_TOKENS.items():
        parts = [getattr(one, field) for one in sequences]
        flat[name][:] = _at(index, parts, flat[name].dtype.type)


def _response_begins(sequences: Sequence[TrainSequence]) -> numpy.ndarray:
    """The place of each response among all responses."""
    count_n = _whole([len(one.loss_mask) for one in sequences])
    return numpy.cumsum(count_n) - count_n


def _whole(numbers: list[int]) -> numpy.ndarray:
    return numpy.array(numbers, numpy.int64)


def _concatenated(parts: Sequence[numpy.ndarray], kind: type[numpy.generic]) -> numpy.ndarray:
    return numpy.concatenate([numpy.zeros(0, kind), *parts], dtype=kind, casting="same_kind")


def _at(
    index: numpy.ndarray, parts: Sequence[numpy.ndarray], kind: type[numpy.generic]
) -> numpy.ndarray:
    """The values at rising places in all parts: as they are, where there are as many."""
    values = _concatenated(parts, kind)
    return values if len(index) == len(values) else values[index]


def _padded_tokens(
    sequences: Sequence[TrainSequence], begin_n: numpy.ndarray, padded: int
) -> numpy.ndarray:
    """The sequences' own input tokens at their padded lengths, concatenated."""
    tokens = numpy.full(padded, PAD_ID, numpy.int64)
    for begin, one in zip(begin_n.tolist(), sequences, strict=False):
        tokens[begin : begin + one.own_length] = one.token_ids[one.shared : one.input_length]
    return tokens


def _held_positions(padded_n: numpy.ndarray, topology: Topology) -> numpy.ndarray:
    """The positions of each whole padded sequence that this rank holds, concatenated."""
    place = (topology.context_rank, topology.context_size)
    stretches = [each for size in padded_n.tolist() for each in held_stretches(size, size, *place)]
    return numpy.concatenate([numpy.arange(first, end) for first, end in stretches])
