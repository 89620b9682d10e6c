"""A mean over seeds and how far it can be trusted: Student's t intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook,
# 1.3.6.7.2).
# fmt: off
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on


class Interval(NamedTuple):
    """A mean over seeds and the half width of its 95% interval (None for one seed)."""

    mean: float
    half_width: float | None


def mean_and_interval(values: Sequence[float]) -> Interval:
    """The mean over seeds and t(n-1, 0.975) * s / sqrt(n), s the sample standard deviation.

    Above n = 31 the quantile is the normal limit 1.960. Seeds are treated as normal draws, so with
    three of them the interval is wide and only approximate.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    count = len(values)
    if count == 1:
        return Interval(float(values[0]), None)
    quantile = T_975[count - 2] if count - 2 < len(T_975) else 1.960
    return Interval(fmean(values), quantile * stdev(values) / math.sqrt(count))


def combine_seeds(
    seeds: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Interval | None]]:
    """{seed: {arm: {key: number}}} -> {arm: {key: Interval}}; None if a seed lacks the key."""
    arms = {arm: None for runs in seeds.values() for arm in runs}
    combined: dict[str, dict[str, Interval | None]] = {}
    for arm in arms:
        runs = [runs[arm] for runs in seeds.values() if arm in runs]
        keys = {key: None for run in runs for key in run}
        combined[arm] = {}
        for key in keys:
            numbers = [float(run[key]) for run in runs if run.get(key) is not None]
            combined[arm][key] = mean_and_interval(numbers) if len(numbers) == len(runs) else None
    return combined


def mean_runs(
    seeds: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, float | None]]:
    """`combine_seeds` without half widths: `runs` of summary.json for several seeds."""
    return {
        arm: {key: None if interval is None else interval.mean for key, interval in values.items()}
        for arm, values in combine_seeds(seeds).items()
    }
