"""Log-probs that a reference model on servers gives the trained tokens (sglang.reference_urls)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy

from megatron_stare.config import Config
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import EVERY_RANK, Group, Rollout, TrainedSequence, trained_sequences
from megatron_stare.rollout.sglang.reference import read_logprobs


def with_served_logprobs(
    groups: Sequence[Group], config: Config, topology: Topology
) -> list[Group]:
    """The groups, whose rollouts have the reference model's log-probs in place of their own where
    this rank has their tokens. Each rank asks for what it holds. Collective.
    """
    trained = trained_sequences(groups)
    rank, first = topology.rank, topology.is_first
    asked = [
        place
        for place, each in enumerate(trained)
        if each.group.holder == rank or (each.group.holder == EVERY_RANK and first)
    ]
    found: dict[int, numpy.ndarray] = {}

    def ask() -> dict[int, numpy.ndarray]:
        policy, servers = config.policy, config.sglang
        size = read_hf_config(policy.ref_hf_checkpoint or policy.hf_checkpoint).vocab_size
        ids = [_ids(trained[place]) for place in asked]
        read = read_logprobs(servers.reference_urls, servers, size, ids)
        found.update(zip(asked, read, strict=True))
        return {n: found[n] for n in asked if trained[n].group.holder == EVERY_RANK}

    found |= agreed(topology, ask)[0]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    arrays: dict[int, numpy.ndarray] = {}
    for place, logprobs in found.items():
        number, group, _, _, offset, _ = trained[place]
        whole = arrays.setdefault(number, numpy.zeros(rollouts[number].length, numpy.float32))
        own = logprobs[group.prompt_length - 1 :]
        whole[offset : offset + len(own)] = own
    for number, logprobs in arrays.items():
        rollouts[number] = dataclasses.replace(rollouts[number], logprobs=logprobs)  # type: ignore[call-arg]
    replaced = iter(rollouts)
    return [
        dataclasses.replace(group, rollouts=tuple(itertools.islice(replaced, len(group.rollouts))))
        for group in groups
    ]


def _ids(trained: TrainedSequence) -> numpy.ndarray:
    rollout = trained.rollout
    assert isinstance(rollout, Rollout), "this rank has its tokens"
    return numpy.concatenate([trained.group.prompt.token_ids, rollout.response_ids])
