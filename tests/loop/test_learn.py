"""The start of each token's ratio, and steps with values that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stare.collect.batch import Collected
from megatron_stare.config import EngineError, MismatchAlarm, NonFiniteError, UserError
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.losses import policy_loss
from megatron_stare.losses.registry import all_objectives
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Signals, TokenBatch
from megatron_stare.reporting import diagnostics
from megatron_stare.reporting.report import write_report
from tests.small_run import rows_of, small_config

STALE = ("rollout.over_sampling_batch_size=12", "rollout.max_staleness=1", "train.num_rollout=3")


def updates_of(trainer: Trainer) -> list[TokenBatch]:
    """Every batch that the run hands to the optimizer, as it goes by."""
    seen: list[TokenBatch] = []
    update = trainer.actor.update

    def recorded(batch: TokenBatch, *rest: Any) -> Any:
        seen.append(batch)
        return update(batch, *rest)

    trainer.actor.update = recorded  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", ["stare", "dapo"])
def test_ratios_of_stale_tokens_start_at_their_sampling_and_others_at_1(
    name: str, tmp_path: Path, topology: Topology
) -> None:
    trainer = Trainer(small_config(tmp_path, *STALE, f"loss.name={name}"), topology)
    seen = updates_of(trainer)
    assert trainer.run(Interrupt())
    assert seen[0].fresh_T.all() and seen[0].old_surprisal_T is None, "nothing stale: ratio 1"
    mixed = [batch for batch in seen if not batch.fresh_T.all()]
    assert mixed, "a later step trains on surplus groups"
    for batch in mixed:
        assert batch.old_surprisal_T is not None and batch.surprisal_T is not None
        stale = ~batch.fresh_T
        assert torch.equal(batch.old_surprisal_T[stale], -batch.rollout_logprob_T[stale])
        fresh = batch.fresh_T
        assert torch.equal(batch.old_surprisal_T[fresh], batch.surprisal_T[fresh])
        moved = (batch.surprisal_T - batch.old_surprisal_T)[stale].abs()
        assert moved.max() > 1e-4, "the weights have moved since"


@pytest.mark.parametrize("option", ["mismatch.old_policy=trainer", "mismatch.correction=token_tis"])
def test_with_a_correction_or_on_request_all_ratios_start_at_1(
    option: str, tmp_path: Path, topology: Topology
) -> None:
    trainer = Trainer(small_config(tmp_path, *STALE, option), topology)
    seen = updates_of(trainer)
    assert trainer.run(Interrupt())
    assert any(not batch.fresh_T.all() for batch in seen)
    assert all(batch.old_surprisal_T is None for batch in seen)


def test_what_the_updates_of_a_step_change_is_no_mismatch(
    tmp_path: Path, topology: Topology
) -> None:
    """The alarm looks before the first update, when it can still end a whole step."""
    options = ("mismatch.old_policy=rollout", "mismatch.alarm=1e-3", "train.epochs=2")
    config = small_config(tmp_path, *options, "train.num_rollout=1")
    assert Trainer(config, topology).run(Interrupt())
    assert rows_of(config)[0]["logprob_diff_mean"] < 1e-4


def spoil_scores(trainer: Trainer, steps: set[int]) -> None:
    """From the actor's scoring pass one NaN comes, in the second sequence of these steps."""
    score = trainer.actor.score

    def damaged(batch: TokenBatch, **options: Any) -> TokenBatch:
        scored = score(batch, **options)
        if trainer.step in steps:
            assert scored.entropy_T is not None
            scored.entropy_T[(batch.sequence_T == 1).nonzero()[0]] = float("nan")
        return scored

    trainer.actor.score = damaged  # type: ignore[method-assign]


