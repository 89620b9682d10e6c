"""Batches of UEC-RL: of buffered rollouts, and of rollouts that were trained before.

    rounds of prompts -> filter (resampling.py) -> buffered rollouts -> a batch, once it is full
    trained with A > 1 -> replay buffer, with ln pi_old -> every fifth time a batch of its own

A batch is rollout_batch_size x n_samples_per_prompt rollouts, in what is left of their groups. The
replay buffer keeps the newest rollout.resampling.replay_batches batches of rollouts and trains on
all of them. If it holds fewer, a random subset of whole batches is trained; with less than one
batch the replay is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from megatron_stare.collect.group_exchange import group_state
from megatron_stare.collect.resampling import (
    at_places,
    count_rollouts,
    cut,
    is_replayed,
)
from megatron_stare.collect.rollout_buffer import Collected, OldLogprobs, metrics_of, solved
from megatron_stare.collect.round_buffer import RoundBuffer
from megatron_stare.config import NoSignalError, TaskSolved
from megatron_stare.records import Group, Rollout, RolloutMeta
from megatron_stare.scoring.advantages import has_gradient, with_advantages


class ReplayingBuffer(RoundBuffer):
    """Implements RolloutBuffer. `surplus` has the buffered rollouts, in their groups."""

    by_rollout = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        rollout = self.config.rollout
        self.settings = rollout.resampling
        self.full = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        self.replay: list[Group] = []  # the replay buffer
        self.trained = 0  # batches of fresh rollouts
        self.replayed = 0  # `trained` when the last batch was replayed
        self._batch: Collected | None = None  # the one being trained

    def collect(self, step: int) -> Collected:
        """NoSignalError where too few rollouts are buffered after max_generation_rounds, unless
        rollout.accept_partial_batch.
        """
        if self._is_turn:
            self._step, self._before = step, self._position()
            self._batch = self._replay_batch(step)
        else:
            self._batch = super().collect(step)
        return self._batch

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """Rollouts that were trained for the first time may enter the replay buffer."""
        assert self._batch is not None, "collect came before"
        if self._is_turn:
            self.replayed = self.trained
        else:
            self.trained += 1
            self._add_to_replay(self._batch.groups, old)
        self._batch = None
        super().finish_step(measured, old)

    def state(self) -> dict[str, Any]:
        """The state of a RoundBuffer and the replay buffer."""
        return super().state() | {
            "replay": group_state(self.replay, self.topology),
            "trained": self.trained,
            "replayed": self.replayed,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """The state of any buffer; without a replay buffer in it, this one is empty."""
        super().load_state(state)
        self.replay = self._scattered(state["replay"]) if "replay" in state else []
        self.trained, self.replayed = state.get("trained", 0), state.get("replayed", 0)

    @property
    def _is_turn(self) -> bool:
        """Whether the next batch comes from the replay buffer."""
        if not self.settings.replays or self.trained == self.replayed:
            return False
        due = self.trained % self.settings.replay_interval == 0
        return due and count_rollouts(self.replay) >= self.full

    def _replay_batch(self, step: int) -> Collected:
        there, chosen = count_rollouts(self.replay), self.replay
        count = there // self.full * self.full
        if there < self.settings.replay_batches * self.full:
            random = numpy.random.default_rng((self.config.run.seed, step))
            chosen = at_places(
                self.replay, set(random.choice(there, count, replace=False).tolist())
            )
        metrics = {"groups": float(len(chosen)), "replayed_rollouts": float(count)}
        return Collected(tuple(chosen), True, metrics)

    def _add_to_replay(self, groups: Sequence[Group], old: OldLogprobs) -> None:
        for group, logprobs in zip(groups, old, strict=False):  # none without an update
            pairs = zip(group.rollouts, logprobs, strict=True)
            rollouts = tuple(
                _scored(rollout, own)
                for rollout, own in pairs
                if is_replayed(self.settings, rollout)
            )
            if rollouts:
                self.replay.append(dataclasses.replace(group, rollouts=rollouts))
        there, most = count_rollouts(self.replay), self.settings.replay_batches * self.full
        self.replay = cut(self.replay, max(0, there - most), there)

    def _has_batch(self, step: int) -> bool:
        return self._is_turn or count_rollouts(self._fresh(step)) >= self.full

    def _filled(self, step: int) -> Collected:
        """A batch for the weights of version `step`: the oldest buffered rollouts."""
        rollout = self.config.rollout
        assert self.resampling is not None, "the method"
        ready, dropped = self._fresh_or_warned(step)
        sampled, rounds, joined = list[Group](), 0, dict[str, float]()
        while self._round or (
            count_rollouts(ready) < self.full and rounds < rollout.max_generation_rounds
        ):
            current, self._round = self._round or self._begin(self._size()), None
            fresh = with_advantages(current.finish(), self.config.scoring)
            groups, metrics = self._joined(self.resampling, fresh)
            sampled += fresh
            ready += groups
            # every prompt that is sampled again is sampled equally often
            metrics["resampled_reward"] *= metrics["resampled_prompts"]
            joined = {key: joined.get(key, 0.0) + value for key, value in metrics.items()}
            rounds += 1
        there = count_rollouts(ready)
        if there < self.full and not rollout.accept_partial_batch:
            if sentence := solved(sampled, rollout):
                raise TaskSolved(sentence)
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
        metrics["buffered_rollouts"] = float(count_rollouts(self.surplus))
        metrics["replay_buffer_rollouts"] = float(count_rollouts(self.replay))
        return Collected(tuple(chosen), signal, metrics)


def _scored(rollout: RolloutMeta, logprobs: numpy.ndarray | None) -> RolloutMeta:
    """The rollout with ln pi_old in the place of its engine's log-probs."""
    if not isinstance(rollout, Rollout):
        return dataclasses.replace(rollout, scored=True, temperature=None)
    assert logprobs is not None, "the rank that holds a rollout has its log-probs"
    logprobs = numpy.where(numpy.isnan(logprobs), rollout.logprobs, logprobs)
    return dataclasses.replace(rollout, logprobs=logprobs, scored=True, temperature=None)
