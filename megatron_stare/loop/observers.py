"""Observers of a training step: they measure it and never change it or its order.

prepared -> on_scored -> every update -> on_update -> after the last one -> on_updated
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_stare.config import Config
from megatron_stare.loop.diagnostics.observer import Observer
from megatron_stare.loop.diagnostics.predicted import change_metrics, clip_metrics, view_of
from megatron_stare.loop.metrics import batch_metrics, mean_metrics, missing_routing
from megatron_stare.loop.prepare import PreparedStep, effective_loss, require_finite
from megatron_stare.losses import Objective
from megatron_stare.losses.planning import batch_mean
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.adapters.attach import merge_metrics
from megatron_stare.records import Group, Signals, TokenBatch


class StepObserver:
    """Every method is collective; the metrics it returns join the step's."""

    def on_start(self, step: int) -> None:
        """The engine has the weights after `step` steps, and the next step begins."""

    def on_scored(self, prepared: PreparedStep) -> dict[str, float]:
        """Before the first update. NonFiniteError: a statistic is not finite."""
        return {}

    def on_mismatch(self, prepared: PreparedStep) -> None:
        """MismatchAlarm is about to end the run; the plans are incomplete."""

    def on_update(
        self, settings: Mapping[str, Any], seen: TokenBatch, plan: Signals
    ) -> dict[str, float]:
        """After an update of the pass with `settings`; the metrics are averaged over updates."""
        return {}

    def on_updated(
        self,
        prepared: PreparedStep,
        shown: Sequence[TokenBatch],
        metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """After the last update. `shown`: the scored batches, none if nothing was measured."""
        return {}


class EntropyObserver(StepObserver):
    """Predicted and realised changes of entropy, clip fractions, and the files of `diagnostics`."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        actor: Actor,
        diagnostics: Observer | None = None,
    ) -> None:
        self.settings = config.diagnostics
        self.objective = objective
        self.actor = actor
        self.diagnostics = diagnostics
        self.loss = effective_loss(config)
        self.across = actor.topology.across

    def on_scored(self, prepared: PreparedStep) -> dict[str, float]:
        """The predicted change of entropy, and the step's diagnostics file where it is due. A batch
        without sensitivity is then scored once more for them.
        """
        due = self.diagnostics is not None and self.diagnostics.due(prepared.number)
        measured = prepared.has_sensitivity and self.settings.interval
        tokens = self.across.count(sum(b.advantage_T.numel() for b in prepared.batches))
        if not tokens or not (due or measured):
            return {}
        loss = self.objective.bind(self.loss, self.objective.passes_of(self.loss)[0])
        views = []
        for groups, batch, plan in zip(
            prepared.parts, prepared.batches, prepared.plans, strict=True
        ):
            if not prepared.has_sensitivity:
                batch = self.actor.score(batch, sensitivity=True)
                require_finite(groups, batch, self.across)
            views.append(view_of(groups, batch, plan, self.actor, loss))
        if due and self.diagnostics is not None:
            batches = [batch_metrics(view.batch, view.plan, self.across) for view in views]
            self.diagnostics.write(prepared.number, views, mean_metrics(batches))
        return mean_metrics([change_metrics(view, self.across) for view in views])

    def on_update(
        self, settings: Mapping[str, Any], seen: TokenBatch, plan: Signals
    ) -> dict[str, float]:
        """clip_fraction of the update, measured without the KL term."""
        bare = self.objective.bind(dataclasses.replace(self.loss, kl_loss_coef=0.0), settings)
        if not self.settings.interval or bare.logits:
            return {}
        by_T = self.actor.token_gradient(seen, bare, plan)[:, 0]
        return clip_metrics(by_T, seen, plan, self.across)

    def on_updated(
        self,
        prepared: PreparedStep,
        shown: Sequence[TokenBatch],
        metrics: Mapping[str, float],
    ) -> dict[str, float]:
        """The realised change of entropy, from one more scoring pass over the same tokens."""
        if not prepared.updates or not self.settings.realised:
            return {}
        means = []
        for batch, plan in zip(prepared.batches, prepared.plans, strict=True):
            entropy_T = self.actor.score(batch).entropy_T
            assert entropy_T is not None, "a scored batch"
            means.append(batch_mean(entropy_T, plan.coefficient_T, self.across))
        return {"entropy_change/realised": sum(means) / len(means) - metrics["entropy"]}


class AdaptersObserver(StepObserver):
    """Metrics of merging in the last sync, for runs that train adapters."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def on_scored(self, prepared: PreparedStep) -> dict[str, float]:
        """adapters/moved_entries and adapters/merge_error of the weights that were sampled from."""
        return merge_metrics(self.actor.chunks, self.actor.topology)


class RoutingObserver(StepObserver):
    """routing_missing, in runs that train on the experts that the engine chose."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def on_scored(self, prepared: PreparedStep) -> dict[str, float]:
        """The share of positions whose experts the rollouts do not have."""
        routers = self.actor.routers
        groups: list[Group] = [group for part in prepared.parts for group in part]
        return missing_routing(groups, routers.shape) if routers else {}


def metric_observers(
    config: Config, objective: Objective, actor: Actor, diagnostics: Observer | None = None
) -> list[StepObserver]:
    """The observers whose metrics a run writes and a replay repeats."""
    found: list[StepObserver] = [EntropyObserver(config, objective, actor, diagnostics)]
    if config.policy.routing_replay == "rollout":
        found.append(RoutingObserver(actor))
    return found
