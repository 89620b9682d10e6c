"""What is done with one rollout batch: one optimizer step,
or several over mini-batches and epochs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import torch

from megatron_stare.collect.collect import OldLogprobs
from megatron_stare.collect.resampling import is_replayed
from megatron_stare.config import Config, LossConfig, MismatchAlarm, NonFiniteError
from megatron_stare.loop.diagnostics.observer import Observer
from megatron_stare.loop.diagnostics.predicted import View, change_metrics, clip_metrics, view_of
from megatron_stare.loop.metrics import batch_metrics, mean_metrics, missing_routing
from megatron_stare.loop.parity.scoring import held
from megatron_stare.loop.parity.witness import Witness
from megatron_stare.losses import Objective, find_objective, objective_of
from megatron_stare.losses.aggregation import batch_mean
from megatron_stare.losses.rollout_correction import corrected
from megatron_stare.numerics.selection import Across
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Signals, TokenBatch


class Watch(Protocol):
    """Times a phase: `with watch("score"): ...`."""

    def __call__(self, phase: str) -> AbstractContextManager[None]: ...


class Planned(NamedTuple):
    """A rollout batch before its updates: mini-batches of groups, packed, with their plans.
    `scored`: the statistics of the current policy are there.
    """

    parts: list[Sequence[Group]]
    batches: list[TokenBatch]
    plans: list[Signals]
    updates: int
    scored: bool


class Learner:
    """Score, plan, update, as often as the config asks.
    `state` is what the loss's plan keeps between steps. An `observer` writes what a step saw.
    """

    def __init__(
        self,
        config: Config,
        objective: Objective,
        actor: Actor,
        topology: Topology,
        observer: Observer | None = None,
        witness: Witness | None = None,
    ) -> None:
        self.observer, self.witness = observer, witness
        self.config, self.objective, self.actor, self.topology = config, objective, actor, topology
        self.mismatch = config.mismatch
        self.loss = settled(config)
        self.passes = objective.passes_of(self.loss)
        self.sensitivity = self.loss.sensitivity_metrics or objective.needs_sensitivity(self.loss)
        self.proxy_kappa = objective.proxy_threshold_of(self.loss)
        self.nucleus = objective.nucleus_of(self.loss)
        self.state: dict[str, float] = {}
        # of the last step, if it had an update: ln pi_old of the rollouts to be trained again
        self.old: OldLogprobs = []
        self.target = target_of(config, objective)
        self.reference: PolicyModel | None = None
        if config.loss.kl_loss_coef:
            source = config.policy.ref_hf_checkpoint or config.policy.hf_checkpoint
            self.reference = PolicyModel(
                source, config.policy, topology, config.rollout.rollout_temperature
            )

    def begin(self, step: int) -> None:
        """Weights are in the engine, and so many steps are behind them. Collective."""
        if self.witness:
            self.witness.before(step)

    def step(
        self,
        groups: Sequence[Group],
        version: int,
        signal: bool,
        watch: Watch,
        interrupted: Callable[[], bool],
    ) -> dict[str, float] | None:
        """Train on the groups, sampled at weight `version`; without `signal` only measure them.
        None where an interrupt came before the first update, so that none is made.

        One update per batch of fresh tokens, of a loss whose plan needs no scores, runs no scoring
        pass: pi_old is the policy that the update itself evaluates. NonFiniteError, naming the
        first offending rollout, where a statistic or the gradient is not finite: that update, and
        those behind it, are not made.
        """
        planned = self.planned(groups, version, signal, watch)
        if interrupted():
            return None
        parts, batches, plans, updates, scored = planned
        self.old = []
        with watch("diagnose"):
            predicted = self._observed(planned, version + 1)
        across = self.topology.across
        measured = (
            [batch_metrics(*pair, across) for pair in zip(batches, plans, strict=True)]
            if scored
            else []
        )
        results, shown = [], batches
        for number in range(updates):
            result, seen = self._update(parts, batches, plans, number, watch)
            results.append(result)
            if not measured:
                shown, measured = [seen], [batch_metrics(seen, plans[0], across)]
        if updates:
            self.state = plans[-1].state
            self.old = self._old(groups, parts, shown)
        routers = self.actor.routers if self.config.policy.routing_replay == "rollout" else None
        missing = missing_routing(groups, routers.shape) if routers else {}
        found = mean_metrics(measured) | mean_metrics(results) | predicted | missing
        if self.witness and measured:
            self.witness.after(version + 1, parts, shown, found)
        if updates and self.config.diagnostics.realised:
            with watch("diagnose"):
                found["entropy_change/realised"] = self._entropy(batches, plans) - found["entropy"]
        return found

    def _old(
        self,
        groups: Sequence[Group],
        parts: Sequence[Sequence[Group]],
        batches: Sequence[TokenBatch],
    ) -> OldLogprobs:
        """Of the groups, what each of their updates' ratios started at. Collective."""
        if not self.config.rollout.resampling.replays:
            return []
        found: list[Any] = [None] * len(groups)
        chosen = functools.partial(is_replayed, self.config.rollout.resampling)
        for number, (part, batch) in enumerate(zip(parts, batches, strict=True)):
            value_T = batch.surprisal_T if batch.old_surprisal_T is None else batch.old_surprisal_T
            assert value_T is not None, "a batch that an update has seen"
            found[number :: len(parts)] = held(-value_T, batch, part, chosen, self.topology)
        return found

    def _entropy(self, batches: Sequence[TokenBatch], plans: Sequence[Signals]) -> float:
        """Of the batches under the weights as they are now, each averaged as its loss is."""
        across, scored = self.topology.across, [self.actor.score(batch) for batch in batches]
        means = [
            batch_mean(batch.entropy_T, plan.coefficient_T, across)
            for batch, plan in zip(scored, plans, strict=True)
            if batch.entropy_T is not None
        ]
        return sum(means) / len(means)

    def _observed(self, planned: Planned, step: int) -> dict[str, float]:
        """The predicted change of entropy, and the step's diagnostics where they are due. A batch
        that was not scored is looked at then alone, in a pass of its own.
        """
        across = self.topology.across
        due = self.observer is not None and self.observer.due(step)
        known = planned.scored and self.sensitivity
        tokens = across.count(sum(batch.advantage_T.numel() for batch in planned.batches))
        if not tokens or not (due or (known and self.config.diagnostics.interval)):
            return {}
        loss, views = self.objective.bind(self.loss, self.passes[0]), list[View]()
        planned_parts = zip(planned.parts, planned.batches, planned.plans, strict=True)
        for groups, batch, plan in planned_parts:
            if not known:
                batch = self.actor.score(batch, sensitivity=True)
                require_finite(groups, batch, across)
            views.append(view_of(groups, batch, plan, self.actor, loss))
        if due and self.observer is not None:
            measured = [batch_metrics(view.batch, view.plan, across) for view in views]
            self.observer.write(step, views, mean_metrics(measured))
        return mean_metrics([change_metrics(view, across) for view in views])

    def planned(self, groups: Sequence[Group], version: int, signal: bool, watch: Watch) -> Planned:
        """The groups as mini-batches, scored where anything asks for it, each with its plan.
        NonFiniteError as in `step`.
        """
        parts = self._mini_batches(groups)
        batches = [self.actor.pack(part, version) for part in parts]
        updates = len(batches) * len(self.passes) * self.config.train.epochs if signal else 0
        own = self._starts_at_the_trainer(batches)
        scored = updates != 1 or self.objective.needs_scores or self._compares or own == "fresh"
        scored = scored or self.config.policy.moe_aux_loss_coeff > 0
        with watch("score"):
            batches = [self._prepared(batch, scored, updates > 1, own) for batch in batches]
            if scored:
                for part, batch in zip(parts, batches, strict=True):
                    require_finite(part, batch, self.topology.across)
            try:
                plans = [self._plan(batch) for batch in batches]
            except MismatchAlarm:
                if self.witness:
                    self.witness.write(version + 1, parts, batches)
                raise
            return Planned(parts, batches, plans, updates, scored)

    def _update(
        self,
        parts: list[Sequence[Group]],
        batches: list[TokenBatch],
        plans: list[Signals],
        number: int,
        watch: Watch,
    ) -> tuple[dict[str, float], TokenBatch]:
        """Update `number` of the step, on its mini-batch: all of these in every pass, all passes in
        every epoch. Beyond the first it is planned again if train.replan.
        """
        place, across = number % len(batches), self.topology.across
        if number and self.config.train.replan and self.objective.needs_scores:
            with watch("score"):
                batches[place] = self.actor.score(
                    batches[place], sensitivity=self.sensitivity, nucleus=self.nucleus
                )
                require_finite(parts[place], batches[place], across)
                plans[place] = self._plan(batches[place])
        with watch("update"):
            settings = self.passes[number // len(batches) % len(self.passes)]
            loss = self.objective.bind(self.loss, settings)
            result, seen = self.actor.update(batches[place], loss, plans[place])
        if not result:
            require_finite(parts[place], seen, across)
            found = self.actor.first_without_finite_gradient(batches[place], loss, plans[place])
            first = "of no rollout" if found is None else f"first in {named(parts[place], found)}"
            raise NonFiniteError(
                f"the gradient is not finite, {first}; the statistics of every token are",
                None if found is None else place_of(parts[place], found),
            )
        if self.config.diagnostics.interval and not loss.logits:
            bare = self.objective.bind(dataclasses.replace(self.loss, kl_loss_coef=0.0), settings)
            by_T = self.actor.token_gradient(seen, bare, plans[place])[:, 0]
            result |= clip_metrics(by_T, seen, plans[place], across)
        return result, seen

    def _starts_at_the_trainer(self, batches: Sequence[TokenBatch]) -> Literal["all", "fresh", ""]:
        """Of which tokens the ratio starts at 1, at the trainer's log-probs; the others start at
        those they were sampled with, or first trained with. The same on every rank.
        """
        again = sum(int(batch.scored_T.sum()) for batch in batches if batch.scored_T is not None)
        if self.topology.across.count(again):
            return ""
        if self.mismatch.old_policy == "rollout":
            return ""
        if self.mismatch.old_policy == "trainer" or self.mismatch.correction != "none":
            return "all"
        stale = sum(int((~batch.fresh_T).sum()) for batch in batches)
        return "fresh" if self.topology.across.count(stale) else "all"

    def _prepared(
        self, batch: TokenBatch, scored: bool, keep_old: bool, own: Literal["all", "fresh", ""]
    ) -> TokenBatch:
        """The batch with the scores its plan, its ratio and its KL term need."""
        if self.reference is not None:
            reference = self.reference.score(batch).surprisal_T
            batch = dataclasses.replace(batch, reference_surprisal_T=reference)
        if scored:
            batch = self.actor.score(
                batch,
                sensitivity=self.sensitivity,
                proxy_kappa=self.proxy_kappa,
                nucleus=self.nucleus,
                tempering=self.objective.tempering_of(self.loss, self.state),
            )
            batch = dataclasses.replace(batch, old_entropy_T=batch.entropy_T if keep_old else None)
        if own == "all":
            old_T = batch.surprisal_T if keep_old else None
        else:
            old_T = -batch.rollout_logprob_T
            if own == "fresh":
                assert batch.surprisal_T is not None, "fresh tokens start at their own scores"
                own_T = batch.fresh_T | ~batch.comparable_T
                old_T = torch.where(own_T, batch.surprisal_T, old_T)
        return dataclasses.replace(batch, old_surprisal_T=old_T)

    @property
    def _compares(self) -> bool:
        """Whether the rollout policy is compared with the trainer's before the update."""
        return self.mismatch.correction != "none" or self.mismatch.alarm > 0

    def _plan(self, batch: TokenBatch) -> Signals:
        """Every plan of a step starts from the state that the previous step left;
        what it chose is then corrected.
        """
        across = self.topology.across
        signals = self.objective.plan(batch, self.loss, across, self.state)
        if not self._compares:
            return signals
        reduce = functools.partial(self.objective.coefficients, batch, self.loss, across)
        return corrected(batch, signals, self.mismatch, across, reduce)

    def _mini_batches(self, groups: Sequence[Group]) -> list[Sequence[Group]]:
        """Whole groups, dealt in turn;
        fewer mini-batches than configured where there are fewer groups.
        """
        count = min(self.config.train.num_steps_per_rollout, len(groups))
        return [groups[number::count] for number in range(count)]


def updates_per_rollout(config: Config) -> int:
    """Optimizer steps on a rollout batch of as many groups as there are mini-batches, or more."""
    loss = settled(config)
    passes = len(objective_of(loss).passes_of(loss))
    return config.train.num_steps_per_rollout * config.train.epochs * passes


def target_of(config: Config, objective: Objective) -> float | None:
    """Where the run steers its entropy [nats]: by its loss, else by sampling prompts again; None:
    nowhere.
    """
    found, resampling = objective.target_entropy(settled(config)), config.rollout.resampling
    return resampling.target_entropy if found is None and resampling.method != "none" else found


def settled(config: Config) -> LossConfig:
    """The loss's settings, with those filled in that the run knows: how long a padded response is,
    and how many rollout batches there will be. UserError: an unknown objective.
    """
    loss = config.loss
    settings = dict(loss.settings)
    if "total_steps" in find_objective(loss.name).settings:
        settings.setdefault("total_steps", config.train.num_rollout)
    longest = loss.padded_length or config.rollout.rollout_max_response_len
    return dataclasses.replace(loss, padded_length=longest, settings=settings)


def require_finite(groups: Sequence[Group], batch: TokenBatch, across: Across) -> None:
    """NonFiniteError, on every rank, where a token's surprisal or entropy is not finite; it names
    the first rollout, in the groups' order, that has such a token.
    """
    assert batch.surprisal_T is not None and batch.entropy_T is not None, "a scored batch"
    sound_T = torch.isfinite(batch.surprisal_T) & torch.isfinite(batch.entropy_T)
    broken = across.count(~sound_T)
    if not broken:
        return
    first = int(across.minimum(batch.sequence_T[~sound_T].double()))
    raise NonFiniteError(
        f"{broken} tokens have a surprisal or entropy that is not finite, first in "
        f"{named(groups, first)}",
        place_of(groups, first),
    )


def named(groups: Sequence[Group], sequence: int) -> str:
    """Which rollout a batch's sequence is."""
    prompt, number = place_of(groups, sequence)
    return f"rollout {number} of prompt {prompt}"


def place_of(groups: Sequence[Group], sequence: int) -> tuple[int, int]:
    """The same, as the index of its prompt and its number there."""
    places = [(group, number) for group in groups for number in range(len(group.rollouts))]
    group, number = places[sequence]
    return group.prompt.index, number
