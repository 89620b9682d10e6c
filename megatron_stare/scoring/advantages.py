"""The advantages of a batch's groups and the signal filter of dynamic sampling. Pure functions of
groups; the estimators' formulas are in numerics/advantages.py.

Unverifiable rollouts have no reward: they are left out of every statistic, and their advantage is
0. It is also 0 for rollouts whose baseline could not be verified, if the estimator needs one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.numerics.advantages import Estimator, Outcomes, find_estimator
from megatron_stare.records import Group, RolloutMeta

SHARED = {"normalize_by_std"}  # settings of estimators that are fields of their own


def has_signal(group: Group) -> bool:
    """Whether the rewards of the group differ, the baseline's among them: equal rewards give zero
    advantage to every token (DAPO, 2503.14476).

    Fewer than two verified rollouts, or none with a loss token (all truncated and filtered), have
    no signal either.
    """
    return rewards_differ(group) and any(rollout.loss_tokens for rollout in _verified(group))


def rewards_differ(group: Group) -> bool:
    """Whether the rewards of the group's verified rollouts, and their baseline, differ."""
    compared = {value for one in _verified(group) for value in (one.reward, one.baseline)}
    return len(compared - {None}) > 1


def _verified(group: Group) -> list[RolloutMeta]:
    return [rollout for rollout in group.rollouts if rollout.reward is not None]


def is_kept(group: Group, metric: str) -> bool:
    """Whether dynamic sampling keeps the group: it has signal, and its `metric` differs.

    accuracy: the verdicts of its verified rollouts (DAPO's dynamic sampling, 2503.14476, section
    3.2), so that a group which is all right except for a length penalty is dropped. reward: any
    difference of the rewards will do.
    """
    if metric not in ("accuracy", "reward"):
        raise ValueError(f"metric={metric!r} is unknown; use accuracy or reward")
    verdicts = {rollout.verdict for rollout in _verified(group)}
    return has_signal(group) and (metric == "reward" or len(verdicts) > 1)


# Of each prompt (Group.prompt_key) the number of visits so far, and mean and standard deviation of
# their rewards. Only an estimator that remembers adds to it.
PromptHistory = dict[str, tuple[float, ...]]


def _remembered(
    known: Sequence[tuple[int, RolloutMeta]], groups: Sequence[Group], history: PromptHistory
) -> torch.Tensor:
    """[B, 3]: the earlier visits to each rollout's prompt. The history takes this batch's, in
    order: a prompt that occurs twice has its first group as an earlier visit.
    """
    found = [torch.zeros(0, 3, dtype=torch.float64)]
    for number, pairs in itertools.groupby(known, key=lambda pair: pair[0]):
        alone, key = _outcomes(list(pairs)), groups[number].prompt_key
        row_3 = torch.tensor(history.get(key, (0.0, 0.0, 0.0)), dtype=torch.float64)
        earlier_B3 = row_3.expand(len(alone.reward_B), 3)
        alone = dataclasses.replace(alone, earlier_B3=earlier_B3)
        history[key] = tuple(alone.visits_B3[0].tolist())
        found.append(earlier_B3)
    return torch.cat(found)


def with_advantages(
    groups: Sequence[Group], scoring: ScoringConfig, history: PromptHistory | None = None
) -> tuple[Group, ...]:
    """The groups of a whole batch with the advantages of scoring.advantage.

    Estimators that look at the whole batch (REINFORCE++, GPG) see all of its verified rollouts:
    call this on every rank with the same groups. Unverifiable rollouts get 0, and so does a
    single verified one where others of its group could not be verified and the estimator compares
    within the group. What the estimator leaves out of the loss (PSR, NSR) loses its loss mask.
    `history` gives an estimator that remembers the earlier visits to a prompt, and takes this one.
    ValueError: an unjudged rollout.
    """
    found = checked_estimator(scoring)
    own = {name: getattr(scoring, name) for name in SHARED if name in found.settings}
    flat = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    for number, rollout in flat:
        if rollout.reward is None and rollout.verdict != "unverifiable":
            raise ValueError(f"prompt {groups[number].prompt.index}: a rollout has no reward yet")
    verified = [_counts(rollout, groups[number], found) for number, rollout in flat]
    known = [pair for pair, counts in zip(flat, verified, strict=True) if counts]
    outcomes = _outcomes(known)
    if found.remembers and history is not None:
        earlier_B3 = _remembered(known, groups, history)
        outcomes = dataclasses.replace(outcomes, earlier_B3=earlier_B3)
    values = iter(found(outcomes, **scoring.advantage_settings, **own).tolist())
    left_out = iter(found.left_out(outcomes).tolist())
    rollouts = iter(
        _with_advantage(rollout, next(values), next(left_out))
        if counts
        else dataclasses.replace(rollout, advantage=0.0)
        for (_, rollout), counts in zip(flat, verified, strict=True)
    )
    return tuple(
        dataclasses.replace(group, rollouts=tuple(next(rollouts) for _ in group.rollouts))
        for group in groups
    )


def checked_estimator(scoring: ScoringConfig) -> Estimator:
    """The estimator of scoring.advantage. UserError: an unknown name or setting."""
    try:
        found = find_estimator(scoring.advantage)
        found.check(scoring.advantage_settings, "scoring.advantage_settings.")
    except UserError as error:
        raise UserError(f"scoring.advantage={scoring.advantage}: {error}") from None
    for name in SHARED & scoring.advantage_settings.keys():
        raise UserError(
            f"scoring.advantage_settings.{name} is scoring.{name}; set it under that name"
        )
    return found


def has_gradient(group: Group) -> bool:
    """Whether a rollout of the group has both an advantage and a token to learn it from."""
    return any(rollout.advantage and rollout.loss_tokens for rollout in group.rollouts)


def _counts(rollout: RolloutMeta, group: Group, found: Estimator) -> bool:
    """Whether the rollout has a reward, and one to compare it with where that is needed."""
    if found.greedy:
        return rollout.reward is not None and rollout.baseline is not None
    verified = sum(other.reward is not None for other in group.rollouts)
    lonely = found.relative and verified == 1 and len(group.rollouts) > 1
    return rollout.reward is not None and not lonely


def _outcomes(known: Sequence[tuple[int, RolloutMeta]]) -> Outcomes:
    places = {number: place for place, number in enumerate(dict.fromkeys(n for n, _ in known))}
    rollouts = [rollout for _, rollout in known]
    reward_B = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    right = [
        rollout.verdict == "correct" if rollout.verdict else float(rollout.reward or 0) > 0
        for rollout in rollouts
    ]
    return Outcomes(
        reward_B=reward_B,
        group_B=torch.tensor([places[number] for number, _ in known], dtype=torch.int64),
        tokens_B=torch.tensor([rollout.loss_tokens for rollout in rollouts], dtype=torch.float64),
        correct_B=torch.tensor(right, dtype=torch.bool),
        baseline_B=_baselines(rollouts),
    )


def _baselines(rollouts: Sequence[RolloutMeta]) -> torch.Tensor | None:
    known = [rollout.baseline for rollout in rollouts if rollout.baseline is not None]
    return torch.tensor(known, dtype=torch.float64) if len(known) == len(rollouts) else None


def _with_advantage(rollout: RolloutMeta, value: float, left_out: bool) -> RolloutMeta:
    if left_out:
        return rollout.without_loss(advantage=value)
    return dataclasses.replace(rollout, advantage=value)
