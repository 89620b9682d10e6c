"""Random numbers: a CUDA generator's draws are those of a CPU generator with the same state.

The CPU generator's seed is a function of the CUDA generator's seed and offset, so that saving and
restoring the CUDA generator's state repeats its draws. They are not CUDA's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def on_cpu(generator: torch.Generator) -> torch.Generator:
    """The CPU generator for the next draw of `generator`."""
    if generator.device.type != "cuda":
        return generator
    return torch.Generator().manual_seed(_seed(generator))


def as_default(device: int) -> AbstractContextManager[None]:
    """While it lasts, the CPU's default generator draws for that of a CUDA device."""
    return _drawing(_seed(torch.cuda.default_generators[device]))


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _seed(generator: torch.Generator) -> int:
    return (generator.initial_seed() * 0x9E3779B97F4A7C15 + generator.get_offset()) % (1 << 63)
