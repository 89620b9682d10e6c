"""Student's t against its density, and intervals over seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_stare.reporting import summary


def t_density_mass(quantile: float, freedom: int) -> float:
    """P(|T| <= quantile) by Simpson's rule on Student's density."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    x = np.linspace(0, quantile, 20001)
    y = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    return 2 * (x[1] / 3) * (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum())


def test_the_t_table_holds_95_percent():
    assert len(summary.T_975) == 30
    for freedom, quantile in enumerate(summary.T_975, start=1):
        assert t_density_mass(quantile, freedom) == pytest.approx(0.95, abs=1e-4)


def test_intervals():
    assert summary.mean_and_interval([0.5]) == (0.5, None)
    values = [0.661, 0.609, 0.588]
    mean, half = summary.mean_and_interval(values)
    assert mean == pytest.approx(np.mean(values))
    assert half == pytest.approx(4.303 * np.std(values, ddof=1) / math.sqrt(3))
    draws = np.random.default_rng(0).normal(2.0, 3.0, size=(4000, 3)).tolist()
    covered = [
        abs(interval[0] - 2.0) <= interval[1] for interval in map(summary.mean_and_interval, draws)
    ]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)
    with pytest.raises(ValueError, match="at least one"):
        summary.mean_and_interval([])


def test_seeds_are_combined_by_arm_and_key():
    seeds = {
        "0": {"stare": {"k": 8, "x": 1.0}},
        "1": {"stare": {"k": 8, "x": 3.0}, "dapo": {"x": None}},
    }
    assert summary.mean_runs(seeds) == {"stare": {"k": 8, "x": 2.0}, "dapo": {"x": None}}
