"""Batches of rollouts that wait in a queue, and batches of rollouts that were trained before:
UEC-RL (resampling.py says which rollouts).

    rounds of prompts -> their rollouts, chosen -> the queue -> a batch, once it is full
    trained with A > 1 -> put by, with ln pi_old -> every fifth time a batch of its own

A batch is rollout_batch_size x n_samples_per_prompt rollouts, in what is left of their groups; what
is beyond it waits. Of what is put by the newest two batches are kept, and all of it is trained; of
less a random part, in whole batches. Where there is not even one, the turn is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from megatron_stare.collect.collect import (
    Collected,
    OldLogprobs,
    RoundCollector,
    metrics_of,
)
from megatron_stare.collect.group_exchange import group_state
from megatron_stare.collect.resampling import (
    at_places,
    count_rollouts,
    cut,
    is_replayed,
)
from megatron_stare.config import NoSignalError
from megatron_stare.records import Group, Rollout, RolloutMeta
from megatron_stare.scoring.advantages import has_gradient, with_advantages


class QueueCollector(RoundCollector):
    """Implements Collector. `surplus` is the queue; its state further has what is put by, how many
    batches of its own sampling were trained, and how many at the last one that was not.
    """

    queues = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        rollout = self.config.rollout
        self.settings, self.full = (
            rollout.resampling,
            rollout.rollout_batch_size * rollout.n_samples_per_prompt,
        )
        self.put_by: list[Group] = []
        self.trained, self.replayed = 0, 0
        self._batch: Collected | None = None  # that is being trained

    def collect(self, step: int) -> Collected:
        """See Collector. NoSignalError where the queue is not full after max_generation_rounds,
        unless rollout.accept_partial_batch.
        """
        if self._is_turn:
            self._step, self._before = step, self._position()
            self._batch = self._of_put_by(step)
        else:
            self._batch = super().collect(step)
        return self._batch

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """See Collector. What was trained for the first time is put by, as far as it is to be."""
        assert self._batch is not None, "collect came before"
        if self._is_turn:
            self.replayed = self.trained
        else:
            self.trained += 1
            self._put_by(self._batch.groups, old)
        self._batch = None
        super().finish_step(measured, old)

    def state(self) -> dict[str, Any]:
        """See Collector."""
        return super().state() | {
            "put_by": group_state(self.put_by, self.topology),
            "trained": self.trained,
            "replayed": self.replayed,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """See Collector. Of a run that put nothing by so far: there is nothing."""
        super().load_state(state)
        self.put_by = self._scattered(state["put_by"]) if "put_by" in state else []
        self.trained, self.replayed = state.get("trained", 0), state.get("replayed", 0)

    @property
    def _is_turn(self) -> bool:
        """Whether the next batch is of rollouts that are put by."""
        if not self.settings.replays or self.trained == self.replayed:
            return False
        due = self.trained % self.settings.replay_interval == 0
        return due and count_rollouts(self.put_by) >= self.full

    def _of_put_by(self, step: int) -> Collected:
        there, chosen = count_rollouts(self.put_by), self.put_by
        count = there // self.full * self.full
        if there < self.settings.replay_batches * self.full:
            random = numpy.random.default_rng((self.config.run.seed, step))
            chosen = at_places(
                self.put_by, set(random.choice(there, count, replace=False).tolist())
            )
        metrics = {"groups": float(len(chosen)), "replayed_rollouts": float(count)}
        return Collected(tuple(chosen), True, metrics)

    def _put_by(self, groups: Sequence[Group], old: OldLogprobs) -> None:
        for group, logprobs in zip(groups, old, strict=False):  # none without an update
            pairs = zip(group.rollouts, logprobs, strict=True)
            rollouts = tuple(
                _scored(rollout, own)
                for rollout, own in pairs
                if is_replayed(self.settings, rollout)
            )
            if rollouts:
                self.put_by.append(dataclasses.replace(group, rollouts=rollouts))
        there, most = count_rollouts(self.put_by), self.settings.replay_batches * self.full
        self.put_by = cut(self.put_by, max(0, there - most), there)

    def _has_batch(self, step: int) -> bool:
        return self._is_turn or count_rollouts(self._fresh(step)) >= self.full

    def _filled(self, step: int) -> Collected:
        """A batch for the weights of version `step`: the oldest rollouts of the queue."""
        rollout = self.config.rollout
        assert self.resampling is not None, "the method"
        ready, dropped = self._fresh_or_told(step)
        sampled, rounds, joined = list[Group](), 0, dict[str, float]()
        while self._round or (
            count_rollouts(ready) < self.full and rounds < rollout.max_generation_rounds
        ):
            under_way, self._round = self._round or self._begin(), None
            fresh = with_advantages(under_way.finish(), self.config.scoring)
            groups, metrics = self._joined(self.resampling, fresh)
            sampled += fresh
            ready += groups
            # every prompt that is sampled again is sampled equally often
            metrics["resampled_reward"] *= metrics["resampled_prompts"]
            joined = {key: joined.get(key, 0.0) + value for key, value in metrics.items()}
            rounds += 1
        there = count_rollouts(ready)
        if there < self.full and not rollout.accept_partial_batch:
            raise NoSignalError(
                f"only {there} of the {self.full} rollouts of a batch "
                f"(rollout.rollout_batch_size x n_samples_per_prompt) have an advantage to learn "
                f"from after {rounds} generation rounds; choose problems of medium difficulty, "
                "check scoring.reward, raise rollout.max_generation_rounds, or set "
                "rollout.accept_partial_batch=true"
            )
        chosen = cut(ready, 0, self.full)
        signal = any(map(has_gradient, chosen))
        chosen = chosen or list(fresh)  # measured, and not trained
        self.surplus = cut(ready, self.full, there)
        counts = {
            "generation_rounds": rounds,
            "surplus_groups": len(self.surplus),
            "stale_groups_dropped": dropped,
            **self._counts(),
        }
        if rounds:
            joined["resampled_reward"] /= max(1.0, joined["resampled_prompts"])
        metrics = metrics_of(chosen, sampled, counts, self.config) | joined
        metrics["queued_rollouts"] = float(count_rollouts(self.surplus))
        metrics["put_by_rollouts"] = float(count_rollouts(self.put_by))
        return Collected(tuple(chosen), signal, metrics)


def _scored(rollout: RolloutMeta, logprobs: numpy.ndarray | None) -> RolloutMeta:
    """The rollout with ln pi_old in the place of its engine's log-probs."""
    if not isinstance(rollout, Rollout):
        return dataclasses.replace(rollout, scored=True, temperature=None)
    assert logprobs is not None, "the rank that holds a rollout is told"
    logprobs = numpy.where(numpy.isnan(logprobs), rollout.logprobs, logprobs)
    return dataclasses.replace(rollout, logprobs=logprobs, scored=True, temperature=None)
