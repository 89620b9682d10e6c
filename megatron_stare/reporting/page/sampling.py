"""Fewer points where a screen has no room for more, and never a peak lost: mean, lowest, highest.

A run of 10,000 steps is drawn in a few hundred buckets of equal length in steps. A bucket holds the
mean of its points, and the lowest and the highest of them, so that a single outlier stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Point = tuple[float, float]


class Line(NamedTuple):
    """y over x; `low` and `high` are the extremes of a bucket or the ends of an interval, or None
    where every point is drawn as it is.
    """

    x: list[float]
    y: list[float]
    low: list[float] | None
    high: list[float] | None


def bucketed(points: Sequence[Point], most: int) -> Line:
    """At most `most` points: all of them, or the mean and the extremes of buckets.

    Buckets are equal ranges of x from the first to the last point; an empty one is left out. The x
    of a bucket is the mean of its points' x.
    """
    if most < 1:
        raise ValueError(f"a line needs room for at least one point, not {most}")
    if len(points) <= most:
        return Line([x for x, _ in points], [y for _, y in points], None, None)
    first, last = points[0][0], points[-1][0]
    buckets: list[list[Point]] = [[] for _ in range(most)]
    for point in points:
        place = int((point[0] - first) / (last - first) * most) if last > first else 0
        buckets[min(place, most - 1)].append(point)
    filled = [bucket for bucket in buckets if bucket]
    return Line(
        [math.fsum(x for x, _ in bucket) / len(bucket) for bucket in filled],
        [math.fsum(y for _, y in bucket) / len(bucket) for bucket in filled],
        [min(y for _, y in bucket) for bucket in filled],
        [max(y for _, y in bucket) for bucket in filled],
    )


def spaced[Item](items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items at even distances, the first and the last among them; of one
    place, the last item.
    """
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def moving_mean(series: Sequence[Point], window: int) -> list[Point]:
    """The mean over the last `window` points (fewer at the start)."""
    values = [value for _, value in series]
    windows = (values[max(0, at + 1 - window) : at + 1] for at in range(len(values)))
    return [
        (step, math.fsum(part) / len(part)) for (step, _), part in zip(series, windows, strict=True)
    ]


def short(value: Any) -> Any:
    """The tree with its fractions at five significant digits, which no screen shows more of."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value != int(value) else int(value)
    if isinstance(value, dict):
        return {key: short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [short(each) for each in value]
    return value
