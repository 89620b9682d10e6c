"""Planned activations and optimizer state against the real model's, layout by layout."""

from __future__ import annotations

from pathlib import Path

from benchmarks.planner import LAYOUTS, measure


def test_plans_are_within_a_tenth_of_what_the_real_model_keeps(tmp_path: Path) -> None:
    found = measure(tmp_path)
    assert {row.measured.layout for row in found} == set(LAYOUTS) and len(LAYOUTS) >= 6
    wrong = {
        (row.measured.layout, row.measured.rank): row.ratios
        for row in found
        if not all(0.9 < ratio < 1.1 for ratio in row.ratios)
    }
    assert not wrong
