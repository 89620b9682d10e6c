"""A 64-bit hash of a tensor's bits, computed where the tensor is and read once.

Each element's bits are mixed with its position by an invertible map of 64-bit words (the finaliser
of SplitMix64, Steele, Lea and Flood 2014) and the results are added, modulo 2^64. The sum does not
depend on the order, so neither on the chunks. One changed element changes the hash for certain,
since the map is invertible; other changes go unseen with a chance of about 2^-64. It protects
against mistakes, not against people who want two tensors with one hash.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 20
# As signed 64-bit words, which is what torch has; products and sums wrap around on every device.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_hash(tensor: Tensor, chunk_elements: int = CHUNK_ELEMENTS) -> Tensor:
    """The hash as a scalar int64 tensor on the tensor's device.

    Beside the tensor it takes some 32 bytes per element of one chunk. -0.0 and 0.0, and NaNs of
    different bits, count as different; the shape does not count.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), chunk_elements):
        chunk = words[start : start + chunk_elements].long()
        place = torch.arange(start + 1, start + 1 + chunk.numel(), device=flat.device)
        total += _mixed(chunk.add_(place.mul_(_STEP))).sum()
    return total


def _mixed(word: Tensor) -> Tensor:
    """SplitMix64's finaliser without its last shift, in place."""
    for factor, shift in zip(_FACTORS, _SHIFTS, strict=True):
        # torch shifts signed words arithmetically; the mask takes the copies of the sign away
        word ^= (word >> shift) & ((1 << (64 - shift)) - 1)
        word *= factor
    return word
