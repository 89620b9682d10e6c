"""Prepares a step's updates: mini-batches of groups, packed, scored and planned.

groups -> mini-batches -> TokenBatch -> scores, old and reference log-probs -> Signals
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from megatron_stare.config import Config, LossConfig, NonFiniteError
from megatron_stare.loop.metrics import Stopwatch
from megatron_stare.losses import Objective, find_objective, objective_of
from megatron_stare.losses.kl import distilled
from megatron_stare.losses.rollout_correction import corrected
from megatron_stare.numerics.selection import Across
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import (
    EVERY_RANK,
    Group,
    Rollout,
    Signals,
    TokenBatch,
    TrainedSequence,
    trained_sequences,
)
from megatron_stare.rollout.sglang.reference import read_logprobs


class OldPolicy(enum.Enum):
    """The log-probs that the ratios of a step's updates start from."""

    TRAINER = "the trainer's, for every token"
    TRAINER_IF_FRESH = "the trainer's for fresh tokens, the stored ones for the others"
    STORED = "those of the sampling, or of the rollout's first training"


@dataclass(frozen=True)
class PreparedStep:
    """A step before its updates; the lists have one entry per mini-batch."""

    number: int  # of the step, from 1
    parts: list[Sequence[Group]]
    batches: list[TokenBatch]
    plans: list[Signals]  # empty before `plan_all`
    updates: int
    scored: bool  # the batches have the policy's statistics; else the only update finds them
    has_sensitivity: bool  # and the entropy's sensitivity


