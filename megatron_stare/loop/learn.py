"""The learner: one rollout batch becomes one optimizer step, or several over mini-batches and
epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_stare.collect.resampling import OldLogprobs, is_replayed
from megatron_stare.config import Config, NonFiniteError
from megatron_stare.loop.metrics import batch_metrics, mean_metrics
from megatron_stare.loop.observers import StepObserver
from megatron_stare.loop.parity.scoring import held
from megatron_stare.loop.prepare import (
    PreparedStep,
    StepPreparer,
    Watch,
    named,
    place_of,
    require_finite,
)
from megatron_stare.losses import Objective
from megatron_stare.policy.actor import Actor
from megatron_stare.records import Group, Signals, TokenBatch


@dataclass(frozen=True)
class StepResult:
    """The outcome of `Learner.step`."""

    metrics: dict[str, float] = field(default_factory=dict)
    # Why no update was made: a signal to the process, a value that is not finite (then the updates
    # before it stand), or no group to learn from. None: all updates were made.
    skipped: Literal["interrupted", "nonfinite", "no signal"] | None = None
    error: NonFiniteError | None = None  # of a step skipped as "nonfinite"
    plans: Sequence[Signals] = ()  # one per mini-batch
    # ln pi_old of the rollouts that will be trained again, by group.
    old_logprobs: OldLogprobs = field(default_factory=list)


class Learner:
    """Score, plan and update, as often as the config asks; observers measure each step."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        actor: Actor,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.config = config
        self.objective = objective
        self.actor = actor
        self.topology = actor.topology
        self.observers = observers
        self.preparer = StepPreparer(config, objective, actor)

    @property
    def state(self) -> dict[str, float]:
        """The values that the loss's plan keeps between steps."""
        return self.preparer.state

    @state.setter
    def state(self, state: dict[str, float]) -> None:
        self.preparer.state = state

    def start(self, step: int) -> None:
        """Call every observer's `on_start` before the run's next step, when the engine has the
        weights after `step` steps. Collective.
        """
        for observer in self.observers:
            observer.on_start(step)

    def step(
        self,
        groups: Sequence[Group],
        version: int,
        signal: bool,
        watch: Watch,
        interrupted: Callable[[], bool],
    ) -> StepResult:
        """Train on the groups, for weights of `version`; without `signal` only measure them.

        If `interrupted`, no update is made. If a statistic or the gradient is not finite, that
        update and the step's later ones are not made; the error names the first such rollout.
        policy.ref_update_interval counts every step but an interrupted one.
        """
        try:
            prepared = self.preparer.prepare(groups, version, signal, watch, self._on_mismatch)
            if interrupted():
                return StepResult(skipped="interrupted")
            result = self._train(prepared, groups, watch)
        except NonFiniteError as error:
            # Without its traceback, which would keep the step's tensors alive.
            result = StepResult({"nonfinite": 1.0}, "nonfinite", error.with_traceback(None))
        interval = self.config.policy.ref_update_interval
        if interval and (version + 1) % interval == 0:
            self.actor.update_reference()
        return result

    def _train(self, prepared: PreparedStep, groups: Sequence[Group], watch: Watch) -> StepResult:
        """The updates of a prepared step, measured before, during and after them."""
        across = self.topology.across
        with watch("diagnose"):
            observed = _joined(observer.on_scored(prepared) for observer in self.observers)
        shown: list[TokenBatch] = []
        measured = []
        if prepared.scored:
            shown = prepared.batches
            measured = [
                batch_metrics(batch, plan, across)
                for batch, plan in zip(shown, prepared.plans, strict=True)
            ]
        results = []
        for number in range(prepared.updates):
            result, seen = self._update(prepared, number, watch)
            results.append(result)
            if not measured:  # a single update scores its batch itself
                shown = [seen]
                measured = [batch_metrics(seen, prepared.plans[0], across)]
        metrics = mean_metrics(measured) | mean_metrics(results) | observed
        if prepared.updates:
            self.state = prepared.plans[-1].state
        with watch("diagnose"):
            metrics |= _joined(
                observer.on_updated(prepared, shown, metrics) for observer in self.observers
            )
        return StepResult(
            metrics | {"nonfinite": 0.0},
            None if prepared.updates else "no signal",
            plans=prepared.plans,
            old_logprobs=self._old_logprobs(prepared, groups, shown),
        )

    def _update(
        self, prepared: PreparedStep, number: int, watch: Watch
    ) -> tuple[dict[str, float], TokenBatch]:
        """Update `number` of the step: all mini-batches in every pass, all passes in every epoch.
        After the first, the mini-batch is planned again if train.replan.
        """
        place = number % len(prepared.batches)
        preparer = self.preparer
        if number and self.config.train.replan and self.objective.needs_scores:
            with watch("score"):
                preparer.replan(prepared, place)
        part, batch, plan = (
            prepared.parts[place],
            prepared.batches[place],
            prepared.plans[place],
        )
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
        for observer in self.observers:
            result |= observer.on_update(settings, seen, plan)
        return result, seen

    def _old_logprobs(
        self,
        prepared: PreparedStep,
        groups: Sequence[Group],
        batches: Sequence[TokenBatch],
    ) -> OldLogprobs:
        """The old log-probs that each update's ratios were taken against, by group, for rollouts
        that the replay buffer keeps. Collective.
        """
        if not prepared.updates or not self.config.rollout.resampling.replays:
            return []
        found: list[Any] = [None] * len(groups)
        chosen = functools.partial(is_replayed, self.config.rollout.resampling)
        for number, (part, batch) in enumerate(zip(prepared.parts, batches, strict=True)):
            value_T = batch.surprisal_T if batch.old_surprisal_T is None else batch.old_surprisal_T
            assert value_T is not None, "a batch that an update has seen"
            found[number :: len(prepared.parts)] = held(
                -value_T, batch, part, chosen, self.topology
            )
        return found

    def _on_mismatch(self, prepared: PreparedStep) -> None:
        for observer in self.observers:
            observer.on_mismatch(prepared)


def _joined(many: Any) -> dict[str, float]:
    return {name: value for metrics in many for name, value in metrics.items()}
