"""Weights for another rollout policy:
each method against a naive loop, metrics, the alarm, none counted twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch

from megatron_stare.config import (
    Config,
    LossConfig,
    MismatchAlarm,
    MismatchConfig,
    UserError,
    override,
)
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.metrics import batch_metrics
from megatron_stare.loop.trainer import Trainer
from megatron_stare.losses import find_objective
from megatron_stare.losses.rollout_correction import BOUNDS, corrected, k3, log_ratio
from megatron_stare.numerics.selection import Across
from megatron_stare.policy.topology import Topology
from megatron_stare.records import LossTokens, TokenBatch
from tests.small_run import rows_of, small_config

LENGTHS = (3, 1, 6, 2)


def batch_of(difference: torch.Tensor, fresh: bool = True) -> TokenBatch:
    """Four sequences whose trainer log-probs exceed the engine's by `difference`."""
    count, generator = sum(LENGTHS), torch.Generator().manual_seed(1)
    surprisal = torch.rand(count, generator=generator) + 0.2
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.cat([torch.arange(length) for length in LENGTHS])
    return TokenBatch(
        microbatches=(),
        advantage_T=torch.randn(count, generator=generator),
        rollout_logprob_T=-surprisal - difference,
        sequence_T=number,
        sequence_tokens_T=torch.tensor(LENGTHS)[number],
        token_index_T=(number << 32) + place,
        microbatch_T=torch.zeros(count, dtype=torch.long),
        fresh_T=torch.full((count,), fresh),
        num_sequences=len(LENGTHS),
        surprisal_T=surprisal,
        entropy_T=surprisal + 0.1,
    )


def differences(scale: float) -> torch.Tensor:
    return scale * torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(2))


def naive(method: str, difference: list[float], low: float, high: float) -> list[float]:
    """The table of rollout_correction's docstring, one token after another."""
    found, start = [], 0
    for length in LENGTHS:
        own = difference[start : start + length]
        start += length
        for value in own:
            ratio = math.exp(value if method.startswith(("token", "icepop")) else math.fsum(own))
            if method == "geo_rs":
                ratio = math.exp(math.fsum(own) / length)
            inside = low <= ratio <= high
            if method.endswith("tis"):
                found.append(min(ratio, high))
            else:
                found.append((1.0 if method == "geo_rs" else ratio) if inside else 0.0)
    return found


def weights_of(batch: TokenBatch, **settings: object) -> tuple[list[float], dict[str, float]]:
    signals = find_objective("dapo").plan(batch, LossConfig(), Across(), {})
    result = corrected(batch, signals, MismatchConfig(**settings), Across())
    assert result.correction_T is not None
    return result.correction_T.tolist(), result.metrics


