"""Several updates to a rollout batch: what pi_old is in each, against float64 twins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megatron_stare.config import LossConfig
from megatron_stare.loop.metrics import Passes, Stopwatch
from megatron_stare.loop.prepare import updates_per_rollout
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, LossTokens
from tests.losses import reference_losses
from tests.small_run import small_config

# A step large enough that most ratios leave the clip. The rate falls from update to update.
SETTINGS = ("loss.name=dapo", "optimizer.lr=0.05", "optimizer.lr_warmup_iters=0")
SETTINGS += ("optimizer.lr_decay_style=linear",)
# The twins are given what the objectives would take by themselves.
SETTINGS += ("diagnostics.interval=0",)  # which ask the loss for its slopes too
SETTINGS += ("loss.eps_clip=0.2", "loss.eps_clip_high=0.28", "loss.eps_clip_c=10")
UPDATES = {
    "mini-batches": ("train.num_steps_per_rollout=2",),
    "epochs": ("train.epochs=2",),
    "both": ("train.num_steps_per_rollout=2", "train.epochs=2"),
    "not replanned": ("train.epochs=3", "train.replan=false"),
    "stare, replanned": ("train.epochs=2", "loss.name=stare"),
    "gspo": (
        "train.epochs=2",
        "loss.name=gspo",
        "loss.eps_clip_c=null",
        "policy.packed_sequences=true",
    ),
}


@dataclasses.dataclass
class Update:
    """The loss's inputs in one update, micro-batch after micro-batch, and its results."""

    surprisal: list[Tensor] = dataclasses.field(default_factory=list)
    old_surprisal: list[Tensor] = dataclasses.field(default_factory=list)
    advantage: list[Tensor] = dataclasses.field(default_factory=list)
    weight: list[Tensor] = dataclasses.field(default_factory=list)
    sequence: list[Tensor] = dataclasses.field(default_factory=list)
    gradient: list[Tensor] = dataclasses.field(default_factory=list)
    loss: list[Tensor] = dataclasses.field(default_factory=list)

    def column(self, name: str) -> list[float]:
        return torch.cat(getattr(self, name)).double().tolist()


def recorded(run: Trainer) -> list[Update]:
    """From now on every update of the run's policy leaves here what its loss saw and made."""
    updates: list[Update] = []
    objective, actor = run.learner.objective, run.actor
    update = actor.update

    def recording_loss(tokens: LossTokens) -> Tensor:
        loss = objective.loss(tokens, run.learner.preparer.loss)
        # The slope by the surprisal, without disturbing the head's own backward pass.
        (slope,) = torch.autograd.grad(loss.sum(), tokens.surprisal, retain_graph=True)
        found = {"loss": loss, "gradient": slope}
        found |= {name: getattr(tokens, name) for name in ("surprisal", "old_surprisal")}
        found |= {name: getattr(tokens, name) for name in ("advantage", "weight")}
        offset = sum(int(part.max()) + 1 for part in updates[-1].sequence if part.numel())
        if tokens.sequence is not None:
            found["sequence"] = tokens.sequence + offset
        for name, value in found.items():
            getattr(updates[-1], name).append(value.detach().clone())
        return loss

    def recording_update(*arguments: Any) -> Any:
        updates.append(Update())
        return update(*arguments)

    recording_loss.__name__ = objective.name
    run.learner.objective = dataclasses.replace(objective, function=recording_loss)
    actor.update = recording_update  # type: ignore[method-assign]
    return updates


def twin_of(name: str, update: Update, pi_old: list[float], config: LossConfig) -> Any:
    """The float64 twin's losses and slopes, with pi_old as it was measured before the step."""
    surprisal, advantage = update.column("surprisal"), update.column("advantage")
    if name == "gspo":
        sequence = [int(number) for number in update.column("sequence")]
        return reference_losses.gspo(surprisal, pi_old, advantage, sequence, config)
    twin, weight = reference_losses.TWINS[name], update.column("weight")
    return reference_losses.values_and_gradients(twin, surprisal, pi_old, advantage, weight, config)


