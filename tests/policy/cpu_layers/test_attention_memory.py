"""Memory of the attention between forward and backward, and its peak."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.policy.cpu_layers.attention_cases import (
    core,
    linear_bytes,
    naive,
    packed_params,
    saved_storages,
    with_gradients,
)


@pytest.mark.parametrize("packed", [True, False])
def test_attention_keeps_only_inputs_output_and_log_sum_exp(packed: bool) -> None:
    """The value is a view into a fused projection, as Megatron's is;
    the projection must not stay alive for it.
    """
    fused = torch.randn(512, 4, 2, 4 * 16, requires_grad=True)
    query, key, value = fused.split((32, 16, 16), dim=3)
    query, key = query.reshape(512, 4, 4, 16) * 1.0, key * 1.0
    if packed:
        query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    params = packed_params([0, 1000, 1100, 2048]) if packed else None
    with saved_storages() as kept:
        core(16)(query, key, value, packed_seq_params=params)
    assert sum(kept.values()) == linear_bytes(2048, 4, 2, 16)


def peak_extra_bytes(function: Callable[[], Any]) -> int:
    """Resident memory at the peak of the call, less what was resident before it."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # memory freed before would hide what is used again
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak counter")
def test_peak_memory_is_linear_in_tokens() -> None:
    """8k tokens in one sequence: scores would be 256 MiB per head and copy.
    The same bound catches the naive twin.
    """
    heads, width = 2, 16

    def bound(tokens: int) -> int:
        return 8 * linear_bytes(tokens, heads, heads, width) + (16 << 20)

    def step(tokens: int, function: Callable[..., Tensor]) -> int:
        inputs = [torch.randn(tokens, heads, width) for _ in range(4)]
        return peak_extra_bytes(lambda: with_gradients(function, inputs))

    attention = core(width)
    params = packed_params([0, 8000, 8192])
    assert step(8192, lambda *qkv: attention(*qkv, packed_seq_params=params)) < bound(8192)
    assert step(4096, naive) > bound(4096)
