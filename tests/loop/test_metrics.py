"""Metrics of a step: of several mini-batches, and on GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from megatron_stare.config import LossConfig
from megatron_stare.loop.metrics import (
    PEAK_OPERATIONS,
    Passes,
    batch_metrics,
    gpu_metrics,
    mean_metrics,
)
from megatron_stare.losses import find_objective
from megatron_stare.policy.huggingface.shape import forward_operations, shape_of
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group
from tests.losses.batches import ALONE, batch_of
from tests.nullcuda.runs import groups
from tests.tiny_models import tiny_config

SECONDS = {"seconds_score": 1.0, "seconds_update": 3.0, "seconds_total": 8.0}


def test_a_cpu_has_no_metrics_of_gpus(topology: Topology) -> None:
    shape = shape_of(tiny_config("qwen3"))
    assert gpu_metrics(topology, shape, groups(2), SECONDS, Passes(1, 1)) == {}


def test_mfu_and_tokens_follow_their_formulas(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    shape = shape_of(tiny_config("qwen3"))
    found = gpu_metrics(topology, shape, groups(2), SECONDS, Passes(1, 2))
    tokens = 4 * (16 + 49)
    assert found["gpu_memory_peak"] == 3.0
    assert found["tokens_per_second"] == pytest.approx(tokens / 8.0)
    products, others = forward_operations(shape, [(16, 49)] * 4)
    able, none = 4.0 * 989e12, Passes()
    assert found["mfu"] == pytest.approx((products + others) * 7 / able)
    assert gpu_metrics(topology, shape, groups(2), SECONDS, none) == {"gpu_memory_peak": 3.0}

    def mfu(passes: Passes, trained: Sequence[Group]) -> float:
        return gpu_metrics(topology, shape, trained, SECONDS, passes)["mfu"]

    assert mfu(Passes(0, 1), groups(2)) == pytest.approx((products + others) * 3 / able)
    frozen = mfu(Passes(1, 1, frozen=True), groups(2))
    assert frozen == pytest.approx((3 * products + 4 * others) / able)
    masked = [
        dataclasses.replace(group, rollouts=tuple(each.without_loss() for each in group.rollouts))
        for group in groups(2)
    ]
    less = 4 * 49 * 2 * shape.head * 4 / able  # the head sees loss tokens alone
    assert mfu(Passes(1, 1), groups(2)) - mfu(Passes(1, 1), masked) == pytest.approx(less)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert "mfu" not in gpu_metrics(topology, shape, groups(2), SECONDS, Passes(1, 1))


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
    ],
)
def test_the_peak_is_that_of_the_very_gpu(name: str, rate: float) -> None:
    assert next(peak for part, peak in PEAK_OPERATIONS.items() if part in name) == rate


def test_mini_batches_are_joined_over_their_tokens() -> None:
    """As a naive mean over all tokens; an empty one counts for nothing."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.rand(count, generator=generator, dtype=torch.float64) for count in (3, 0, 50)]
    rows = [
        {"loss_tokens": float(len(part))} | ({"entropy": float(part.mean())} if len(part) else {})
        for part in parts
    ]
    joined = mean_metrics(rows)
    assert joined["loss_tokens"] == 53
    assert joined["entropy"] == pytest.approx(float(torch.cat(parts).mean()), rel=1e-12)


def test_updates_are_joined_as_the_page_says() -> None:
    """A learning rate is the last update's, masked tokens add up, a norm is averaged."""
    rows = [
        {"lr": 1e-6, "mismatch_alarm_masked": 3.0, "grad_norm": 1.0, "omega_max": 2.0},
        {"lr": 2e-6, "mismatch_alarm_masked": 4.0, "grad_norm": 2.0, "omega_max": 1.0},
    ]
    expected = {"lr": 2e-6, "mismatch_alarm_masked": 7.0, "grad_norm": 1.5, "omega_max": 2.0}
    assert mean_metrics(rows) == expected


def test_a_batch_without_a_loss_token_has_no_means() -> None:
    """Above all no entropy of 0, which would be a collapse."""
    empty = batch_of(torch.empty(0), torch.empty(0), sequences=2)
    config = LossConfig(name="stare", adaptive=True, target_entropy=0.3)
    signals = find_objective("stare").plan(empty, config, ALONE, {"reweight_w": 1.2})
    found = batch_metrics(empty, signals, ALONE)
    assert found["loss_tokens"] == 0 and found["sequences"] == 2
    assert not {"entropy", "entropy_of_loss", "surprisal", "stale_token_fraction"} & found.keys()
    assert found["gate"] == 0.0
