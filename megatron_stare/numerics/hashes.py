"""Hashes of tensors, computed where the tensors are, each tensor read once.

`bit_hash` is our own 64-bit hash. Each element's bits are mixed with its position by an invertible
map of 64-bit words (the finaliser of SplitMix64, Steele, Lea and Flood 2014) and the results are
added modulo 2^64, so that neither order nor chunks matter. One changed element changes the hash for
certain, since the map is invertible; other changes go unseen with a chance of about 2^-64. It
protects against mistakes, not against people who want two tensors with one hash.

`tile_total` and `tile_text` give the hash of an SGLang server's weights checker on a GPU. With
32-bit words w_i at place i of the tensor's bytes (padded with zeros to a whole word) and mix the
finaliser of MurmurHash3, a tile of 8192 words has the halves, j = 1, 2:

    h_j = mix(size ^ sum_i mix(w_i ^ (i a_j + s_j) ^ rotate(i, r_j)))        [32 bits, sums wrap]

The 64-bit values h_1 h_2 of all tiles are added up modulo 2^64. On a GPU one kernel reads the
tensor (hash_kernel.py); elsewhere torch does, in 64-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements at a time: a CPU's cache holds the words of few, and a GPU needs many at once.
CHUNK_ON_CPU, CHUNK_ON_GPU = 1 << 18, 1 << 20
# As signed 64-bit words, which is what torch has; products and sums wrap around on every device.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27)
_WORD_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TILE = 8192
_CHUNK_WORDS = 512 * TILE
_MASK = 0xFFFFFFFF
_SEED = 0x243F6A88
# a, s, r of the two halves
HALVES = (
    (0x27D4EB2D, _SEED, 15),
    (0x165667B1, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK, 13),
)


def bit_hash(tensor: Tensor, chunk: int = 0, places: Tensor | None = None) -> Tensor:
    """The hash as a scalar int64 tensor on the tensor's device.

    It takes some 32 bytes more per element of one `chunk`, by default of as many elements as suit
    the device. -0.0 and 0.0, and NaNs of different bits, count as different; the shape does not
    count. `places` [rows] says where in a larger tensor each row's first element stands, so that
    the hashes of its shards add up to that of the whole.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORD_TYPES[flat.element_size()])
    words = words[:, None] if places is None else words.view(len(places), -1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    column = torch.arange(1, 1 + words.shape[1], device=flat.device)
    chunk = chunk or (CHUNK_ON_GPU if flat.is_cuda else CHUNK_ON_CPU)
    rows = max(1, chunk // max(1, words.shape[1]))
    for start in range(0, len(words), rows):
        word = words[start : start + rows].long()
        if places is None:
            first = torch.arange(start, start + len(word), device=flat.device)
        else:
            first = places[start : start + rows]
        total += _mixed(word.add_((first[:, None] + column).mul_(_STEP))).sum()
    return total


def _mixed(word: Tensor) -> Tensor:
    """SplitMix64's finaliser without its last shift, in place."""
    for factor, shift in zip(_FACTORS, _SHIFTS, strict=True):
        # torch shifts signed words arithmetically; the mask takes the copies of the sign away
        word ^= (word >> shift) & ((1 << (64 - shift)) - 1)
        word *= factor
    return word


def tile_total(tensor: Tensor) -> Tensor:
    """The sum over the tensor's tiles: an int64 scalar on its device, which the host need not wait
    for.
    """
    words = _words(tensor)
    if words.is_cuda and words.numel():
        from megatron_stare.numerics.hash_kernel import tile_values

        return tile_values(words, TILE, *HALVES).sum()
    found = torch.zeros((), dtype=torch.int64, device=words.device)
    size = words.numel() * 4 & _MASK
    for start in range(0, words.numel(), _CHUNK_WORDS):
        found += _tile_values(words[start : start + _CHUNK_WORDS], start, size).sum()
    return found


def tile_text(value: int) -> str:
    """A total through SplitMix64's finaliser, as the server writes it: 16 hexadecimal digits."""
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
