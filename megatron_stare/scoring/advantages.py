"""Group-normalised advantages and the signal filter of dynamic sampling. Pure functions of groups.

Unverifiable rollouts have no reward: they leave their group's mean and spread, and their advantage
is 0.
"""

from __future__ import annotations

import dataclasses
import statistics

from megatron_stare.records import Group, Outline, Rollout

EPSILON = 1e-6


def has_signal(group: Group) -> bool:
    """Whether the rewards of the group differ:
    equal rewards give zero advantage to every token (DAPO, 2503.14476).

    Fewer than two verified rollouts, or none with a loss token (all truncated and filtered), have
    no signal either.
    """
    verified = [rollout for rollout in group.rollouts if rollout.reward is not None]
    return len({rollout.reward for rollout in verified}) > 1 and any(
        rollout.loss_tokens for rollout in verified
    )


def is_kept(group: Group, metric: str) -> bool:
    """Whether dynamic sampling keeps the group: it has signal, and its `metric` differs.

    accuracy: the verdicts of its verified rollouts (DAPO's dynamic sampling, 2503.14476, section
    3.2), so that a group which is all right except for a length penalty is dropped. reward: any
    difference of the rewards will do.
    """
    if metric not in ("accuracy", "reward"):
        raise ValueError(f"metric={metric!r} is unknown; use accuracy or reward")
    verdicts = {rollout.verdict for rollout in group.rollouts if rollout.reward is not None}
    return has_signal(group) and (metric == "reward" or len(verdicts) > 1)


def with_advantages(group: Group, normalize_by_std: bool = True) -> Group:
    """A_i = (R_i - mean) / (std + 1e-6), std with ddof 1 (GRPO, 2402.03300);
    without std: Dr.GRPO (2503.20783).

    Mean and std are those of the verified rollouts; the others get 0. A group of one has mean 0 and
    std 1; where others of its group could not be verified, a single one says nothing and gets 0.
    ValueError: an unjudged rollout.
    """
    if any(
        rollout.reward is None and rollout.verdict != "unverifiable" for rollout in group.rollouts
    ):
        raise ValueError(f"prompt {group.prompt.index}: a rollout has no reward yet")
    known = [float(rollout.reward) for rollout in group.rollouts if rollout.reward is not None]
    if len(known) > 1:
        mean, spread = statistics.fmean(known), statistics.stdev(known)
    elif len(group.rollouts) > 1:
        mean, spread = sum(known), 1.0
    else:
        mean, spread = 0.0, 1.0
    scale = spread + EPSILON if normalize_by_std else 1.0

    def advantage(rollout: Rollout | Outline) -> float:
        return 0.0 if rollout.reward is None else (rollout.reward - mean) / scale

    return dataclasses.replace(
        group,
        rollouts=tuple(
            dataclasses.replace(rollout, advantage=advantage(rollout)) for rollout in group.rollouts
        ),
    )