@pytest.mark.parametrize("scale", [0.001, 0.3, 1.5])
@pytest.mark.parametrize("method", BOUNDS)
def test_every_method_is_its_formula(method: str, scale: float):
    difference = differences(scale)
    found, metrics = weights_of(batch_of(difference), correction=method)
    expected = naive(method, difference.tolist(), *BOUNDS[method])
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert metrics["correction_weight_mean"] == pytest.approx(
        sum(expected) / len(expected), rel=1e-5
    )
    assert metrics["correction_masked_fraction"] == expected.count(0.0) / len(expected)
    squares = sum(value**2 for value in expected)
    effective = sum(expected) ** 2 / (len(expected) * squares) if squares else 0.0
    assert metrics["correction_effective_fraction"] == pytest.approx(effective, rel=1e-5)
    own, _ = weights_of(batch_of(difference), correction=method, lower=0.9, upper=1.3)
    assert own == pytest.approx(naive(method, difference.tolist(), 0.9, 1.3), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("method", BOUNDS)
def test_equal_policies_get_weight_one(method: str):
    assert weights_of(batch_of(torch.zeros(sum(LENGTHS))), correction=method)[0] == pytest.approx(
        [1.0] * sum(LENGTHS)
    )


def test_normalised_weights_have_mean_one():
    found, metrics = weights_of(batch_of(differences(0.5)), correction="token_tis", normalize=True)
    assert sum(found) / len(found) == pytest.approx(1.0) == metrics["correction_weight_mean"]


@pytest.mark.parametrize("method", ["sequence_tis", "sequence_mis", "geo_rs"])
def test_weights_of_sequences_are_normalised_over_sequences(method: str):
    batch = batch_of(differences(0.4))
    found, _ = weights_of(batch, correction=method, upper=1.5, normalize=True)
    plain, _ = weights_of(batch, correction=method, upper=1.5)
    first = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    mean = sum(plain[place] for place in first) / len(LENGTHS)
    assert mean > 0 and found == pytest.approx([weight / mean for weight in plain])


@pytest.mark.parametrize("method", BOUNDS)
def test_an_upper_bound_alone_sets_the_lower_bound_of_rejection(method: str):
    """verl: 1 / upper where no lower bound is given. IcePop's two bounds are published."""
    difference = differences(0.6)
    found, _ = weights_of(batch_of(difference), correction=method, upper=1.25)
    low = 0.8 if method in ("token_mis", "sequence_mis", "geo_rs") else BOUNDS[method][0]
    assert found == pytest.approx(naive(method, difference.tolist(), low, 1.25), rel=1e-5, abs=1e-7)
    both, _ = weights_of(batch_of(difference), correction=method, upper=1.25, lower=0.1)
    assert both == pytest.approx(naive(method, difference.tolist(), 0.1, 1.25), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["stare", "dapo", "grpo"])
def test_the_weight_multiplies_every_loss_once(name: str):
    """The correction multiplies STARE's own weight, and not the KL term."""
    count = sum(LENGTHS)
    surprisal = torch.rand(count, dtype=torch.float64)
    tokens = LossTokens(
        surprisal,
        surprisal,
        surprisal + differences(0.3),
        torch.randn(count),
        torch.full((count,), 1.5),
    )
    tokens = dataclasses.replace(tokens, reference_surprisal=surprisal + 0.2)
    weight = torch.rand(count)
    for config in (LossConfig(name=name), LossConfig(name=name, kl_loss_coef=0.3)):
        plain, with_weight = (
            find_objective(name)
            .bind(config)
            .function(dataclasses.replace(tokens, correction=correction))
            for correction in (None, weight)
        )
        penalty = (
            find_objective(name)
            .bind(config)
            .function(dataclasses.replace(tokens, advantage=torch.zeros(count)))
        )
        torch.testing.assert_close(with_weight - penalty, weight * (plain - penalty))


def test_the_correction_is_for_the_old_policy():
    batch = batch_of(differences(0.3))
    moved = dataclasses.replace(
        batch, old_surprisal_T=batch.surprisal_T, surprisal_T=batch.surprisal_T + 0.5
    )
    assert (
        weights_of(moved, correction="token_tis")[0] == weights_of(batch, correction="token_tis")[0]
    )


@pytest.mark.parametrize(
    ("old_policy", "correction", "of_fresh", "of_stale"),
    [
        ("auto", "none", "old", "current"),
        ("auto", "token_tis", "old", "old"),
        ("trainer", "none", "old", "old"),
        ("rollout", "none", "current", "current"),
    ],
)
def test_the_difference_is_of_the_policy_that_the_ratio_starts_at(
    old_policy: str, correction: str, of_fresh: str, of_stale: str
):
    """The old policy is the engine's; the current log-probs are 0.5 nats lower on every token."""
    batch = batch_of(torch.zeros(sum(LENGTHS)))
    moved = dataclasses.replace(
        batch,
        old_surprisal_T=batch.surprisal_T,
        surprisal_T=batch.surprisal_T + 0.5,
        fresh_T=batch.sequence_T < 2,
    )
    config = MismatchConfig(old_policy=old_policy, correction=correction)
    size = {"old": 0.0, "current": -0.5}
    expected = torch.where(moved.fresh_T, size[of_fresh], size[of_stale])
    torch.testing.assert_close(log_ratio(moved, config), expected)


@pytest.mark.parametrize("method", BOUNDS)
def test_another_temperature_is_not_corrected_for(method: str):
    """The third sequence was sampled at one: its weights are 1, the others' what they were."""
    batch = batch_of(differences(1.5))
    off_temperature_T = batch.sequence_T == 2
    plain, _ = weights_of(batch, correction=method)
    found, _ = weights_of(
        dataclasses.replace(batch, off_temperature_T=off_temperature_T), correction=method
    )
    expected = torch.where(off_temperature_T, 1.0, torch.tensor(plain))
    assert found == expected.tolist() != plain


def test_another_temperature_is_in_no_measure_of_the_engine():
    difference = differences(0.3)
    off_temperature_T = batch_of(difference).sequence_T == 2
    batch = dataclasses.replace(batch_of(difference), off_temperature_T=off_temperature_T)
    own = difference[~off_temperature_T].abs()
    signals = find_objective("dapo").plan(batch, LossConfig(), Across(), {})
    metrics = batch_metrics(batch, signals, Across())
    for name in ("rollout_diff", "logprob_diff"):
        assert metrics[f"{name}_mean"] == pytest.approx(float(own.mean()), rel=1e-5)
        assert metrics[f"{name}_max"] == pytest.approx(float(own.max()), rel=1e-5)
    ratio = torch.exp(difference[~off_temperature_T].double())
    effective = float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum()))
    assert metrics["rollout_effective_fraction"] == pytest.approx(effective, rel=1e-5)
    assert metrics["loss_tokens"] == sum(LENGTHS)
    with pytest.raises(MismatchAlarm, match=rf"differ by {float(own.mean()):.4g} nats"):
        weights_of(batch, alarm=float(own.mean()) * 0.99)
    quiet, _ = weights_of(batch, alarm=float(own.mean()) * 1.01, on_alarm="mask")
    assert quiet == [1.0] * sum(LENGTHS)
    alone = dataclasses.replace(batch, off_temperature_T=torch.ones_like(off_temperature_T))
    metrics = batch_metrics(alone, signals, Across())
    assert not [key for key in metrics if "diff" in key or "effective" in key]
    assert weights_of(alone, alarm=1e-9, correction="token_tis")[0] == [1.0] * sum(LENGTHS)