class StepPreparer:
    """Packs, scores and plans mini-batches. `state` is what the loss's plan keeps between steps:
    every plan of a step starts from it, and the last one's is the next step's.
    """

    def __init__(self, config: Config, objective: Objective, actor: Actor) -> None:
        self.config = config
        self.objective = objective
        self.actor = actor
        self.across = actor.topology.across
        self.loss = effective_loss(config)
        self.passes = objective.passes_of(self.loss)
        self.sensitivity = self.loss.sensitivity_metrics or objective.needs_sensitivity(self.loss)
        self.nucleus = objective.nucleus_of(self.loss)
        self.state: dict[str, float] = {}
        self.served = config.loss.reads_reference and bool(config.sglang.reference_urls)
        if config.loss.reads_reference and not self.served:
            actor.add_reference()

    def prepare(
        self, groups: Sequence[Group], version: int, signal: bool, watch: Stopwatch
    ) -> PreparedStep:
        """Mini-batches, scored where the loss, its ratio or a comparison needs it, without plans.

        A single update whose plan needs no scores runs no scoring pass: pi_old is the policy that
        the update itself evaluates. NonFiniteError: a statistic of a token is not finite.
        """
        parts = self.mini_batches(groups)
        batches = [self.actor.pack(part, version) for part in parts]
        updates = len(batches) * len(self.passes) * self.config.train.epochs if signal else 0
        old = self._old_policy(batches)
        scored = (
            updates != 1
            or self.objective.needs_scores
            or self._compares
            or old is OldPolicy.TRAINER_IF_FRESH
            or self.config.policy.moe_aux_loss_coeff > 0
            or self.loss.distillation_coef > 0
        )
        with watch("score"):
            batches = self._with_reference(parts, self._with_likeliest(batches), version)
            batches = [self._with_scores(batch, scored, updates > 1, old) for batch in batches]
            if scored:
                for part, batch in zip(parts, batches, strict=True):
                    require_finite(part, batch, self.across)
        return PreparedStep(
            version + 1, parts, batches, [], updates, scored, scored and self.sensitivity
        )

    def plan_all(self, prepared: PreparedStep, watch: Stopwatch) -> None:
        """Add every mini-batch's plan. MismatchAlarm: engine and trainer differ too much."""
        with watch("score"):
            prepared.plans.extend(self.plan(batch) for batch in prepared.batches)

    def replan(self, prepared: PreparedStep, place: int) -> None:
        """Score and plan one mini-batch again, for its next update (train.replan). No alarm stops
        the run here: the updates before it have moved the policy, and the step could not be undone.
        """
        batch = self.actor.score(
            prepared.batches[place], sensitivity=self.sensitivity, nucleus=self.nucleus
        )
        require_finite(prepared.parts[place], batch, self.across)
        prepared.batches[place] = batch
        prepared.plans[place] = self.plan(batch, stops=False)

    def plan(self, batch: TokenBatch, stops: bool = True) -> Signals:
        """The loss's plan from the state of the previous step, corrected for another rollout
        policy. `stops`: mismatch.on_alarm=stop holds.
        """
        mismatch = self.config.mismatch
        if not stops and mismatch.on_alarm == "stop":
            mismatch = dataclasses.replace(mismatch, alarm=0.0)
        signals = self.objective.plan(batch, self.loss, self.across, self.state)
        if not self._compares:
            return signals
        reduce = functools.partial(self.objective.coefficients, batch, self.loss, self.across)
        return corrected(batch, signals, mismatch, self.across, reduce)

    def mini_batches(self, groups: Sequence[Group]) -> list[Sequence[Group]]:
        """Whole groups in turn: train.num_steps_per_rollout mini-batches, or one per group if
        there are fewer groups.
        """
        count = min(self.config.train.num_steps_per_rollout, len(groups))
        return [groups[number::count] for number in range(count)]

    @property
    def _compares(self) -> bool:
        """Whether the rollout policy is compared with the trainer's before the update."""
        return self.config.mismatch.correction != "none" or self.config.mismatch.alarm > 0

    def _old_policy(self, batches: Sequence[TokenBatch]) -> OldPolicy:
        """The old policy of a step, the same on every rank."""
        mismatch = self.config.mismatch
        replayed = sum(int(batch.scored_T.sum()) for batch in batches if batch.scored_T is not None)
        if self.across.count(replayed) or mismatch.old_policy == "rollout":
            return OldPolicy.STORED
        if mismatch.old_policy == "trainer" or mismatch.correction != "none":
            return OldPolicy.TRAINER
        stale = sum(int((~batch.fresh_T).sum()) for batch in batches)
        return OldPolicy.TRAINER_IF_FRESH if self.across.count(stale) else OldPolicy.TRAINER

    def _with_reference(
        self, parts: Sequence[Sequence[Group]], batches: list[TokenBatch], version: int
    ) -> list[TokenBatch]:
        """The batches with the reference model's surprisal, if there is one."""
        found = []
        if self.served:
            for part, batch in zip(parts, batches, strict=True):
                groups = with_served_logprobs(part, self.config, self.actor.topology)
                # packed like the rollouts' own log-probs: they are in the batch's order
                served_T = -self.actor.pack(groups, version).rollout_logprob_T
                found.append(dataclasses.replace(batch, reference_surprisal_T=served_T))
            return found
        reference = self.actor.reference
        if reference is None:
            return batches
        with self.actor.base() if reference is self.actor else reference.on_device():
            for batch in batches:
                ids_TK = batch.top_ids_TK
                top_TK = None if ids_TK is None else reference.logprobs_of(batch, ids_TK)
                surprisal_T = reference.score(batch).surprisal_T
                found.append(
                    dataclasses.replace(
                        batch, reference_surprisal_T=surprisal_T, teacher_top_TK=top_TK
                    )
                )
        return found

    def _with_likeliest(self, batches: list[TokenBatch]) -> list[TokenBatch]:
        """The batches with the policy's likeliest tokens, where a teacher is to judge them."""
        if not self.loss.distillation_top_k:
            return batches
        found = [self.actor.likeliest(batch, self.loss.distillation_top_k) for batch in batches]
        return [
            dataclasses.replace(batch, top_ids_TK=ids_TK, top_logprob_TK=logprob_TK)
            for batch, (ids_TK, logprob_TK) in zip(batches, found, strict=True)
        ]

    def _with_scores(
        self, batch: TokenBatch, scored: bool, keep_old: bool, old: OldPolicy
    ) -> TokenBatch:
        """The batch with the scores that its plan and its ratio need, and a teacher's advantage."""
        if scored:
            batch = self.actor.score(
                batch,
                sensitivity=self.sensitivity,
                proxy_kappa=self.objective.proxy_threshold_of(self.loss),
                nucleus=self.nucleus,
                tempering=self.objective.tempering_of(self.loss, self.state),
            )
            batch = dataclasses.replace(batch, old_entropy_T=batch.entropy_T if keep_old else None)
            batch = distilled(batch, self.loss)
        if old is OldPolicy.TRAINER:
            old_T = batch.surprisal_T if keep_old else None
        else:
            old_T = -batch.rollout_logprob_T
            if old is OldPolicy.TRAINER_IF_FRESH:
                assert batch.surprisal_T is not None, "fresh tokens start at their own scores"
                own_T = batch.fresh_T | ~batch.comparable_T
                old_T = torch.where(own_T, batch.surprisal_T, old_T)
        return dataclasses.replace(batch, old_surprisal_T=old_T)


