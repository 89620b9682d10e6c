"""Seconds and errors on the machine's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

ROUNDS = 10


def device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median over `rounds`, after two that warm up."""
    found = []
    for number in range(rounds + 2):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        if number > 1:
            found.append(time.perf_counter() - begin)
    return max(statistics.median(found), 1e-9)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(work: Callable[[], object]) -> float:
    """What torch's allocator held in addition at its peak; 0 on a CPU."""
    if not torch.cuda.is_available():
        work()
        return 0.0
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def relative_error(found: Tensor, reference: Tensor) -> float:
    """|found - reference| / |reference|, Euclidean norms in float64; NaN if one is not finite."""
    expected = reference.double()
    return float((found.double() - expected).norm() / expected.norm())
