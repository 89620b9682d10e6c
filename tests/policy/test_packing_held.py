"""Sequences that another rank holds, of which a context rank trains no position."""

from __future__ import annotations

import dataclasses

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.packing import pack
from megatron_stare.records import Group, Prompt, Rollout, RolloutMeta
from tests.distributed import run_distributed


def trained(rank: int, world_size: int) -> list[tuple[int, int]]:
    """(sequence, target) of this context rank's loss tokens; each rank holds one of two groups."""
    policy = PolicyConfig(context_parallel_size=world_size)
    groups = []
    for number in range(2):
        whole = Rollout([50 + number], [-1.0], [1], status="completed", weight_version=0)
        group = Group(Prompt(number, [10 + number], ""), (whole,), holder=number)
        if number != rank:
            names = [each.name for each in dataclasses.fields(RolloutMeta)]
            meta = RolloutMeta(**{name: getattr(whole, name) for name in names})
            group = Group(Prompt(number, [], ""), (meta,), number, remote_prompt_length=1)
        groups.append(group)
    batch = pack(groups, topologies.start(policy), policy, hidden_size=16, weight_version=0)
    targets = [target for micro in batch.microbatches for target in micro.target_N.tolist()]
    return list(zip(batch.sequence_T.tolist(), targets, strict=True))


def test_a_context_rank_without_a_position_of_a_short_sequence_packs_the_others() -> None:
    first, second = run_distributed(trained, 2)
    assert sorted(first + second) == [(0, 50), (1, 51)]