def test_metrics_of_the_difference():
    difference = differences(0.3)
    batch = batch_of(difference)
    batch = dataclasses.replace(batch, fresh_T=torch.arange(sum(LENGTHS)) % 2 == 0)
    long = dataclasses.replace(
        batch, token_index_T=batch.token_index_T + torch.where(batch.sequence_T == 2, 300, 0)
    )
    signals = find_objective("dapo").plan(long, LossConfig(), Across(), {})
    metrics = batch_metrics(long, signals, Across())
    fresh = difference[::2]
    assert metrics["rollout_diff_mean"] == pytest.approx(float(difference.abs().mean()), rel=1e-5)
    assert metrics["logprob_diff_mean"] == pytest.approx(float(fresh.abs().mean()), rel=1e-5)
    assert metrics["logprob_diff_max"] == pytest.approx(float(fresh.abs().max()), rel=1e-5)
    expected = sum(math.exp(d) - d - 1 for d in fresh.tolist()) / len(fresh)
    assert metrics["logprob_diff_k3"] == pytest.approx(expected, rel=1e-4)
    late = (batch.sequence_T == 2)[::2]
    assert metrics["logprob_diff_from_256"] == pytest.approx(
        float(fresh.abs()[late].mean()), rel=1e-5
    )
    assert metrics["logprob_diff_from_0"] == pytest.approx(
        float(fresh.abs()[~late].mean()), rel=1e-5
    )
    assert "logprob_diff_from_1024" not in metrics
    assert float(k3(torch.tensor(20.0))) == 10.0, "one token cannot own the mean"


def test_entropy_is_of_all_tokens_under_every_loss():
    batch = batch_of(differences(0.3))
    entropy_T = torch.arange(sum(LENGTHS)) / 8
    batch = dataclasses.replace(batch, entropy_T=entropy_T, surprisal_T=entropy_T + 1)
    for name in ("dapo", "gspo", "entropy_20"):
        signals = find_objective(name).plan(batch, LossConfig(name=name), Across(), {})
        metrics = batch_metrics(batch, signals, Across())
        assert metrics["entropy"] == pytest.approx(float(entropy_T.mean()), rel=1e-6)
        assert metrics["surprisal"] == pytest.approx(float(entropy_T.mean()) + 1, rel=1e-6)
        own = float((entropy_T.double() * signals.coefficient_T).sum())
        assert metrics["entropy_of_loss"] == pytest.approx(own, rel=1e-6)
        assert (metrics["entropy_of_loss"] == pytest.approx(metrics["entropy"])) is (name == "dapo")


def test_the_alarm_stops_the_run_or_masks_the_rollouts():
    difference = torch.zeros(sum(LENGTHS))
    difference[4] = 3.0
    batch = batch_of(difference)
    with pytest.raises(
        MismatchAlarm, match=r"differ by 0\.25 nats on average, 3 at most \(mismatch.alarm=0\.2\)"
    ):
        weights_of(batch, alarm=0.2)
    masked, metrics = weights_of(batch, alarm=0.2, on_alarm="mask")
    assert (
        masked == [1.0] * 4 + [0.0] + [1.0] * (sum(LENGTHS) - 5)
        and metrics["mismatch_alarm_masked"] == 1
    )
    quiet, metrics = weights_of(batch, alarm=0.3, on_alarm="mask")
    assert quiet == [1.0] * sum(LENGTHS) and metrics["mismatch_alarm_masked"] == 0
    both, _ = weights_of(batch, alarm=0.2, on_alarm="mask", correction="token_tis")
    assert both == pytest.approx(masked, rel=1e-6)


