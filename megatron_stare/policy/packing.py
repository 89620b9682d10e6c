"""Groups -> this rank's TokenBatch: who trains on which sequence, in which micro-batch.

Every rank holds the same groups and deals them out alike, so no communication is needed and the
numbering of sequences and tokens is the same under every layout. policy/layout.py turns a
micro-batch into tensors.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy
import torch

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.policy import layout, runtime
from megatron_stare.policy.layout import TrainSequence
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, TokenBatch


def pack(
    groups: Sequence[Group],
    topology: Topology,
    policy: PolicyConfig,
    *,
    hidden_size: int,
    weight_version: int,
) -> TokenBatch:
    """This rank's share of the groups,
    in micro-batches within max_tokens_per_gpu (times the context ranks).

    Sequences are balanced over data ranks, and over a rank's micro-batches, by what they cost. All
    data ranks get equally many micro-batches; one without a sequence joins every collective and
    adds nothing. A sequence over the budget is never cut: UserError, or a micro-batch of its own by
    policy.on_long_sequence.
    """
    sequences = _sequences(groups, weight_version)
    budget = policy.max_tokens_per_gpu * topology.context_size
    for sequence in sequences:
        length = layout.aligned_length(sequence.input_length, topology, policy)
        if length > budget and policy.on_long_sequence == "error":
            raise UserError(
                f"a sequence has {sequence.input_length} tokens ({length} with its alignment), "
                f"more than policy.max_tokens_per_gpu={policy.max_tokens_per_gpu} x "
                f"context_parallel_size={topology.context_size}; raise it, set "
                "policy.on_long_sequence=own_micro_batch, or lower "
                "rollout.rollout_max_response_len or data.rollout_max_prompt_len"
            )
    shares = _balanced(sequences, topology.data_size, hidden_size)
    split = [_split(share, budget, topology, policy) for share in shares]
    count = max(len(batches) for batches in split)
    if topology.virtual_size > 1:  # the interleaved schedule goes round the stages in whole turns
        count = -(-count // topology.pipeline_size) * topology.pipeline_size
    mine = _evened(split[topology.data_rank], count, budget, hidden_size, topology, policy)
    return _token_batch(mine, len(sequences), topology, policy)


def cost(length: int, hidden_size: int) -> int:
    """Work of one sequence, up to a constant:
    matrix products linear in its length, attention quadratic.

    Per layer and token 24 h^2 operations in the linear layers and 2 h S in causal attention (arXiv
    2204.02311, B).
    """
    return length * (12 * hidden_size + length)


def _sequences(groups: Sequence[Group], weight_version: int) -> list[TrainSequence]:
    rollouts = [
        (place, group.prompt, rollout)
        for place, group in enumerate(groups)
        for rollout in group.rollouts
    ]
    return [
        TrainSequence(
            number=number,
            token_ids=numpy.concatenate([prompt.token_ids, rollout.response_ids]),
            prompt_length=len(prompt.token_ids),
            loss_mask=rollout.loss_mask,
            logprobs=rollout.logprobs,
            advantage=0.0 if rollout.advantage is None else rollout.advantage,
            group=place,
            fresh=rollout.versions == weight_version,
        )
        for number, (place, prompt, rollout) in enumerate(rollouts)
    ]


def _balanced(
    sequences: list[TrainSequence], count: int, hidden_size: int
) -> list[list[TrainSequence]]:
    """Longest first, each to the share that has cost least so
    far (longest-processing-time rule).
    """
    shares: list[list[TrainSequence]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for sequence in sorted(
        sequences, key=lambda sequence: (-sequence.input_length, sequence.number)
    ):
        load, number = heapq.heappop(loads)
        shares[number].append(sequence)
        heapq.heappush(loads, (load + cost(sequence.input_length, hidden_size), number))
    return shares


def _split(
    share: list[TrainSequence], budget: int, topology: Topology, policy: PolicyConfig
) -> list[list[TrainSequence]]:
    """A share (longest first) into as few micro-batches as first-fit finds;
    at least one, which may be empty.
    """
    batches: list[list[TrainSequence]] = []
    for sequence in share:
        # Padded batches must hold neighbours in length, so only the newest one is a candidate.
        for batch in batches if policy.packed_sequences else batches[-1:]:
            if layout.total_length([*batch, sequence], topology, policy) <= budget:
                batch.append(sequence)
                break
        else:
            batches.append([sequence])
    return batches or [[]]


def _evened(
    batches: list[list[TrainSequence]],
    count: int,
    budget: int,
    hidden_size: int,
    topology: Topology,
    policy: PolicyConfig,
) -> list[list[TrainSequence]]:
    """The same sequences in exactly `count` micro-batches:
    of even cost where that fits, else with empty ones.
    """
    if policy.packed_sequences:
        even = _balanced([sequence for batch in batches for sequence in batch], count, hidden_size)
        if all(layout.total_length(batch, topology, policy) <= budget for batch in even):
            return even
    return batches + [[] for _ in range(count - len(batches))]


def _token_batch(
    batches: list[list[TrainSequence]], num_sequences: int, topology: Topology, policy: PolicyConfig
) -> TokenBatch:
    microbatches, columns, start = [], [], 0
    for number, sequences in enumerate(batches):
        micro, values = layout.micro_batch(sequences, number, start, topology, policy)
        start = micro.rows.stop
        microbatches.append(micro)
        columns.append(values)
    device = runtime.device()
    flat = {
        field.name: torch.cat([getattr(values, field.name) for values in columns]).to(device)
        for field in dataclasses.fields(layout.FlatValues)
    }
    return TokenBatch(microbatches=tuple(microbatches), num_sequences=num_sequences, **flat)
