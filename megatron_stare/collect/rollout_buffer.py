"""The rollout buffer: prompts are sampled, judged, and handed to the trainer in batches.

           drawn            sent to a worker        judged, has signal        in a batch
    prompt -----> WAITING -------------> IN_FLIGHT ------------------> READY ----------> CONSUMED
                     ^                       |                           |
                     +---- resumed run ------+---- no signal, too old ---+-----> dropped

    RoundBuffer      whole rounds of prompts, on every rank that has workers. max_staleness=0 is
                     synchronous; one_step_off samples a round while the step before trains.
    ReplayingBuffer  a RoundBuffer for UEC-RL: a filter chooses rollouts, and some batches come from
                     its replay buffer.
    StreamBuffer     fully_async and abort_long_tail: prompts are sampled without end, on rank 0.

Invariants:
- A drawn prompt is consumed once at most; a checkpoint keeps every prompt that is not consumed.
  Only rollouts of the replay buffer are trained again.
- No group older than rollout.max_staleness is trained.
- A group holds all rollouts of its prompt, from one judge call.
- All ranks choose the same batch; each group's tokens are on one rank.
- On-policy rollouts of one turn from the embedded engine do not depend on the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy

from megatron_stare.config import Config, NoSignalError, RolloutConfig, TaskSolved
from megatron_stare.records import Group
from megatron_stare.scoring.advantages import (
    PromptHistory,
    has_gradient,
    has_signal,
    is_kept,
    with_advantages,
)
from megatron_stare.scoring.judge import judgement_metrics

# ln pi_old of rollouts that a later step trains again, by group and rollout of a batch [length];
# NaN except for loss tokens; None for rollouts that are not replayed or that another rank holds.
OldLogprobs = Sequence[Sequence[numpy.ndarray | None]]
# The share of right responses from which a task without signal is solved; the rest is left for
# problems whose label is wrong and for a sample that goes astray.
SOLVED = 0.9


@dataclass(frozen=True)
class Collected:
    """A batch."""

    groups: tuple[Group, ...]
    signal: bool  # false where no token has an advantage
    metrics: dict[str, float]  # of all groups that were sampled for it


class RolloutBuffer(Protocol):
    """The batches of a run, in order. Every method but `stop` is collective."""

    def collect(self, step: int) -> Collected:
        """The batch of step `step`, to be trained by the weights of that version."""
        ...

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """Called before the engine gets new weights: finish sampling that must not see them.
        `measured`, `old`: the step's metrics and old log-probs, which later batches may need.
        """
        ...

    def prefetch(self, step: int) -> None:
        """Called before the weights of version `step` are evaluated: sample during evaluation."""
        ...

    def stop(self) -> None:
        """Abort sampling, from any thread: a waiting `collect` raises an EngineError."""
        ...

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint. Between `collect` and `finish_step` it is the state before
        `collect`, so that a step that was not finished is trained again.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


def collected_of(
    chosen: Sequence[Group],
    sampled: Sequence[Group],
    counts: dict[str, int],
    config: Config,
    history: PromptHistory,
) -> Collected:
    """A batch of the chosen groups, with advantages, and the metrics of all sampled groups."""
    groups = with_advantages(chosen, config.scoring, history)
    metrics = metrics_of(chosen, sampled, counts, config)
    return Collected(groups, any(has_gradient(group) for group in groups), metrics)


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


def added(many: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sum of counts by name."""
    total: Counter[str] = Counter()
    for counts in many:
        total.update(counts)
    return total


def is_wanted(group: Group, rollout: RolloutConfig) -> bool:
    """Whether a group may be trained; without dynamic sampling every group may."""
    return not rollout.dynamic_sampling or is_kept(group, rollout.dynamic_sampling_metric)


def solved(sampled: Sequence[Group], rollout: RolloutConfig) -> str:
    """The sentence of a solved task; empty where the task is not solved. It is solved if at least
    SOLVED of the rollouts are right, and nearly no group was dropped whose rewards alone differ:
    scores of a reward model are all positive and still teach something.
    """
    rollouts = [one for group in sampled for one in group.rollouts]
    right = sum(one.verdict == "correct" for one in rollouts)
    unused = sum(has_signal(group) and not is_wanted(group, rollout) for group in sampled)
    if not rollouts or right < SOLVED * len(rollouts) or unused > (1 - SOLVED) * len(sampled):
        return ""
    return f"the task is solved: {right} of the last {len(rollouts)} sampled responses are right"


def too_few(config: Config, found: int, sampled: Sequence[Group], effort: str) -> NoSignalError:
    """Of a batch that could not be filled, with the rewards that were seen."""
    if sentence := solved(sampled, config.rollout):
        return TaskSolved(sentence)
    histogram = Counter(rollout.reward for group in sampled for rollout in group.rollouts)
    unverifiable = histogram.pop(None, 0)
    rewards = ", ".join(f"{reward:g} x {count}" for reward, count in sorted(histogram.items()))
    rewards += f"{', ' if rewards else ''}unverifiable x {unverifiable}" if unverifiable else ""
    rollout, what = config.rollout, "rewards"
    if rollout.dynamic_sampling_metric == "accuracy":
        what = "verdicts"
        others = sum(has_signal(group) and not is_wanted(group, rollout) for group in sampled)
        if others:
            rewards += f"; {others} groups differ in their rewards alone, which "
            rewards += "rollout.dynamic_sampling_metric=reward would keep"
    return NoSignalError(
        f"only {found} of rollout.rollout_batch_size={rollout.rollout_batch_size} groups "
        f"had differing {what} after {effort} (rewards seen: {rewards}); choose problems of "
        "medium difficulty, check scoring.reward, raise rollout.max_generation_rounds, or set "
        "rollout.accept_partial_batch=true"
    )


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
