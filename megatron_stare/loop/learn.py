"""The learner: one rollout batch becomes one optimizer step, or several over mini-batches and
epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stare.collect.resampling import OldLogprobs, is_replayed
from megatron_stare.config import Config, MismatchAlarm, NonFiniteError, load
from megatron_stare.loop.diagnostics import EntropyObserver
from megatron_stare.loop.metrics import (
    Passes,
    Stopwatch,
    batch_metrics,
    mean_metrics,
    missing_routing,
)
from megatron_stare.loop.parity import Witness, held
from megatron_stare.loop.prepare import (
    PreparedStep,
    StepPreparer,
    named,
    place_of,
    require_finite,
)
from megatron_stare.loop.run_directory import CONFIG_NAME
from megatron_stare.losses import Objective
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.adapters import merge_metrics
from megatron_stare.records import Group, TokenBatch


@dataclass(frozen=True)
class StepResult:
    """The outcome of `Learner.step`."""

    metrics: dict[str, float] = field(default_factory=dict)
    # A value that was not finite ended the step; the updates before it stand.
    error: NonFiniteError | None = None
    # All 0 where an error ended the step, or no group had anything to learn from.
    passes: Passes = field(default_factory=Passes)
    # ln pi_old of the rollouts that will be trained again, by group.
    old_logprobs: OldLogprobs = field(default_factory=list)


class Learner:
    """Score, plan and update, as often as the config asks, and measure each step. With a tokenizer
    it writes files of diagnostics; a witness compares trainer and engine.
    """

    def __init__(
        self,
        config: Config,
        objective: Objective,
        actor: Actor,
        tokenizer: PreTrainedTokenizerBase | None = None,
        witness: Witness | None = None,
    ) -> None:
        self.config = config
        self.objective = objective
        self.actor = actor
        self.topology = actor.topology
        self.entropy = EntropyObserver(config, objective, actor, tokenizer)
        self.witness = witness
        self.preparer = StepPreparer(config, objective, actor)

    @property
    def state(self) -> dict[str, float]:
        """The values that the loss's plan keeps between steps."""
        return self.preparer.state

    @state.setter
    def state(self, state: dict[str, float]) -> None:
        self.preparer.state = state

    def resume(self, state: dict[str, float], checkpoint: Path) -> None:
        """Continue with the plan's state of the checkpoint. A value with the name of a setting of
        `loss` starts at it, as STARE's W does at loss.reweight_w; it starts there again if the
        setting has changed since.
        """
        before, now = load(checkpoint / CONFIG_NAME).loss, self.config.loss
        self.state = {
            name: value
            for name, value in state.items()
            if getattr(before, name, None) == getattr(now, name, None)
        }

    def start(self, step: int) -> None:
        """Look at the engine before the run's next step, when it has the weights after `step`
        steps. MismatchAlarm: its log-probs differ too much. Collective.
        """
        if self.witness:
            self.witness.check_start(step)

    def step(
        self,
        groups: Sequence[Group],
        version: int,
        signal: bool,
        watch: Stopwatch,
        check: Callable[[], object] = lambda: None,
    ) -> StepResult:
        """Train on the groups, for weights of `version`; without `signal` only measure them.

        `check` is called before the first update; an exception of it ends the step. If a statistic
        or the gradient is not finite, that update and the step's later ones are not made; the error
        names the first such rollout. policy.ref_update_interval counts every step but one that
        `check` ended.
        """
        try:
            prepared = self.preparer.prepare(groups, version, signal, watch)
            self._plan(prepared, watch)
            check()
            result = self._train(prepared, groups, watch)
        except NonFiniteError as error:
            # Without its traceback, which would keep the step's tensors alive.
            result = StepResult({"nonfinite": 1.0}, error=error.with_traceback(None))
        interval = self.config.policy.ref_update_interval
        if interval and (version + 1) % interval == 0:
            self.actor.update_reference()
        return result

    def _plan(self, prepared: PreparedStep, watch: Stopwatch) -> None:
        try:
            self.preparer.plan_all(prepared, watch)
        except MismatchAlarm:
            if self.witness:
                self.witness.write(prepared)
            raise

    def _train(
        self, prepared: PreparedStep, groups: Sequence[Group], watch: Stopwatch
    ) -> StepResult:
        """The updates of a prepared step, measured before, during and after them."""
        across = self.topology.across
        with watch("diagnose"):
            observed = self._measured(groups) | self.entropy.before_updates(prepared)
        measured = []
        if prepared.scored:
            pairs = zip(prepared.batches, prepared.plans, strict=True)
            measured = [batch_metrics(batch, plan, across) for batch, plan in pairs]
        results = []
        for number in range(prepared.updates):
            result, seen = self._update(prepared, number, watch)
            results.append(result)
            if not prepared.scored:  # the only update scored its batch itself
                prepared.batches[0] = seen
                measured = [batch_metrics(seen, prepared.plans[0], across)]
        metrics = mean_metrics(measured) | mean_metrics(results) | observed
        if prepared.updates:
            self.state = prepared.plans[-1].state
        with watch("diagnose"):
            metrics |= self.entropy.after_updates(prepared, metrics)
            if self.witness:
                self.witness.look(prepared, metrics)
        return StepResult(
            metrics | {"nonfinite": 0.0},
            passes=self._passes(prepared),
            old_logprobs=self._old_logprobs(prepared, groups),
        )

    def _passes(self, prepared: PreparedStep) -> Passes:
        if not prepared.updates:
            return Passes()
        count, again = len(prepared.batches), (prepared.updates - 1) * self._replans
        scores, updates = prepared.scored + again / count, prepared.updates / count
        return Passes(scores, updates, self.config.adapters.rank > 0)

    @property
    def _replans(self) -> bool:
        return self.config.train.replan and self.objective.needs_scores

    def _measured(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of merged adapters and of replayed experts, if the run has any. Collective."""
        actor, found = self.actor, dict[str, float]()
        if actor.routers and self.config.policy.routing_replay == "rollout":
            found |= missing_routing(groups, actor.routers.shape)
        if self.config.adapters.rank:
            found |= merge_metrics(actor.chunks, self.topology)
        return found

    def _update(
        self, prepared: PreparedStep, number: int, watch: Stopwatch
    ) -> tuple[dict[str, float], TokenBatch]:
        """Update `number` of the step: all mini-batches in every pass, all passes in every epoch.
        After the first, the mini-batch is planned again if train.replan.
        """
        place = number % len(prepared.batches)
        preparer = self.preparer
        if number and self._replans:
            with watch("score"):
                preparer.replan(prepared, place)
        part, batch, plan = prepared.parts[place], prepared.batches[place], prepared.plans[place]
        settings = preparer.passes[number // len(prepared.batches) % len(preparer.passes)]
        with watch("update"):
            loss = self.objective.bind(preparer.loss, settings)
            result, seen = self.actor.update(batch, loss, plan)
        if not result:
            require_finite(part, seen, self.topology.across)
            found = self.actor.first_without_finite_gradient(batch, loss, plan)
            first = "of no rollout" if found is None else f"first in {named(part, found)}"
            raise NonFiniteError(
                f"the gradient is not finite, {first}; the statistics of every token are",
                None if found is None else place_of(part, found),
            )
        return result | self.entropy.of_update(settings, seen, plan), seen

    def _old_logprobs(self, prepared: PreparedStep, groups: Sequence[Group]) -> OldLogprobs:
        """The old log-probs that each update's ratios were taken against, by group, for rollouts
        that the replay buffer keeps. Collective.
        """
        if not prepared.updates or not self.config.rollout.resampling.replays:
            return []
        found: list[Any] = [None] * len(groups)
        chosen = functools.partial(is_replayed, self.config.rollout.resampling)
        count = len(prepared.parts)
        for number, (part, batch) in enumerate(zip(prepared.parts, prepared.batches, strict=True)):
            value_T = batch.surprisal_T if batch.old_surprisal_T is None else batch.old_surprisal_T
            assert value_T is not None, "a batch that an update has seen"
            found[number::count] = held(-value_T, batch, part, chosen, self.topology)
        return found
