"""The z statistic: N(0, 1) on exact samples, far from 0 on inexact ones, for each server."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch
from torch import Tensor

from megatron_stare.loop.metrics import exactness_metrics, mean_metrics
from megatron_stare.numerics.selection import Across
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from megatron_stare.records import Rollout, TokenBatch

TOKENS, VOCABULARY = 2_000, 40


def logits_of(seed: int) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(TOKENS, VOCABULARY, generator=dice)


def batch_of(logits_NV: Tensor, id_N: Tensor) -> TokenBatch:
    """Ten sequences, of which the last has an unknown server."""
    shard = VocabShard(torch.eye(VOCABULARY), None, VOCABULARY)
    stats = token_stats(logits_NV, shard, id_N)
    sequence_T = torch.arange(TOKENS) * 10 // TOKENS
    return TokenBatch(
        microbatches=(),
        advantage_T=torch.ones(TOKENS),
        rollout_logprob_T=-stats.surprisal_N,
        sequence_T=sequence_T,
        sequence_tokens_T=torch.full_like(sequence_T, TOKENS // 10),
        token_index_T=torch.arange(TOKENS),
        microbatch_T=torch.zeros_like(sequence_T),
        fresh_T=torch.ones(TOKENS, dtype=torch.bool),
        num_sequences=10,
        server_Q=torch.tensor([0, 2, 0, 2, 0, 2, 0, 2, 0, -1]),
        surprisal_T=stats.surprisal_N,
        entropy_T=stats.entropy_N,
        variance_T=stats.variance_N,
    )


def sampled(logits_NV: Tensor, seed: int) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.multinomial(torch.softmax(logits_NV, 1), 1, generator=dice).squeeze(1)


def z_of(logits_NV: Tensor, id_N: Tensor) -> float:
    return exactness_metrics(batch_of(logits_NV, id_N), Across())["exactness_z"]


def test_exact_samples_are_standard_normal() -> None:
    """Over 300 batches the mean is within 4 and the deviation within 4 of their own deviations."""
    found = [z_of(logits_of(seed), sampled(logits_of(seed), 1000 + seed)) for seed in range(300)]
    assert abs(statistics.fmean(found)) < 4 / 300**0.5
    assert statistics.stdev(found) == pytest.approx(1.0, abs=4 / 600**0.5)


def nucleus(logits_NV: Tensor, mass: float) -> Tensor:
    probability_NV, order_NV = torch.softmax(logits_NV, 1).sort(1, descending=True)
    outside_NV = probability_NV.cumsum(1) - probability_NV >= mass
    return logits_NV.masked_fill(outside_NV.gather(1, order_NV.argsort(1)), -torch.inf)


@pytest.mark.parametrize(
    ("engine", "low", "high"),
    [
        (lambda logits_NV: 1e4 * logits_NV, -1e9, -20),
        (lambda logits_NV: logits_NV / 0.8, -1e9, -6),
        (lambda logits_NV: logits_NV / 1.25, 6, 1e9),
        (lambda logits_NV: nucleus(logits_NV, 0.8), -1e9, -6),
        (lambda logits_NV: logits_NV + 0.7 * logits_of(99), 6, 1e9),
    ],
    ids=["greedy", "cold", "hot", "top_p", "other weights"],
)
def test_one_step_finds_another_distribution(engine, low, high) -> None:
    logits_NV = logits_of(1)
    assert low < z_of(logits_NV, sampled(engine(logits_NV), 2)) < high


def test_a_single_wrong_server_is_named() -> None:
    logits_NV = logits_of(1)
    exact_N, greedy_N = sampled(logits_NV, 2), logits_NV.argmax(1)
    batch = batch_of(logits_NV, exact_N)
    assert batch.server_Q is not None
    wrong_T = batch.server_Q[batch.sequence_T] == 2
    found = exactness_metrics(
        batch_of(logits_NV, torch.where(wrong_T, greedy_N, exact_N)), Across()
    )
    servers = {key for key in found if "server" in key}
    assert servers == {f"exactness_{what}_server_{n}" for what in ("z", "gap") for n in (0, 2)}
    assert found["exactness_z_server_2"] < -20 and abs(found["exactness_z_server_0"]) < 4


def test_stale_and_off_temperature_tokens_do_not_count() -> None:
    logits_NV = logits_of(1)
    exact_N, greedy_N = sampled(logits_NV, 2), logits_NV.argmax(1)
    wrong_T = torch.arange(TOKENS) % 3 == 0
    batch = batch_of(logits_NV, torch.where(wrong_T, greedy_N, exact_N))
    assert exactness_metrics(batch, Across())["exactness_z"] < -10
    for left_out in (
        dataclasses.replace(batch, fresh_T=~wrong_T),
        dataclasses.replace(batch, off_temperature_T=wrong_T),
    ):
        assert abs(exactness_metrics(left_out, Across())["exactness_z"]) < 4
    none = dataclasses.replace(batch, fresh_T=torch.zeros_like(wrong_T))
    assert exactness_metrics(none, Across()) == {}


def test_mini_batches_are_joined_to_a_standard_normal() -> None:
    rows = [{"exactness_z": 3.0, "exactness_gap": 0.3}, {"exactness_z": 1.0, "exactness_gap": 0.1}]
    joined = mean_metrics(rows)
    assert joined["exactness_z"] == pytest.approx(4.0 / 2**0.5)
    assert joined["exactness_gap"] == pytest.approx(0.2)


def test_parts_of_two_servers_have_no_server() -> None:
    one, two = (
        Rollout([5], [-1.0], [1], status="aborted", weight_version=0, server=n) for n in (1, 2)
    )
    assert one.continued(one).server == 1 and one.continued(two).server == -1
