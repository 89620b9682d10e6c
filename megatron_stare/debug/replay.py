"""`train RUN --replay STEP`: a recorded step computed again, bit by bit or under other objectives:
the same rollouts, from the same weights, with the same plan.

    newest checkpoint before it -> every later step from its record -> the step, bit by bit

Rollouts, log-probs and versions of tokens come from the record; weights, optimizer, schedule and
the controller's state from a checkpoint, or from the start of the run. So it does not matter how
rollouts were sampled: on-policy, ahead, as a stream, across kills.

What an objective asks of a token is the derivative of the batch loss by its surprisal (and, where
the objective has a gradient through it, by its entropy), with weight, clipping and reduction in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_stare import config as configuration
from megatron_stare.config import Config, UserError
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.metrics import Stopwatch
from megatron_stare.loop.prepare import StepPreparer, effective_loss, named, updates_per_rollout
from megatron_stare.loop.record import read_groups
from megatron_stare.loop.run_directory import (
    MODEL_NAME,
    REFERENCE_NAME,
    Head,
    read_config,
    records_directory,
    replayed_heads,
)
from megatron_stare.losses import objective_of, reading
from megatron_stare.numerics.selection import Across
from megatron_stare.policy import runtime
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints import actor_state
from megatron_stare.policy.checkpoints.checkpoints import CheckpointDirectory
from megatron_stare.policy.layout import response_position
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, TokenBatch
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics

# A GPU's kernels and NCCL add in no fixed order without policy.deterministic. Figures then agree
# within this fraction of their value, or this much; later weights are not compared.
NOISE = (0.02, 1e-3)
# Sections that an update depends on; others may differ between the steps.
_LEARNING = ("policy.", "optimizer.", "loss.", "mismatch.", "train.")


@dataclass(frozen=True)
class Compared:
    """One step, as the run computed it and as the replay did."""

    step: int
    recorded: dict[str, float]  # its line in metrics.jsonl
    replayed: dict[str, float]
    weights: tuple[str, str]  # fingerprints of the weights before it, recorded and replayed
    noise: tuple[float, float] = (0.0, 0.0)  # relative and absolute; zeros: to the last bit

    @property
    def differing(self) -> list[str]:
        """Names of the metrics that differ by more than the noise."""
        return [
            name
            for name, value in self.replayed.items()
            if name not in self.recorded or not _same(self.recorded[name], value, *self.noise)
        ]

    @property
    def identical(self) -> bool:
        """The weights and every metric are the same to the last bit, or as the noise allows."""
        return (any(self.noise) or self.weights[0] == self.weights[1]) and not self.differing


class Replay:
    """A run as it was before step `step`, to compute that step again or to inspect it."""

    def __init__(self, run: Path, step: int, topology: Topology) -> None:
        """Start from the newest checkpoint before the step; no file of the run is changed.
        UserError: a needed file is missing, or the number of ranks differs from the run's.
        """
        self.run, self.step, self.topology = run, step, topology
        self.records = records_directory(run)
        self.rows = {row["step"]: row for row in read_metrics(run / METRICS_NAME)}
        checkpoint, self.heads = replayed_heads(run, step)
        self.start = self.heads[0].step - 1
        if checkpoint:
            CheckpointDirectory(checkpoint.parent, topology).find(checkpoint.name, claim=False)
        self.config = _one_config(self.records, self.heads, run)
        for head in self.heads:
            _check(head, self.rows, topology)
        total = self.config.train.num_rollout * updates_per_rollout(self.config)
        self.actor = Actor(self.config, topology, total)
        objective = objective_of(effective_loss(self.config))
        self.learner = Learner(self.config, objective, self.actor)
        if checkpoint:
            loop = actor_state.into_actor(self.actor, checkpoint)
            self.learner.resume(loop["loss_state"], checkpoint)

    def steps(self) -> Iterator[Compared]:
        """Every step from the checkpoint to `step`, computed again."""
        yield from map(self._compared, self.heads)

    def before(self) -> Iterator[Compared]:
        """The steps before `step`; after them the weights are those that it started with."""
        yield from map(self._compared, self.heads[:-1])

    def groups(self, head: Head) -> list[Group]:
        """The rollouts that a step trained on. Collective."""
        return read_groups(self.records, head, self.topology)

    def _compared(self, head: Head) -> Compared:
        weights = (head.weights, self.actor.fingerprint())
        exact = self.config.policy.deterministic or runtime.device().type == "cpu"
        noise = (0.0, 0.0) if exact else NOISE
        return Compared(head.step, self.rows[head.step], self._taken(head), weights, noise)

    def _taken(self, head: Head) -> dict[str, float]:
        groups = self.groups(head)
        result = self.learner.step(groups, head.step - 1, head.signal, Stopwatch())
        return result.metrics


def _one_config(records: Path, heads: list[Head], run: Path) -> Config:
    """The configuration that all the steps were trained under, with the run's present place.
    UserError: it was changed on the way.
    """
    configs = {head.attempt: read_config(records, head) for head in heads}
    last = configs[heads[-1].attempt]
    for head in heads:
        changed = [
            key
            for key, *_ in configuration.differences(configs[head.attempt], last)
            if key.startswith(_LEARNING)
        ]
        if changed:
            raise UserError(
                f"step {head.step} was trained under another {changed[0]} than step "
                f"{heads[-1].step}, and no checkpoint lies between them; choose a step before "
                "the change, or save more often (run.save_interval, run.keep_every)"
            )
    config = dataclasses.replace(last, run=dataclasses.replace(last.run, dir=str(run)))
    return _own_models(config, run)


def _own_models(config: Config, run: Path) -> Config:
    """The configuration with the models of a bundle, where the run is one."""

    def place(name: str, own: str) -> str:
        return str(run / name) if (run / name).is_dir() else own

    policy = dataclasses.replace(
        config.policy,
        hf_checkpoint=place(MODEL_NAME, config.policy.hf_checkpoint),
        ref_hf_checkpoint=place(REFERENCE_NAME, config.policy.ref_hf_checkpoint),
    )
    return dataclasses.replace(config, policy=policy)


def _check(head: Head, rows: dict[int, dict[str, float]], topology: Topology) -> None:
    if head.ranks != topology.world_size:
        raise UserError(
            f"step {head.step} was taken by {head.ranks} ranks and this is a world of "
            f"{topology.world_size}; start it with torchrun on {head.ranks} processes, whose sums "
            "are rounded alike"
        )
    if head.step not in rows:
        raise UserError(
            f"step {head.step} has a record and no line in {METRICS_NAME}: it was not finished; "
            "continue the run first"
        )


def _same(one: float, other: float, relative: float, absolute: float) -> bool:
    close = math.isclose(one, other, rel_tol=relative, abs_tol=absolute)
    return close or (one != one and other != other)


@dataclass(frozen=True)
class Difference:
    """The first token of the batch whose derivatives under two objectives differ."""

    rollout: str
    position: int  # in its response
    token: int
    asked: tuple[float, float]  # derivatives under the first objective and under this one


@dataclass(frozen=True)
class Asked:
    """The derivatives of one objective, compared with those of the first one."""

    name: str
    total: float  # sum over tokens of |derivative|
    tokens: int
    differing: int  # tokens whose derivative differs from the first objective's
    first: Difference | None  # the first of them
    metrics: dict[str, float]  # its plan's metrics


def compare_objectives(replay: Replay, names: list[str]) -> list[Asked]:
    """One entry per name, each compared with the first. Collective. UserError: an unknown
    objective, or one that reads whole distributions, whose derivatives are none of single tokens.
    """
    configs = [_under(replay.config, name) for name in names]
    for config in configs:
        loss = effective_loss(config)
        objective = objective_of(loss)
        objective.check(loss)
        if objective.bind(loss).logits:
            raise UserError(
                f"--losses names {config.loss.name!r}, which reads every token's whole "
                "distribution: it asks nothing of single tokens; leave it out"
            )
    groups = replay.groups(replay.heads[-1])
    found: list[Asked] = []
    reference: list[Tensor] = []
    for name, config in zip(names, configs, strict=True):
        preparer = StepPreparer(config, objective_of(effective_loss(config)), replay.actor)
        preparer.state = replay.learner.state if config is replay.config else {}
        watch = Stopwatch()
        prepared = preparer.prepare(groups, replay.step - 1, replay.heads[-1].signal, watch)
        preparer.plan_all(prepared, watch)
        batches = [
            batch if batch.surprisal_T is not None else replay.actor.score(batch)
            for batch in prepared.batches
        ]
        bound = preparer.objective.bind(preparer.loss)
        asked = [
            replay.actor.token_gradient(batch, bound, plan)
            for batch, plan in zip(batches, prepared.plans, strict=True)
        ]
        reference = reference or asked
        across = replay.topology.across
        differs = [(a != b).any(dim=1) for a, b in zip(asked, reference, strict=True)]
        found.append(
            Asked(
                name,
                sum(across.sum(each[:, 0].abs().double()) for each in asked),
                sum(across.count(each.shape[0]) for each in asked),
                sum(across.count(each) for each in differs),
                _first(prepared.parts, batches, differs, reference, asked, replay.topology),
                prepared.plans[0].metrics,
            )
        )
    return found


def _under(config: Config, name: str) -> Config:
    """The run's own configuration, or with another objective, whose own settings are the published
    ones; those fields of LossConfig that it reads stay the run's.
    """
    if name == config.loss.name:
        return config
    loss = dataclasses.replace(config.loss, name=name, settings={})
    return dataclasses.replace(config, loss=reading(loss))


def _first(
    parts: list[Any],
    batches: list[TokenBatch],
    differs: list[Tensor],
    reference: list[Tensor],
    asked: list[Tensor],
    topology: Topology,
) -> Difference | None:
    for number, (groups, batch, differs_T) in enumerate(zip(parts, batches, differs, strict=True)):
        place = _earliest(batch, differs_T, topology.across)
        own = None
        if place is not None:
            target_T = torch.cat([micro.target_N for micro in batch.microbatches])
            own = Difference(
                named(groups, int(batch.sequence_T[place])),
                int(response_position(batch.token_index_T[place])),
                int(target_T[place]),
                (float(reference[number][place, 0]), float(asked[number][place, 0])),
            )
        for found in topology.gather(own):
            if found is not None:
                return found
    return None


def _earliest(batch: TokenBatch, differs_T: Tensor, across: Across) -> int | None:
    """The row of the first differing token of all ranks, on the ranks that hold it."""
    if not across.count(differs_T):
        return None
    index_T = batch.token_index_T[differs_T]
    first = int(across.minimum(index_T.double()))
    rows = (batch.token_index_T == first).nonzero()
    return int(rows[0]) if len(rows) else None


# The figures that a reader looks for first. The replay compares all figures.
_SHOWN = ("loss", "grad_norm", "entropy", "chosen_positive", "chosen_negative", "weight_w")


def replay(run: Path, step: int, losses: list[str]) -> bool:
    """Print whether the step, and those between the checkpoint and the step, came out the same, and
    return it. UserError: the step cannot be replayed here.
    """
    if not run.is_dir():
        raise UserError(f"--replay takes a run directory, and {run} is none")
    config = read_config(records_directory(run), replayed_heads(run, step)[1][-1])
    with topologies.session(config.policy, config.run.seed) as topology:
        again = Replay(run, step, topology)
        say = Console(quiet=not topology.is_first, soft_wrap=True).print
        origin = f"checkpoint {again.start}" if again.start else "the run's first weights"
        say(f"step {step} of {run}, from {origin}, on {topology.world_size} ranks")
        identical = True
        for compared in again.before() if losses else again.steps():
            say(_line(compared))
            if compared.step == step:
                say(_figures(compared))
            identical = identical and compared.identical
        if losses:
            say(_objectives(compare_objectives(again, losses)))
    return identical


def _line(compared: Compared) -> str:
    if compared.identical and any(compared.noise):
        within = f"{compared.noise[0]:.0%} (policy.deterministic=true on a GPU gives the same bits)"
        return f"step {compared.step}: {len(compared.replayed)} figures agree within {within}"
    if compared.identical:
        return f"step {compared.step}: weights and {len(compared.replayed)} figures identical"
    before, now = compared.weights
    if before != now and not any(compared.noise):
        return f"step {compared.step}: begins with weights {now}, and was taken from {before}"
    names = compared.differing
    return f"step {compared.step}: {len(names)} figures differ: {', '.join(names)}"


def _figures(compared: Compared) -> Table:
    table = Table("figure", "recorded", "replayed", "")
    rows = [name for name in _SHOWN if name in compared.replayed]
    rows += [name for name in compared.differing if name not in rows]
    for name in rows:
        recorded, replayed = compared.recorded.get(name), compared.replayed[name]
        same = "differs" if name in compared.differing else "within the noise"
        if recorded is not None and _same(recorded, replayed, 0.0, 0.0):
            same = "same bits"
        table.add_row(name, repr(recorded), repr(replayed), same)
    return table


def _objectives(many: list[Asked]) -> Table:
    first = many[0].name
    table = Table(
        "objective", "sum |dL/ds|", f"tokens other than {first}", "the first of them", "asked there"
    )
    for asked in many:
        share = f"{asked.differing} of {asked.tokens}"
        where, values = "", ""
        if asked.first is not None:
            found = asked.first
            where = f"{found.rollout}, token {found.position} (id {found.token})"
            values = f"{found.asked[1]:.6g} ({first}: {found.asked[0]:.6g})"
        table.add_row(asked.name, f"{asked.total:.6g}", share, where, values)
    return table
