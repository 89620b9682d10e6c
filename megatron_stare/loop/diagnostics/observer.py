"""Writes a step's diagnostics: `<run.dir>/diagnostics/step_<n>.json.gz`, at an interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_stare.config import Config
from megatron_stare.loop.diagnostics.predicted import View, merged
from megatron_stare.loop.diagnostics.sampled import places_of, sampled_rollouts
from megatron_stare.loop.diagnostics.tables import tables_of
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting import diagnostics
from megatron_stare.system import BestEffort


class Observer:
    """`target` is the loss's target entropy [nats], None where it has none."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        actor: Actor,
        topology: Topology,
        target: float | None,
    ) -> None:
        self.config, self.tokenizer, self.topology = config, tokenizer, topology
        self.vocabulary, self.target = actor.hf.vocab_size, target
        self._best_effort = BestEffort("the report lacks diagnostics of this step")

    def due(self, step: int) -> bool:
        """Whether step `step` is looked at: the first one, and every diagnostics.interval-th."""
        interval = self.config.diagnostics.interval
        return interval > 0 and (step == 1 or step % interval == 0)

    def write(self, step: int, views: Sequence[View], metrics: dict[str, float]) -> None:
        """Collective. `metrics` are those of the step's batch and plan."""
        settings, values = self.config.diagnostics, merged(views)
        tables = tables_of(
            values,
            self.topology.across,
            longest=self.config.rollout.rollout_max_response_len,
            vocabulary=self.vocabulary,
            rows=settings.tokens,
            text_of=lambda number: self.tokenizer.decode([number], skip_special_tokens=False),
            chooses=views[0].plan.chosen_T is not None,
        )
        places = places_of([view.groups for view in views], settings.rollouts, step)
        rollouts = sampled_rollouts(places, values, self.topology, self.tokenizer)
        if not self.topology.is_first:
            return
        gate = views[0].plan.metrics.get("gate")
        found = diagnostics.Diagnostics(
            step=step,
            entropy=metrics["entropy"],
            target_entropy=self.target,
            gate=None if gate is None else bool(gate),
            weight_w=metrics.get("weight_w"),
            weight_m=metrics.get("weight_m"),
            loss_tokens=sum(tables.position_bins.count),
            predicts=views[0].predicts,
            rollouts=rollouts,
            **vars(tables),
        )
        self._best_effort(lambda: diagnostics.write(Path(self.config.run.dir), found))