def updates_per_rollout(config: Config) -> int:
    """Optimizer steps per rollout batch with at least as many groups as mini-batches."""
    loss = effective_loss(config)
    passes = len(objective_of(loss).passes_of(loss))
    return config.train.num_steps_per_rollout * config.train.epochs * passes


def target_of(config: Config, objective: Objective) -> float | None:
    """The entropy [nats] that the run steers to, by its loss or else by resampling; None: no
    target.
    """
    found = objective.target_entropy(effective_loss(config))
    resampling = config.rollout.resampling
    return resampling.target_entropy if found is None and resampling.method != "none" else found


def effective_loss(config: Config) -> LossConfig:
    """The loss's settings, completed with what the run knows: the length of a padded response and
    the number of rollout batches. UserError: an unknown objective.
    """
    loss = config.loss
    settings = dict(loss.settings)
    if "total_steps" in find_objective(loss.name).settings:
        settings.setdefault("total_steps", config.train.num_rollout)
    longest = loss.padded_length or config.rollout.rollout_max_response_len
    return dataclasses.replace(loss, padded_length=longest, settings=settings)


def require_finite(groups: Sequence[Group], batch: TokenBatch, across: Across) -> None:
    """NonFiniteError, on every rank, if a token's surprisal or entropy is not finite; it names the
    first rollout, in the groups' order, that has such a token.
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
    """The name of a batch's sequence in messages."""
    prompt, number = place_of(groups, sequence)
    return f"rollout {number} of prompt {prompt}"


def place_of(groups: Sequence[Group], sequence: int) -> tuple[int, int]:
    """The index of a sequence's prompt, and the rollout's number in its group."""
    places = [(group, number) for group in groups for number in range(len(group.rollouts))]
    group, number = places[sequence]
    return group.prompt.index, number


def with_served_logprobs(
    groups: Sequence[Group], config: Config, topology: Topology
) -> list[Group]:
    """The groups, whose rollouts have the log-probs of the reference model on servers
    (sglang.reference_urls) in place of their own where this rank has their tokens. Each rank asks
    for what it holds. Collective.
    """
    trained = trained_sequences(groups)
    rank, first = topology.rank, topology.is_first
    asked = [
        place
        for place, each in enumerate(trained)
        if each.group.holder == rank or (each.group.holder == EVERY_RANK and first)
    ]
    found: dict[int, numpy.ndarray] = {}

    def ask() -> dict[int, numpy.ndarray]:
        policy, servers = config.policy, config.sglang
        size = read_hf_config(policy.ref_hf_checkpoint or policy.hf_checkpoint).vocab_size
        ids = [_ids(trained[place]) for place in asked]
        read = read_logprobs(servers.reference_urls, servers, size, ids)
        found.update(zip(asked, read, strict=True))
        return {n: found[n] for n in asked if trained[n].group.holder == EVERY_RANK}

    found |= agreed(topology, ask)[0]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    arrays: dict[int, numpy.ndarray] = {}
    for place, logprobs in found.items():
        number, group, _, _, offset, _ = trained[place]
        whole = arrays.setdefault(number, numpy.zeros(rollouts[number].length, numpy.float32))
        own = logprobs[group.prompt_length - 1 :]
        whole[offset : offset + len(own)] = own
    for number, logprobs in arrays.items():
        rollouts[number] = dataclasses.replace(rollouts[number], logprobs=logprobs)  # type: ignore[call-arg]
    replaced = iter(rollouts)
    return [
        dataclasses.replace(group, rollouts=tuple(itertools.islice(replaced, len(group.rollouts))))
        for group in groups
    ]


def _ids(trained: TrainedSequence) -> numpy.ndarray:
    rollout = trained.rollout
    assert isinstance(rollout, Rollout), "this rank has its tokens"
    return numpy.concatenate([trained.group.prompt.token_ids, rollout.response_ids])
