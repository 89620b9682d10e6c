"""Helpers of the plots."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.reporting.plots import Run, arm_colours, mean_series, moving_mean, spread


def test_series_helpers_agree_with_numpy():
    rng = np.random.default_rng(0)
    values = rng.normal(size=50).tolist()
    series = list(enumerate(values))
    expected = [np.mean(values[max(0, at - 6) : at + 1]) for at in range(50)]
    assert [value for _, value in moving_mean(series, 7)] == pytest.approx(expected)
    assert mean_series([[(1, 0.0), (2, 2.0)], [(2, 4.0), (3, 9.0)]]) == [(2, 3.0)]
    assert mean_series([]) == []
    assert Run("stare", "0", [{"step": 1, "a": 2}, {"step": 2, "b": 1}]).series("a") == [(1, 2)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_labels_are_spread_as_little_as_needed(heights):
    apart = spread(heights, 12.0)
    ordered = sorted(apart)
    assert all(above - below >= 12.0 - 1e-9 for below, above in itertools.pairwise(ordered))
    assert sum(apart) == pytest.approx(sum(heights), abs=1e-6), "moved evenly up and down"
    if all(above - below >= 12.0 for below, above in itertools.pairwise(sorted(heights))):
        assert apart == pytest.approx(heights)


def test_colours_are_fixed_for_the_two_arms_and_distinct():
    colours = arm_colours(["x", "stare", "grpo_ds", "y"])
    assert (
        colours["stare"] == "#0072B2"
        and colours["grpo_ds"] == "#D55E00"
        and len(set(colours.values())) == 4
    )
