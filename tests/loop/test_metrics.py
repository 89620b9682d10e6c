"""Metrics of a step on GPUs."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.loop.metrics import gpu_metrics
from megatron_stare.policy.huggingface.shape import forward_operations, shape_of
from megatron_stare.policy.topology import Topology
from tests.nullcuda.runs import groups
from tests.tiny_models import tiny_config

SECONDS = {"seconds_score": 1.0, "seconds_update": 3.0, "seconds_total": 8.0}


def test_a_cpu_has_no_metrics_of_gpus(topology: Topology) -> None:
    assert gpu_metrics(topology, shape_of(tiny_config("qwen3")), groups(2), SECONDS, 1) == {}


def test_mfu_and_tokens_follow_their_formulas(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    shape = shape_of(tiny_config("qwen3"))
    found = gpu_metrics(topology, shape, groups(2), SECONDS, 2)
    tokens = 4 * (16 + 49)
    assert found["gpu_memory_peak"] == 3.0
    assert found["tokens_per_second"] == pytest.approx(tokens / 8.0)
    forward = forward_operations(shape, [(16, 49)] * 4)
    assert found["mfu"] == pytest.approx(forward * 7 / (4.0 * 989e12))
    assert gpu_metrics(topology, shape, groups(2), SECONDS, 0) == {"gpu_memory_peak": 3.0}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert "mfu" not in gpu_metrics(topology, shape, groups(2), SECONDS, 1)
