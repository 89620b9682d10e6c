"""Naive twins of the advantage estimators: lists of numbers, one response at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

EPSILON = 1e-6


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std_of(values: list[float]) -> float:
    """Divisor n - 1; a single one has 1."""
    if len(values) == 1:
        return 1.0
    mean = mean_of(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def group_mean(values: list[float]) -> float:
    """A group of one has mean 0."""
    return mean_of(values) if len(values) > 1 else 0.0


def grpo(own: float, values: list[float], lengths: list[int]) -> float:
    return (own - group_mean(values)) / (std_of(values) + EPSILON)


def dr_grpo(own: float, values: list[float], lengths: list[int]) -> float:
    return own - group_mean(values)


def rloo(own: float, values: list[float], lengths: list[int]) -> float:
    if len(values) == 1:
        return own
    return own - (math.fsum(values) - own) / (len(values) - 1)


def opo(own: float, values: list[float], lengths: list[int]) -> float:
    if len(values) == 1 or sum(lengths) == 0:
        return own
    weighted = [value * length for value, length in zip(values, lengths, strict=True)]
    return own - math.fsum(weighted) / sum(lengths)


def grpo_passk(own: float, values: list[float], lengths: list[int]) -> float:
    best, second = sorted(values)[-1], sorted(values)[-2]
    return (best - second) / (std_of(values) + EPSILON) if own == best else 0.0


def dcpo(own: float, values: list[float], lengths: list[int]) -> float:
    """The advantage at a prompt's first visit."""
    if len(set(values)) == 1:
        return 0.0
    return (own - mean_of(values)) / std_of(values)


def hapo(own: float, values: list[float], lengths: list[int]) -> float:
    if len(values) == 1:
        return 0.0
    tokens = [value for value, n in zip(values, lengths, strict=True) for _ in range(n)]
    mean = mean_of(tokens)
    spread = math.sqrt(mean_of([(value - mean) ** 2 for value in tokens]))
    if any(abs(value - mean) / (spread + EPSILON) >= 5 for value in tokens):
        return grpo(own, values, lengths)
    return (own - mean) / (spread + EPSILON)


def qae(own: float, values: list[float], lengths: list[int]) -> float:
    """At quantile 0.4."""
    base = 0.0
    if len(values) > 1:
        base = next(
            value
            for value in sorted(values)
            if sum(other <= value for other in values) >= 0.4 * len(values)
        )
    return (own - base) / (std_of(values) + EPSILON)


IN_GROUP: dict[str, Callable[[float, list[float], list[int]], float]] = {
    one.__name__: one for one in (grpo, dr_grpo, rloo, opo, grpo_passk, hapo, dcpo, qae)
}


def whitened(values: list[float], lengths: list[int]) -> list[float]:
    """Over every token, written out; var over N - 1."""
    tokens = [value for value, n in zip(values, lengths, strict=True) for _ in range(n)]
    mean = mean_of(tokens)
    variance = math.fsum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def advantages(
    name: str, rewards: list[float], groups: list[int], lengths: list[int]
) -> list[float]:
    """The advantage of every response; right is what has a reward above 0."""

    def of_group(columns: list[float], place: int) -> list[float]:
        return [columns[i] for i, other in enumerate(groups) if other == groups[place]]

    if name in IN_GROUP:
        return [
            IN_GROUP[name](own, of_group(rewards, place), of_group(lengths, place))
            for place, own in enumerate(rewards)
        ]
    centred = [own - group_mean(of_group(rewards, place)) for place, own in enumerate(rewards)]
    if name == "reinforce_plus_plus":
        return whitened(rewards, lengths)
    if name == "reinforce_plus_plus_baseline":
        return whitened(centred, lengths)
    if name == "gpg":
        scored = sum(reward != 0 for reward in rewards)
        return [value * len(rewards) / max(1, scored) for value in centred]
    right, wrong = {"w_reinf": (0.1, -1.0), "psr": (1.0, 0.0), "nsr": (0.0, -1.0)}[name]
    return [right if reward > 0 else wrong for reward in rewards]