def test_a_nan_logit_skips_the_update_is_counted_and_names_its_rollout(
    tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(small_config(tmp_path, "train.num_rollout=4"), topology)
    spoil_scores(trainer, {1})
    seen = updates_of(trainer)
    assert trainer.run(Interrupt())
    rows = rows_of(trainer.config)
    assert [row["nonfinite"] for row in rows] == [0, 1, 0, 0] and len(seen) == 3
    assert "loss" not in rows[1] and rows[2]["logprob_diff_max"] < 1e-4
    warnings = [line for line in capsys.readouterr().err.splitlines() if "no update" in line]
    assert len(warnings) == 1 and "1 tokens have a surprisal or entropy" in warnings[0]
    assert "first in rollout 1 of prompt " in warnings[0] and warnings[0].startswith("step 2: ")


_step = [0]  # of the run


def sometimes_nan(tokens: Any) -> torch.Tensor:
    """NaN for every token of the second step."""
    return -tokens.advantage * tokens.ratio * (float("nan") if _step[0] == 1 else 1.0)


@pytest.mark.parametrize("realised", ["true", "false"])
def test_a_nan_on_a_step_with_diagnostics_is_a_skipped_update(
    realised: str,
    tmp_path: Path,
    topology: Topology,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Other tests of this process look at every objective that is registered.
    monkeypatch.setattr("megatron_stare.losses.registry._objectives", all_objectives())
    policy_loss(family="own")(sometimes_nan)
    config = small_config(
        tmp_path,
        *(f"loss.name={__name__}.sometimes_nan", "train.num_rollout=3"),
        *("diagnostics.interval=1", f"diagnostics.realised={realised}"),
    )
    trainer = Trainer(config, topology)
    collect = trainer.collector.collect

    def counted(step: int) -> Collected:
        _step[0] = step
        return collect(step)

    trainer.collector.collect = counted  # type: ignore[method-assign]
    assert trainer.run(Interrupt())
    assert [row["nonfinite"] for row in rows_of(config)] == [0, 1, 0]
    assert "the gradient is not finite" in capsys.readouterr().err
    directory = tmp_path / "run"
    assert [diagnostics.read(directory, step).change is None for step in (1, 2, 3)] == [
        *(False, True, False)
    ]
    write_report([directory])


def test_no_change_is_realised_without_a_step_of_the_weights(
    tmp_path: Path, topology: Topology
) -> None:
    """Entropies before and after are averaged alike, also where the loss is a sum."""
    options = ("diagnostics.interval=1", "diagnostics.realised=true", "optimizer.lr=1e-20")
    options += ("loss.aggregation=seq-mean-token-sum-norm", "train.num_rollout=1")
    config = small_config(tmp_path, *options)
    assert Trainer(config, topology).run(Interrupt())
    (row,) = rows_of(config)
    assert abs(row["entropy"] - row["entropy_of_loss"]) > 0.1
    assert row["entropy_change/realised"] == pytest.approx(0.0, abs=1e-6)


def test_diagnostics_that_cannot_be_written_end_no_run(
    tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "diagnostics.interval=1", "train.num_rollout=2")
    trainer = Trainer(config, topology)
    (tmp_path / "run/diagnostics").write_text("no directory")
    assert trainer.run(Interrupt())
    assert len(rows_of(config)) == 2
    assert capsys.readouterr().err.count("the report lacks diagnostics") == 1


def test_a_gradient_that_is_not_finite_changes_nothing(
    tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    """dapo with one update scores nothing first: the gradient is the first to know. Here it is so
    whatever the rollouts are, and that is said.
    """
    trainer = Trainer(small_config(tmp_path, "loss.name=dapo", "train.num_rollout=3"), topology)
    parameter = next(iter(trainer.actor.chunks[0].parameters()))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if trainer.step == 1 else gradient

    parameter.register_hook(spoil)
    before: list[torch.Tensor] = []
    load = trainer.engine.load_weights

    def recorded(weights: Any, version: int) -> None:
        before.append(torch.cat([tensor.flatten().clone() for _, tensor in weights]))
        load(weights, version)

    trainer.engine.load_weights = recorded  # type: ignore[method-assign]
    assert trainer.run(Interrupt())
    rows = rows_of(trainer.config)
    assert [row["nonfinite"] for row in rows] == [0, 1, 0]
    assert not torch.equal(before[0], before[1]) and torch.equal(before[1], before[2])
    assert not torch.equal(before[2], before[3]) and before[3].isfinite().all()
    assert "the gradient is not finite, of no rollout" in capsys.readouterr().err


def test_a_gradient_that_is_not_finite_names_its_rollout(
    tmp_path: Path, topology: Topology, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(small_config(tmp_path, "loss.name=dapo", "train.num_rollout=3"), topology)
    plan = trainer.learner.preparer.plan

    def damaged(batch: TokenBatch) -> Signals:
        signals = plan(batch)
        if trainer.step == 1:
            signals.coefficient_T[batch.sequence_T == 3] = float("inf")
        return signals

    trainer.learner.preparer.plan = damaged  # type: ignore[method-assign]
    assert trainer.run(Interrupt())
    assert [row["nonfinite"] for row in rows_of(trainer.config)] == [0, 1, 0]
    assert "the gradient is not finite, first in rollout 3 of prompt " in capsys.readouterr().err


def test_too_many_skipped_updates_stop_the_run_with_its_last_good_checkpoint(
    tmp_path: Path, topology: Topology
) -> None:
    options = ("train.num_rollout=6", f"run.dir={tmp_path}/stopped")
    trainer = Trainer(small_config(tmp_path, *options, "train.max_nonfinite_steps=2"), topology)
    spoil_scores(trainer, {2, 3, 4, 5})
    with pytest.raises(NonFiniteError, match=r"2 steps in a row .*max_nonfinite_steps=2"):
        trainer.run(Interrupt())
    assert (tmp_path / "stopped/checkpoints/latest").read_text().strip() == "step_00000003"
    resumed = Trainer(small_config(tmp_path, *options), topology)
    assert resumed.run(Interrupt())
    rows = rows_of(resumed.config)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["nonfinite"] for row in rows] == [0, 0, 1, 0, 0, 0]


ENDS = (UserError("data"), EngineError("pool"), MismatchAlarm("far"), NonFiniteError("nan"))


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ("collect", ENDS[1]),
        ("learn", ENDS[2]),
        *(
            pytest.param(phase, error, marks=pytest.mark.slow)
            for phase in ("collect", "learn")
            for error in ENDS
        ),
    ],
)
def test_every_end_of_a_run_leaves_a_checkpoint_of_the_last_good_step(
    error: Exception, phase: str, tmp_path: Path, topology: Topology
) -> None:
    """A run that resumes from it ends with the result of an uninterrupted run."""
    options = ("train.num_rollout=4", "train.max_nonfinite_steps=1", *STALE[:2])
    whole = small_config(tmp_path, *options, f"run.dir={tmp_path}/whole")
    assert Trainer(whole, topology).run(Interrupt())
    config = small_config(tmp_path, *options, f"run.dir={tmp_path}/ended")
    trainer = Trainer(config, topology)
    owner, name = {
        "collect": (trainer.collector, "collect"),
        "learn": (trainer.learner, "step"),
    }[phase]
    work = getattr(owner, name)

    def failing(*arguments: Any) -> Any:
        result = work(*arguments) if phase == "collect" else None
        if trainer.step == 2:
            raise error
        return result if phase == "collect" else work(*arguments)

    setattr(owner, name, failing)
    with pytest.raises(type(error)):
        trainer.run(Interrupt())
    assert (tmp_path / "ended/checkpoints/latest").read_text().strip() == "step_00000002"
    assert Trainer(config, topology).run(Interrupt())
    assert rows_of(config) == rows_of(whole)
