"""Blocks of E4M3: every number against a search over all 253 of them in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_stare.policy.huggingface.block_fp8 import BLOCK, decode, encode, rounded
from tests.reference import e4m3_blocks


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Sizes over many octaves, a block of zeros, one of tiny numbers, and exact largest ones."""
    dice = torch.Generator().manual_seed(rows)
    found = torch.randn(rows, columns, generator=dice)
    found *= torch.exp2(torch.randint(-12, 3, found.shape, generator=dice))
    found[:BLOCK, :BLOCK] *= 0.01
    if rows > BLOCK:
        found[BLOCK : 2 * BLOCK, :BLOCK] = 0
        found[BLOCK : 2 * BLOCK, BLOCK:] *= 1e-36
    found[0, 0] = 448 * 2.0**-9  # the scale is 2^-9 and no more
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(300, 160), (5, 129), (128, 128)])
def test_every_number_is_the_nearest(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = matrix(*shape, dtype)
    code, scale = encode(weight)
    assert code.dtype == torch.float8_e4m3fn and code.shape == weight.shape
    assert scale.shape == tuple(math.ceil(size / BLOCK) for size in shape)
    assert (torch.frexp(scale).mantissa == 0.5).all(), "powers of two"
    expected = e4m3_blocks(weight)
    assert torch.equal(decode(code, scale).double(), expected)
    assert torch.equal(rounded(weight).double(), expected), "bf16 holds it exactly"


def test_rounding_twice_changes_nothing() -> None:
    """The scales do not matter: with one more octave the codes are half as large."""
    for dtype in (torch.bfloat16, torch.float32):
        once = rounded(matrix(300, 160, dtype))
        code, scale = encode(once)
        assert torch.equal(decode(code, scale).to(dtype), once)
        assert torch.equal(rounded(once), once)
    assert torch.equal(decode(code, 3 * scale), 3 * decode(code, scale)), "scales of any size"


def test_the_largest_code_is_within_an_octave() -> None:
    code, _ = encode(torch.randn(128, 128, generator=torch.Generator().manual_seed(1)))
    assert 224 <= code.float().abs().max() <= 448