def test_correcting_twice_is_refused():
    with pytest.raises(UserError, match="would correct for the same difference twice"):
        override(Config(), ["mismatch.correction=icepop", "mismatch.old_policy=rollout"])


def test_a_run_corrects_for_staleness_and_an_alarm_ends_it(tmp_path: Path, topology: Topology):
    stale = ("rollout.asynchrony=one_step_off", "train.num_rollout=3")
    config = small_config(tmp_path, *stale, "mismatch.correction=token_mis")
    assert Trainer(config, topology).run(Interrupt())
    rows = rows_of(config)
    assert rows[0]["rollout_diff_max"] < 1e-4 < rows[2]["rollout_diff_mean"]
    assert (
        rows[0]["correction_weight_mean"]
        == pytest.approx(1.0, abs=1e-4)
        != rows[2]["correction_weight_mean"]
    )
    bypass = small_config(
        tmp_path, *stale, "mismatch.old_policy=rollout", f"run.dir={tmp_path}/bypass"
    )
    assert Trainer(bypass, topology).run(Interrupt())
    assert rows_of(bypass)[0]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-3)
    assert rows_of(bypass)[2]["loss"] != rows[2]["loss"]
    unset = small_config(tmp_path, *stale, f"run.dir={tmp_path}/unset")
    assert Trainer(unset, topology).run(Interrupt())
    explicit = small_config(
        tmp_path, *stale, "mismatch.old_policy=trainer", f"run.dir={tmp_path}/trainer"
    )
    assert Trainer(explicit, topology).run(Interrupt())
    last = [rows_of(one)[2]["loss"] for one in (unset, bypass, explicit)]
    assert last[0] == pytest.approx(last[1], rel=1e-2), "stale tokens start at the engine's"
    assert last[0] != pytest.approx(last[2], rel=1e-2), "fresh only if the run says so"
    alarmed = small_config(tmp_path, *stale, "mismatch.alarm=1e-4", f"run.dir={tmp_path}/alarmed")
    with pytest.raises(MismatchAlarm, match=r"mismatch\.alarm=0\.0001"):
        Trainer(alarmed, topology).run(Interrupt())
    assert len(rows_of(alarmed)) >= 1


def test_rejected_tokens_leave_the_denominator_on_request() -> None:
    """Ratios 1, 3, 1 of the first sequence: the mask 0.5 .. 2 rejects the second token. Of 12
    tokens 11 are left, and with accepted=one each of them weighs 1.
    """
    difference = torch.zeros(sum(LENGTHS))
    difference[1], difference[5] = math.log(3.0), math.log(1.5)
    batch, objective, loss = batch_of(difference), find_objective("dapo"), LossConfig()
    plain = objective.plan(batch, loss, Across(), {})
    reduce = functools.partial(objective.coefficients, batch, loss, Across())
    mask = MismatchConfig(correction="token_mis")
    stays = corrected(batch, plain, mask, Across(), reduce)
    assert torch.equal(stays.coefficient_T, plain.coefficient_T)
    drop = dataclasses.replace(mask, rejected="drop", accepted="one")
    leaves = corrected(batch, plain, drop, Across(), reduce)
    expected = torch.full((12,), 1 / 11)
    expected[1] = 0.0
    torch.testing.assert_close(leaves.coefficient_T, expected)
    assert leaves.correction_T is not None and stays.correction_T is not None
    assert leaves.correction_T.tolist() == [1.0, 0.0, *[1.0] * 10]
    assert float(stays.correction_T[5]) == pytest.approx(1.5)
    kept_T = torch.ones(12, dtype=torch.bool)
    kept_T[[0, 1, 2]] = False  # tokens that the objective itself leaves out
    fewer = corrected(batch, dataclasses.replace(plain, kept_T=kept_T), drop, Across(), reduce)
    assert fewer.kept_T is not None and fewer.kept_T.tolist() == kept_T.tolist()
    expected = torch.full((12,), 1 / 9)
    expected[:3] = 0.0
    torch.testing.assert_close(fewer.coefficient_T, expected)
