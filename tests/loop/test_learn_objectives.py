"""Every objective through the real learner: score, plan, update, on one batch of a tiny model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stare.config import LossConfig, override
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.metrics import Stopwatch
from megatron_stare.loop.prepare import effective_loss
from megatron_stare.loop.trainer import Trainer
from megatron_stare.losses import objective_of
from megatron_stare.losses.registry import all_objectives
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from tests.docs.metric_keys import unexplained
from tests.small_run import small_config

# What no paper publishes must be set.
REQUIRED = {
    "minpro": ("loss.eps_clip=0.2", "loss.eps_clip_high=0.2"),
    "arm": ("loss.settings.alpha=0.1",),
    "repo_r": ("loss.settings.target=1.0",),
    "adapo": (
        *("loss.settings.change=0.01", "loss.settings.high_min=0.1"),
        "loss.settings.high_max=0.5",
    ),
}


def train(directory: Path, names: list[str], steps: int) -> dict[str, list[dict[str, float]]]:
    """Metrics of every step of every objective: two updates each."""
    epochs = (
        "train.epochs=2",
        "rollout.rollout_batch_size=2",
        "policy.max_tokens_per_gpu=2000",
        "policy.packed_sequences=true",
    )
    config = small_config(directory, *epochs, "optimizer.lr=1e-3")
    config = dataclasses.replace(config, loss=LossConfig())
    topology = topologies.start(config.policy)
    run = Trainer(config, topology)
    run.engine.load_weights(run.actor.weights(), 0)
    groups = run.collector.collect(0).groups
    found = {}
    for name in names:
        own = override(config, [f"loss.name={name}", *REQUIRED.get(name, ())])
        learner = Learner(own, objective_of(effective_loss(own)), run.actor)
        found[name] = [learner.step(groups, 0, True, Stopwatch()).metrics for _ in range(steps)]
    topologies.stop()
    return found


def check(found: dict[str, list[dict[str, float]]]) -> None:
    for name, rows in found.items():
        for row in rows:
            assert all(math.isfinite(value) for value in row.values()), name
            # OPEFO's balance takes all weight from a batch that only raises entropy
            assert row["grad_norm"] > 0 or name in ("psr", "opefo"), name


def test_every_objective_trains(tmp_path: Path) -> None:
    """The page of metrics explains every metric of an objective."""
    found = train(tmp_path, list(all_objectives()), 1)
    check(found)
    assert not unexplained(key for rows in found.values() for row in rows for key in row)
    assert unexplained(["no_such_key", "zeta"]) == ["no_such_key"]


@pytest.mark.slow
def test_every_objective_trains_twenty_steps(tmp_path: Path) -> None:
    check(train(tmp_path, list(all_objectives()), 20))


def test_the_last_step_decides_the_temperature_at_which_pi_old_is_scored(
    tmp_path: Path, topology: Topology
) -> None:
    """An untrained policy's surprisal is about ln 257: over its target from the second step on. The
    update of the second epoch is planned again, on the scores from before the first.
    """
    config = small_config(tmp_path, "loss.name=dcpo_distribution", "train.epochs=2")
    run = Trainer(config, topology)
    run.engine.load_weights(run.actor.weights(), 0)
    groups = run.collector.collect(0).groups
    (packed,) = (run.actor.pack(part, 0) for part in run.learner.preparer.mini_batches(groups))
    score, update = run.actor.score, run.actor.update
    asked: list[float | None] = []
    updates: list[tuple[Any, ...]] = []

    def recorded_score(batch: Any, **options: Any) -> Any:
        asked.append(options.get("tempering"))
        return score(batch, **options)

    def recorded_update(*arguments: Any) -> Any:
        updates.append(arguments)
        return update(*arguments)

    run.actor.score, run.actor.update = recorded_score, recorded_update  # type: ignore[method-assign]
    for tempering in (1.2, 0.8):
        asked.clear()
        updates.clear()
        expected = score(packed, tempering=tempering).tempered_T
        assert run.learner.step(groups, 0, True, Stopwatch()).passes.updates
        assert asked == [tempering, None]
        (first, _, plan), (second, _, later) = updates
        assert torch.equal(first.tempered_T, expected) and torch.equal(second.tempered_T, expected)
        assert not torch.equal(first.surprisal_T, second.surprisal_T)
        assert 0 < plan.numbers["mix"] == later.numbers["mix"]
        right_T = packed.reward_Q[packed.sequence_T] > 0.05
        torch.testing.assert_close(later.values["pull"], right_T * torch.exp(expected))
    assert run.learner.state["surprisal"] > 4.0
