"""Planned activations and optimizer state against the real model's, layout by layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner import LAYOUTS, measure

QUICK = [
    *("one rank", "one rank, full recompute", "TP2 SP", "PP2", "CP2, distributed optimizer"),
    "TP2 SP EP2, whole experts",
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
