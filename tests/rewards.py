"""Rewards of small runs. The module is light, because every process that scores imports it."""

from __future__ import annotations

from typing import Any


def even_characters(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1 if the sum of the response's bytes is even:
    about half of random texts, so groups carry signal.
    """
    return float(sum(response.encode()) % 2 == 0)


def no_signal(response: str, label: str, metadata: dict[str, Any]) -> float:
    """Every response is wrong."""
    return 0.0


def every_second(responses: list[str]) -> list[float]:
    return [float(place % 2) for place in range(len(responses))]
