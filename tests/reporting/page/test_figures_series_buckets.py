"""Fewer points, and no peak lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.reporting.page.figures import bucketed, moving_mean


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    st.integers(1, 40),
    st.integers(1, 50),
)
def test_buckets_keep_extremes_sum_and_order(values, most, stride):
    points = [(1 + stride * at, value) for at, value in enumerate(values)]
    line = bucketed(points, most)
    assert 1 <= len(line.x) <= max(most, 1) and line.x == sorted(set(line.x))
    if len(values) <= most:
        assert (line.x, line.y, line.low) == ([x for x, _ in points], values, None)
        return
    assert min(line.low) == min(values) and max(line.high) == max(values)
    edges = np.linspace(points[0][0], points[-1][0], most + 1)
    places = np.clip(np.searchsorted(edges, [x for x, _ in points], side="right") - 1, 0, most - 1)
    counts = np.bincount(places)[np.bincount(places) > 0]
    assert len(counts) == len(line.y)
    assert np.dot(counts, line.y) == pytest.approx(sum(values), rel=1e-9, abs=1e-3)


def test_gaps_are_left_empty_and_one_place_takes_all():
    line = bucketed([(1, 0.0), (2, 2.0), (1000, 5.0)], 2)
    assert line == ([1.5, 1000.0], [1.0, 5.0], [0.0, 5.0], [2.0, 5.0])
    assert bucketed([(3, 1.0), (3, 3.0)], 1) == ([3.0], [2.0], [1.0], [3.0])
    with pytest.raises(ValueError, match="room"):
        bucketed([(1, 1.0)], 0)


def test_moving_mean_agrees_with_numpy():
    values = np.random.default_rng(0).normal(size=50).tolist()
    expected = [np.mean(values[max(0, at - 6) : at + 1]) for at in range(50)]
    assert [value for _, value in moving_mean([*enumerate(values)], 7)] == pytest.approx(expected)
