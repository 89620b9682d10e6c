"""The Triton kernel of hashes.py: a program reads a tile once and writes its 64-bit value.

With TRITON_INTERPRET=1 it runs on CPU tensors (tests/numerics/test_hashes_tile.py).
"""

# mypy: disable-error-code="no-untyped-def, import-untyped"
from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

Half = tuple[int, int, int]


def tile_values(words: Tensor, tile: int, high: Half, low: Half) -> Tensor:
    """h_1 h_2 of every tile of the int32 words, as int64; `high`, `low`: a, s, r of h_1 and h_2."""
    count = words.numel()
    values = torch.empty(triton.cdiv(count, tile), dtype=torch.int64, device=words.device)
    # weights are hashed in a thread of their own, whose current device may be another
    place = torch.cuda.device(words.device) if words.is_cuda else contextlib.nullcontext()
    with place:
        _tile_kernel[(values.numel(),)](
            words, values, count, count * 4 & 0xFFFFFFFF, *high, *low, BLOCK=tile
        )
    return values


@triton.jit
def _tile_kernel(
    word_pointer,
    value_pointer,
    word_count,
    size,
    FACTOR_HIGH: tl.constexpr,
    SEED_HIGH: tl.constexpr,
    TURN_HIGH: tl.constexpr,
    FACTOR_LOW: tl.constexpr,
    SEED_LOW: tl.constexpr,
    TURN_LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    inside = place < word_count
    word = tl.load(word_pointer + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    place = place.to(tl.uint32)
    size = size.to(tl.uint32)
    high = _half(word, place, inside, size, FACTOR_HIGH, SEED_HIGH, TURN_HIGH)
    low = _half(word, place, inside, size, FACTOR_LOW, SEED_LOW, TURN_LOW)
    value = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    tl.store(value_pointer + tile, value.to(tl.int64, bitcast=True))


@triton.jit
def _half(
    word,
    place,
    inside,
    size,
    FACTOR: tl.constexpr,
    SEED: tl.constexpr,
    TURN: tl.constexpr,
):
    turned = (place << TURN) | (place >> (32 - TURN))
    marked = place * FACTOR + SEED
    mixed = tl.where(inside, _mix(word ^ marked.to(tl.uint32) ^ turned), 0)
    return _mix(tl.sum(mixed.to(tl.uint32), 0) ^ size)


@triton.jit
def _mix(word):
    """MurmurHash3's finaliser."""
    word = word ^ (word >> 16)
    word = (word * 0x85EBCA6B).to(tl.uint32)
    word = word ^ (word >> 13)
    word = (word * 0xC2B2AE35).to(tl.uint32)
    return word ^ (word >> 16)
