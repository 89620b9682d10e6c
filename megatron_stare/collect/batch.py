"""A batch of the rollout buffer: its groups and metrics, and why it could not be filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_stare.collect.resampling import is_wanted
from megatron_stare.config import Config, NoSignalError, RolloutConfig, TaskSolved
from megatron_stare.records import Group
from megatron_stare.scoring.advantages import (
    has_gradient,
    has_signal,
    is_kept,
    rewards_differ,
)
from megatron_stare.scoring.judge import judgement_metrics

# The fraction of right responses from which a task without signal is solved; the others may be of
# problems whose label is wrong, or occasional errors.
SOLVED = 0.9
MOST_REWARDS = 12  # in a message: those of a reward model are all different


@dataclass(frozen=True)
class Collected:
    """A batch."""

    groups: tuple[Group, ...]
    signal: bool  # false where no token has an advantage
    metrics: dict[str, float]  # of all groups that were sampled for it


def carries_signal(groups: Iterable[Group], config: Config) -> bool:
    """Whether a token has an advantage; under distillation every token has one."""
    return config.loss.distillation_coef > 0 or any(map(has_gradient, groups))


def metrics_of(
    chosen: Sequence[Group], sampled: Sequence[Group], counts: dict[str, int], config: Config
) -> dict[str, float]:
    """The metrics of a batch, and those of all groups that were sampled for it, if any."""
    if not sampled:
        return {"groups": float(len(chosen))} | {name: float(n) for name, n in counts.items()}
    metrics = _sampling_metrics(sampled) | {"groups": float(len(chosen))}
    kept = sum(is_kept(group, config.rollout.dynamic_sampling_metric) for group in sampled)
    metrics["signal_fraction"] = kept / len(sampled)
    return metrics | {name: float(count) for name, count in counts.items()}


def solved(sampled: Sequence[Group], rollout: RolloutConfig) -> str:
    """The sentence of a solved task; empty where the task is not solved. It is solved if at least
    SOLVED of the rollouts are right, and nearly no group was dropped whose rewards alone differ:
    scores of a reward model are all positive and still teach something.
    """
    rollouts = [one for group in sampled for one in group.rollouts]
    right = sum(one.verdict == "correct" for one in rollouts)
    most = (1 - SOLVED) * len(sampled)
    if not rollouts or right < SOLVED * len(rollouts) or _dropped(sampled, rollout) > most:
        return ""
    return f"the task is solved: {right} of the last {len(rollouts)} sampled responses are right"


def too_few(
    config: Config, found: int, sampled: Sequence[Group], effort: str, by_rollout: bool
) -> NoSignalError:
    """The error of a batch that could not be filled, with the rewards that were seen."""
    if sentence := solved(sampled, config.rollout):
        return TaskSolved(sentence)
    remedy = (
        "choose problems of medium difficulty, check scoring.reward, raise "
        "rollout.max_generation_rounds, or set rollout.accept_partial_batch=true"
    )
    if by_rollout:
        full = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        return NoSignalError(
            f"only {found} of the {full} rollouts of a batch (rollout.rollout_batch_size x "
            f"n_samples_per_prompt) have an advantage to learn from after {effort}; {remedy}"
        )
    what = "verdicts" if config.rollout.dynamic_sampling_metric == "accuracy" else "rewards"
    return NoSignalError(
        f"only {found} of rollout.rollout_batch_size={config.rollout.rollout_batch_size} groups "
        f"had differing {what} after {effort} ({seen_rewards(config, sampled)}); {remedy}"
    )


def seen_rewards(config: Config, sampled: Sequence[Group]) -> str:
    """The rewards of the sampled groups, and why some that differ are not trained."""
    given = [rollout.reward for group in sampled for rollout in group.rollouts]
    histogram = Counter(reward for reward in given if reward is not None)
    often = dict(histogram.most_common(MOST_REWARDS))
    rewards = [f"{reward:g} x {count}" for reward, count in sorted(often.items())]
    if rest := sorted(histogram.keys() - often.keys()):
        rewards.append(f"{len(rest)} other values from {rest[0]:g} to {rest[-1]:g}")
    if unverifiable := len(given) - histogram.total():
        rewards.append(f"unverifiable x {unverifiable}")
    seen = f"rewards seen: {', '.join(rewards)}"
    if others := _dropped(sampled, config.rollout):
        seen += f"; {others} groups differ in their rewards alone, which "
        seen += "rollout.dynamic_sampling_metric=reward would keep"
    if without_loss := sum(rewards_differ(group) and not has_signal(group) for group in sampled):
        seen += f"; {without_loss} groups differ and have no token in the loss"
        if config.scoring.overlong_filter:
            limit = f"rollout.rollout_max_response_len={config.rollout.rollout_max_response_len}"
            seen += f": scoring.overlong_filter=true leaves truncated responses out, raise {limit}"
    return seen


def _dropped(sampled: Sequence[Group], rollout: RolloutConfig) -> int:
    """The number of groups that dynamic sampling drops although they carry signal."""
    return sum(has_signal(group) and not is_wanted(group, rollout) for group in sampled)


def _sampling_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over all sampled rollouts, before any group is dropped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    count = len(rollouts)
    return (
        judgement_metrics(rollouts)
        | {
            "response_length": sum(rollout.length for rollout in rollouts) / count,
            "truncated_fraction": sum(rollout.status == "truncated" for rollout in rollouts)
            / count,
        }
        | {
            f"episode/{name}": sum(rollout.episode.get(name, 0.0) for rollout in rollouts) / count
            for name in sorted({name for rollout in rollouts for name in rollout.episode})
        }
    )


def staleness(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Steps between the weights that sampled a token and those that train on it:
    mean over tokens, and largest.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(rollout.length for rollout in rollouts)
    total = sum(step * rollout.length - rollout.version_sum for rollout in rollouts)
    oldest = min(rollout.oldest_version for rollout in rollouts)
    return {"staleness_mean": total / max(1, tokens), "staleness_max": float(step - oldest)}