@pytest.mark.parametrize("options", UPDATES.values(), ids=UPDATES.keys())
def test_every_update_starts_its_ratio_at_the_policy_before_the_step(
    options: tuple[str, ...], tmp_path: Path, topology: Topology
) -> None:
    run = Trainer(small_config(tmp_path, *SETTINGS, *options), topology)
    run.engine.load_weights(run.actor.weights(), 0)
    groups: tuple[Group, ...] = run.collector.collect(0).groups
    learner, config = run.learner, run.config.loss
    # Measured here, before any weight has moved, and not taken from what is tested.
    batches = [run.actor.pack(part, 0) for part in learner.preparer.mini_batches(groups)]
    scored = [run.actor.score(batch) for batch in batches]
    before = [batch.surprisal_T for batch in scored]
    updates = recorded(run)
    score = Mock(wraps=run.actor.score)
    run.actor.score = score  # type: ignore[method-assign]
    result = learner.step(groups, 0, True, Stopwatch())
    metrics, train = result.metrics, run.config.train
    assert len(updates) == train.num_steps_per_rollout * train.epochs >= 2
    passes = Passes(score.call_count / len(batches), len(updates) / len(batches))
    assert result.passes == passes, "by which mfu counts operations"
    assert metrics["lr"] == run.actor.optimizer.param_groups[0]["lr"], "of the last update"
    entropy = torch.cat([each.entropy_T for each in scored if each.entropy_T is not None]).double()
    assert metrics["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-6)
    coefficients = [
        learner.preparer.plan(run.actor.score(batch)).coefficient_T for batch in batches
    ]
    losses, clipped = [], 0
    for number, update in enumerate(updates):
        place = number % len(batches)
        pi_old = before[place]
        assert pi_old is not None
        torch.testing.assert_close(
            torch.cat(update.old_surprisal), pi_old, rtol=1e-6, atol=1e-6, msg=f"{number}"
        )
        values, slopes = twin_of(config.name, update, pi_old.tolist(), config)
        for found, expected in ((update.loss, values), (update.gradient, slopes)):
            torch.testing.assert_close(
                torch.cat(found).double(),
                torch.tensor(expected, dtype=torch.float64),
                rtol=1e-4,
                atol=1e-5,
            )
        advantage = update.column("advantage")
        clipped += sum(slope == 0 != side for slope, side in zip(slopes, advantage, strict=True))
        losses.append(float((coefficients[place].double() * torch.tensor(values)).sum()))
        if number == 0:
            assert clipped == 0, "pi is pi_old"
    assert clipped > 0 or config.name == "gspo", "the ratios of later updates reach the clip"
    assert metrics["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4, abs=1e-5)


def test_lopti_updates_on_improbable_tokens_and_then_on_the_others(
    tmp_path: Path, topology: Topology
) -> None:
    """Both with the same pi_old and the same denominator; together they are every token once."""
    options = ("loss.name=ar_lopti", "loss.settings.eta=0.01", "train.num_steps_per_rollout=2")
    config = small_config(tmp_path, *SETTINGS[1:2], *options)
    run = Trainer(config, topology)
    run.engine.load_weights(run.actor.weights(), 0)
    groups = run.collector.collect(0).groups
    batches = [run.actor.pack(part, 0) for part in run.learner.preparer.mini_batches(groups)]
    before = [run.actor.score(batch).surprisal_T for batch in batches]
    sides, update = [], run.actor.update

    def recorded_update(batch: Any, loss: Any, signals: Any) -> Any:
        shown: list[tuple[Tensor, Tensor]] = []

        def shown_loss(tokens: LossTokens) -> Tensor:
            found = loss.function(tokens)
            shown.append((tokens.old_surprisal.clone(), found.detach() != 0))
            return found

        done = update(batch, dataclasses.replace(loss, function=shown_loss), signals)
        sides.append([torch.cat(column) for column in zip(*shown, strict=True)])
        return done

    run.actor.update = recorded_update  # type: ignore[method-assign]
    assert run.learner.step(groups, 0, True, Stopwatch()).passes.updates
    assert len(sides) == 4, "two mini-batches, low and high"
    for number, (old, trained) in enumerate(sides):
        expected = before[number % 2]
        assert expected is not None
        torch.testing.assert_close(old, expected, rtol=1e-6, atol=1e-6)
        low = torch.exp(-old) < 0.01
        assert low.any() and not low.all()
        assert torch.equal(trained, low if number < 2 else ~low)
    one = small_config(tmp_path, *options, "loss.settings.tokens_of=all")
    assert (updates_per_rollout(config), updates_per_rollout(one)) == (4, 2)
