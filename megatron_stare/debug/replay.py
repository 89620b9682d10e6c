"""Replay of a recorded step: the same rollouts, from the same weights, with the same plan.

    newest checkpoint before it -> every later step from its record -> the step, bit by bit

Rollouts, log-probs and versions of tokens come from the record; weights, optimizer, schedule and
the controller's state from a checkpoint, or from the start of the run. So it does not matter how
rollouts were sampled: on-policy, ahead, as a stream, across kills.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_stare import config as configuration
from megatron_stare.config import Config, UserError
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.metrics import Stopwatch
from megatron_stare.loop.prepare import effective_loss, updates_per_rollout
from megatron_stare.loop.record import read_groups
from megatron_stare.loop.run_directory import (
    MODEL_NAME,
    REFERENCE_NAME,
    Head,
    read_config,
    read_head,
)
from megatron_stare.loop.run_directory import records_directory as records_of
from megatron_stare.losses import objective_of
from megatron_stare.policy import runtime
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.checkpoints import actor_state
from megatron_stare.policy.checkpoints.checkpoints import CheckpointDirectory
from megatron_stare.policy.checkpoints.names import checkpoint_before, step_of
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group
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
        self.records = records_of(run)
        self.rows = {row["step"]: row for row in read_metrics(run / METRICS_NAME)}
        checkpoint = checkpoint_before(run, step)
        self.start = step_of(checkpoint) if checkpoint else 0
        if checkpoint:
            CheckpointDirectory(checkpoint.parent, topology).find(checkpoint.name, claim=False)
        self.heads = [read_head(self.records, each) for each in range(self.start + 1, step + 1)]
        self.config = _one_config(self.records, self.heads, run)
        for head in self.heads:
            _check(head, self.rows, topology)
        total = self.config.train.num_rollout * updates_per_rollout(self.config)
        self.actor = Actor(self.config, topology, total)
        objective = objective_of(effective_loss(self.config))
        self.learner = Learner(self.config, objective, self.actor)
        if checkpoint:
            loop = actor_state.into_actor(self.actor, checkpoint)
            self.learner.state = loop["loss_state"]

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
