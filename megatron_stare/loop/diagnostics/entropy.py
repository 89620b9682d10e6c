"""Measures the entropy of a training step before, in and after its updates; changes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config
from megatron_stare.loop.diagnostics.predicted import (
    View,
    change_metrics,
    clip_metrics,
    merged,
    view_of,
)
from megatron_stare.loop.diagnostics.sampled import places_of, sampled_rollouts
from megatron_stare.loop.diagnostics.tables import tables_of
from megatron_stare.loop.metrics import batch_metrics, mean_metrics
from megatron_stare.loop.prepare import PreparedStep, effective_loss, require_finite, target_of
from megatron_stare.losses import Objective
from megatron_stare.losses.planning import batch_mean
from megatron_stare.policy.actor import Actor
from megatron_stare.records import Signals, TokenBatch
from megatron_stare.reporting import diagnostics
from megatron_stare.system import BestEffort


class EntropyObserver:
    """Predicted and realised changes of entropy, and clip fractions; with a tokenizer also the
    files `<run.dir>/diagnostics/step_<n>.json.gz`. Every method is collective.
    """

    def __init__(
        self,
        config: Config,
        objective: Objective,
        actor: Actor,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config, self.settings = config, config.diagnostics
        self.objective = objective
        self.actor = actor
        self.tokenizer = tokenizer
        self.loss = effective_loss(config)
        self.across = actor.topology.across
        self._best_effort = BestEffort("the report lacks diagnostics of this step")

    def before_updates(self, prepared: PreparedStep) -> dict[str, float]:
        """The predicted change of entropy, and the step's diagnostics file where it is due. A batch
        without sensitivity is then scored once more for them. NonFiniteError: a statistic is not
        finite.
        """
        interval, step = self.settings.interval, prepared.number
        tokenizer = self.tokenizer if interval and (step == 1 or step % interval == 0) else None
        measured = prepared.has_sensitivity and interval
        tokens = self.across.count(sum(b.advantage_T.numel() for b in prepared.batches))
        if not tokens or (tokenizer is None and not measured):
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
        if tokenizer is not None:
            self._write(step, views, tokenizer)
        return mean_metrics([change_metrics(view, self.across) for view in views])

    def _write(self, step: int, views: Sequence[View], tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the step's file. Collective."""
        topology, values = self.actor.topology, merged(views)
        metrics = mean_metrics([batch_metrics(v.batch, v.plan, self.across) for v in views])
        tables = tables_of(
            values,
            self.across,
            longest=self.config.rollout.rollout_max_response_len,
            vocabulary=self.actor.hf.vocab_size,
            rows=self.settings.tokens,
            text_of=lambda number: tokenizer.decode([number], skip_special_tokens=False),
            chooses=views[0].plan.chosen_T is not None,
        )
        places = places_of([view.groups for view in views], self.settings.rollouts, step)
        rollouts = sampled_rollouts(places, values, topology, tokenizer)
        if not topology.is_first:
            return
        gate = views[0].plan.metrics.get("gate")
        found = diagnostics.Diagnostics(
            step=step,
            entropy=metrics["entropy"],
            target_entropy=target_of(self.config, self.objective),
            gate=None if gate is None else bool(gate),
            weight_w=metrics.get("weight_w"),
            weight_m=metrics.get("weight_m"),
            loss_tokens=sum(tables.position_bins.count),
            predicts=views[0].predicts,
            rollouts=rollouts,
            **vars(tables),
        )
        self._best_effort(lambda: diagnostics.write(Path(self.config.run.dir), found))

    def of_update(
        self, settings: Mapping[str, Any], seen: TokenBatch, plan: Signals
    ) -> dict[str, float]:
        """clip_fraction of the update, measured without the KL term."""
        bare = self.objective.bind(dataclasses.replace(self.loss, kl_loss_coef=0.0), settings)
        if not self.settings.interval or bare.logits:
            return {}
        by_T = self.actor.token_gradient(seen, bare, plan)[:, 0]
        return clip_metrics(by_T, seen, plan, self.across)

    def after_updates(
        self, prepared: PreparedStep, metrics: Mapping[str, float]
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
