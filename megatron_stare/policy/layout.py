"""The tensors of one micro-batch: right-padded or packed,
whole or this context-parallel rank's part.

Packed (policy.packed_sequences): sequences lie end to end in one row, told apart by cumulative
lengths. Context parallelism cuts every sequence into 2 C chunks for C ranks; rank r holds chunks r
and 2 C - 1 - r, so that causal attention costs each rank the same. Sequences are padded at their
end to a multiple of 2 C, and the whole to what sequence parallelism divides; causality keeps
padding out of every real token's sight.

Shape legend: N loss tokens held here, B sequences, S positions held here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import runtime
from megatron_stare.policy.topology import Topology
from megatron_stare.records import MicroBatch

PAD_ID = 0  # any id will do: no loss token sees it
_POSITION_BITS = 32


@dataclass(frozen=True)
class TrainSequence:
    """One training sequence: its global number, all its tokens,
    and which of the last ones are loss tokens.
    """

    number: int
    token_ids: numpy.ndarray
    prompt_length: int
    loss_mask: numpy.ndarray
    logprobs: numpy.ndarray
    advantage: float
    group: int
    fresh: numpy.ndarray  # per response token: whether the current weights sampled it

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
    group_T: Tensor


def response_position(token_index_T: Tensor) -> Tensor:
    """Each token's place in its response, from the batch's `token_index_T`."""
    return token_index_T & ((1 << _POSITION_BITS) - 1)


def aligned_length(length: int, topology: Topology, policy: PolicyConfig) -> int:
    """The length of a single sequence with its padding."""
    return _rounded(length, _sequence_multiple(topology), topology, policy)


def total_length(
    sequences: Sequence[TrainSequence], topology: Topology, policy: PolicyConfig
) -> int:
    """Positions of a micro-batch over all context ranks, padding included."""
    return sum(_lengths(sequences, topology, policy))


def micro_batch(
    sequences: Sequence[TrainSequence],
    number: int,
    start: int,
    topology: Topology,
    policy: PolicyConfig,
) -> tuple[MicroBatch, FlatValues]:
    """This rank's tensors of micro-batch `number`;
    its loss tokens begin at `start` of the rank's flat tensors.
    """
    lengths = _lengths(sequences, topology, policy)
    held = [_held_positions(length, topology) for length in lengths]
    tokens, rows, targets, values, numbers = [], [], [], [], []
    offset = 0
    for place, positions in enumerate(held):
        if place < len(sequences):
            local, target_n, flat = _one_sequence(
                sequences[place], positions, lengths[place], number
            )
            rows.append(local + offset if policy.packed_sequences else local * len(lengths) + place)
            targets.append(target_n)
            numbers.append(torch.full_like(target_n, place))
            values.append(flat)
        tokens.append(_padded_tokens(sequences[place : place + 1], lengths[place])[positions])
        offset += len(positions)
    device = runtime.device()
    row_N = _joined(rows, torch.long)
    cumulative = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = policy.packed_sequences
    micro = MicroBatch(
        token_BS=(torch.cat(tokens)[None] if packed else torch.stack(tokens)).to(device),
        position_BS=(torch.cat(held)[None] if packed else torch.stack(held)).to(device),
        row_N=row_N.to(device),
        target_N=_joined(targets, torch.long).to(device),
        sequence_N=_joined(numbers, torch.long).to(device),
        num_sequences=len(sequences),
        rows=slice(start, start + row_N.numel()),
        cumulative_lengths=cumulative.to(device) if packed else None,
        longest=max(lengths),
    )
    return micro, _joined_values(values)


def _one_sequence(
    sequence: TrainSequence, positions: Tensor, length: int, microbatch: int
) -> tuple[Tensor, Tensor, FlatValues]:
    """Where the loss tokens' predicting positions lie among those held here, their targets,
    and their values.
    """
    local_at = torch.full((length,), -1, dtype=torch.long)
    local_at[positions] = torch.arange(len(positions))
    mask = torch.tensor(sequence.loss_mask, dtype=torch.bool)
    response = mask.nonzero().flatten()
    local = local_at[
        response + sequence.prompt_length - 1
    ]  # the position before a token predicts it
    response = response[local >= 0]
    count = response.numel()
    flat = FlatValues(
        advantage_T=torch.full((count,), sequence.advantage, dtype=torch.float32),
        rollout_logprob_T=torch.tensor(sequence.logprobs, dtype=torch.float32)[response],
        sequence_T=torch.full((count,), sequence.number, dtype=torch.long),
        sequence_tokens_T=torch.full((count,), int(mask.sum()), dtype=torch.long),
        token_index_T=(sequence.number << _POSITION_BITS) + response,
        microbatch_T=torch.full((count,), microbatch, dtype=torch.long),
        fresh_T=torch.tensor(sequence.fresh, dtype=torch.bool)[response],
        group_T=torch.full((count,), sequence.group, dtype=torch.long),
    )
    target_n = torch.tensor(sequence.token_ids, dtype=torch.long)[response + sequence.prompt_length]
    return local[local >= 0], target_n, flat


def _padded_tokens(sequence: Sequence[TrainSequence], length: int) -> Tensor:
    """The input tokens of a sequence (or of none) at its padded length."""
    tokens = torch.full((length,), PAD_ID, dtype=torch.long)
    for one in sequence:
        tokens[: one.input_length] = torch.tensor(one.token_ids[:-1], dtype=torch.long)
    return tokens


def _held_positions(length: int, topology: Topology) -> Tensor:
    """Positions of a whole padded sequence that this context-parallel rank holds, in order."""
    if topology.context_size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * topology.context_size)
    return torch.cat([chunks[topology.context_rank], chunks[-1 - topology.context_rank]])


def _lengths(
    sequences: Sequence[TrainSequence], topology: Topology, policy: PolicyConfig
) -> list[int]:
    """Padded lengths; a micro-batch without a sequence has one of padding alone."""
    multiple = _sequence_multiple(topology)
    plain = [sequence.input_length for sequence in sequences] or [1]
    if not policy.packed_sequences:
        return [_rounded(max(plain), multiple, topology, policy)] * len(plain)
    lengths = [-(-length // multiple) * multiple for length in plain]
    while sum(lengths) % (_held_multiple(topology, policy) * topology.context_size):
        lengths[-1] += multiple
    return lengths


def _rounded(length: int, multiple: int, topology: Topology, policy: PolicyConfig) -> int:
    length = -(-length // multiple) * multiple
    while length % (_held_multiple(topology, policy) * topology.context_size):
        length += multiple
    return length


def _sequence_multiple(topology: Topology) -> int:
    return 2 * topology.context_size if topology.context_size > 1 else 1


def _held_multiple(topology: Topology, policy: PolicyConfig) -> int:
    """What the positions held by a rank must be divisible by:
    sequence parallelism splits them over tensor ranks.
    """
    return topology.tensor_size if policy.sequence_parallel else 1


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *parts])


def _joined_values(parts: list[FlatValues]) -> FlatValues:
    kinds = {
        "advantage_T": torch.float32,
        "rollout_logprob_T": torch.float32,
        "fresh_T": torch.bool,
    }
    names = FlatValues.__dataclass_fields__
    return FlatValues(
        **{n: _joined([getattr(p, n) for p in parts], kinds.get(n, torch.long)) for n in names}
    )
