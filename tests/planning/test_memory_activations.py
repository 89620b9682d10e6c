"""Planned activations and optimizer state against the real model's, layout by layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner import LAYOUTS, measure
from megatron_stare.config import PolicyConfig
from megatron_stare.planning.memory import layer_bytes
from megatron_stare.planning.shapes import sizes
from megatron_stare.policy.huggingface.shape import shape_of
from tests.policy.huggingface.test_families import published

QUICK = [
    *("one rank", "one rank, full recompute", "TP2 SP", "PP2", "CP2, distributed optimizer"),
    *("TP2 SP EP2, whole experts", "TP2 SP, delta nets and experts"),
]


@pytest.mark.parametrize("layouts", [QUICK, pytest.param([*LAYOUTS], marks=pytest.mark.slow)])
def test_plans_are_within_a_tenth_of_the_real_models_memory(
    layouts: list[str], tmp_path: Path
) -> None:
    found = measure(tmp_path, layouts)
    assert {row.measured.layout for row in found} == set(layouts) and len(layouts) >= 6
    wrong = {
        (row.measured.layout, row.measured.rank): row.ratios
        for row in found
        if not all(0.9 < ratio < 1.1 for ratio in row.ratios)
    }
    assert not wrong


@pytest.mark.parametrize("name", ["Qwen3.5-0.8B", "Qwen3.5-27B", "Qwen3.5-35B-A3B"])
def test_operations_of_our_own_keep_three_times_the_bytes_of_kernels(name: str) -> None:
    """Of a gated delta net, with the same layers of TransformerEngine around it."""
    shape = shape_of(published(name))
    kernels, ours = (
        layer_bytes(shape, policy, sizes(policy, 1), transformer_engine=True)
        for policy in (PolicyConfig(dtype="bf16"), PolicyConfig(dtype="bf16", deterministic=True))
    )
    attention = 2 * (2 * shape.query + 2 * shape.key)  # at the least
    assert 2.5 < (ours.delta + attention) / (kernels.delta + attention) < 4
