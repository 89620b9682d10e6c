"""The hash that an SGLang server on a GPU gives of a tensor (its weights checker's), computed where
the tensor is and read once.

With 32-bit words w_i at place i of the tensor's bytes (zeros behind them up to a whole word) and
mix the finaliser of MurmurHash3, a tile of 8192 words has the halves, j = 1, 2:

    h_j = mix(size ^ sum_i mix(w_i ^ (i a_j + s_j) ^ rotate(i, r_j)))        [32 bits, sums wrap]

The 64-bit values h_1 h_2 of all tiles are added up, modulo 2^64, which `total` returns as a tensor,
so that nobody waits for the device; `text` finishes it, once read, by SplitMix64's finaliser. On a
GPU one kernel reads the tensor (tile_kernel.py); elsewhere torch does, in 64-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 8192
_CHUNK_WORDS = 512 * TILE
_MASK = 0xFFFFFFFF
_SEED = 0x243F6A88
# a, s, r of the two halves
HALVES = (
    (0x27D4EB2D, _SEED, 15),
    (0x165667B1, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK, 13),
)


def total(tensor: Tensor) -> Tensor:
    """The sum over the tensor's tiles: an int64 scalar on its device."""
    words = _words(tensor)
    if words.is_cuda and words.numel():
        from megatron_stare.numerics.hashes.tile_kernel import tile_values

        return tile_values(words, TILE, *HALVES).sum()
    found = torch.zeros((), dtype=torch.int64, device=words.device)
    size = words.numel() * 4 & _MASK
    for start in range(0, words.numel(), _CHUNK_WORDS):
        found += _tile_values(words[start : start + _CHUNK_WORDS], start, size).sum()
    return found


def text(value: int) -> str:
    """A total, finished, as the server writes it: 16 hexadecimal digits."""
    mask = (1 << 64) - 1
    value &= mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return f"{value ^ (value >> 31):016x}"


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bytes as int32, without a copy where they are whole words."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    return data.view(torch.int32)


def _tile_values(words: Tensor, start: int, size: int) -> Tensor:
    """h_1 h_2 of each tile of the words, which begin at place `start`."""
    word = words.long() & _MASK
    place = torch.arange(start, start + word.numel(), device=word.device)
    halves = []
    for factor, seed, turn in HALVES:
        turned = ((place << turn) | (place >> (32 - turn))) & _MASK
        mixed = _mix(word ^ ((place * factor + seed) & _MASK) ^ turned)
        whole = torch.nn.functional.pad(mixed, (0, -mixed.numel() % TILE))
        halves.append(_mix((whole.view(-1, TILE).sum(1) & _MASK) ^ size))
    return (halves[0] << 32) | halves[1]


def _mix(word: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, on 32-bit values in 64-bit integers (products wrap, the low
    half is exact).
    """
    word = word ^ (word >> 16)
    word = word * 0x85EBCA6B & _MASK
    word = word ^ (word >> 13)
    word = word * 0xC2B2AE35 & _MASK
    return word ^ (word >> 16)
