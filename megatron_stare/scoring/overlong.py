"""The soft overlong penalty of DAPO (arXiv 2503.14476, section 3.4)."""

from __future__ import annotations


def soft_overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """min(0, -(length - (max_length - buffer)) / buffer * factor), in [-factor, 0];
    lengths in tokens.

    max_length 20480, buffer 4096, factor 1: 16384 -> 0, 18432 -> -0.5, 20480 -> -1. ValueError:
    buffer < 1.
    """
    if buffer < 1:
        raise ValueError(f"buffer={buffer}: the penalty needs at least one token to rise over")
    over = min(length, max_length) - (max_length - buffer)
    return min(0.0, -over / buffer * factor)
