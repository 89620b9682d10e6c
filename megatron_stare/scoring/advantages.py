"""Group-normalised advantages and the signal filter of dynamic sampling. Pure functions of groups."""

from __future__ import annotations

import dataclasses
import statistics

from megatron_stare.records import Group

EPSILON = 1e-6


def has_signal(group: Group) -> bool:
    """Whether the rewards of the group differ: equal rewards give zero advantage to every token (DAPO, 2503.14476)."""
    return len({rollout.reward for rollout in group.rollouts}) > 1


def with_advantages(group: Group, normalize_by_std: bool = True) -> Group:
    """A_i = (R_i - mean) / (std + 1e-6), std with ddof 1 (GRPO, 2402.03300); without std: Dr.GRPO (2503.20783).

    A group of one has mean 0 and std 1. ValueError: a rollout without a reward.
    """
    rewards = [rollout.reward for rollout in group.rollouts]
    if any(reward is None for reward in rewards):
        raise ValueError(f"prompt {group.prompt.index}: a rollout has no reward yet")
    known = [float(reward) for reward in rewards if reward is not None]
    mean, spread = (statistics.fmean(known), statistics.stdev(known)) if len(known) > 1 else (0.0, 1.0)
    scale = spread + EPSILON if normalize_by_std else 1.0
    return dataclasses.replace(
        group,
        rollouts=tuple(
            dataclasses.replace(rollout, advantage=(reward - mean) / scale)
            for rollout, reward in zip(group.rollouts, known, strict=True)
        ),
    )
