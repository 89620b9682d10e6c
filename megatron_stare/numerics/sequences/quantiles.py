"""Order statistics inside each sequence, for all sequences of a batch at once and over all ranks.

Context parallelism splits a sequence over ranks, so its quantile is no rank's own affair. The radix
selection of numerics/selection.py is run for every sequence side by side: eight bits of an
order-preserving key are fixed per round from an all-reduced histogram [G, 256], so nothing that
travels grows with the number of tokens. Answers are exact and the same under every layout.

Shape legend: T values of this rank (0 is allowed), G sequences of the batch on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.numerics.selection import Across, key_bits, ordered_key, values_of_keys

_BITS = 8
_INDEX_BITS = 64


def sequence_quantile(
    value_T: Tensor, sequence_T: Tensor, q: float, size: int, across: Across
) -> Tensor:
    """For each token the q-quantile [fp64] of the values of its whole sequence: linear
    interpolation at position q (n - 1) of the n sorted values, as torch.quantile.

    `sequence_T` numbers the sequences of the batch from 0 to `size` - 1. Collective. Raises
    ValueError, on every rank, for NaN, for an infinity, and for q outside [0, 1].
    """
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"sequence_quantile: q must lie in [0, 1], got {q}")
    _refuse(~torch.isfinite(value_T), "sequence_quantile: a value that is not finite", across)
    count_G = _summed(torch.bincount(sequence_T, minlength=size), across)
    position_G = q * (count_G - 1).clamp(min=0).double()
    below_G = position_G.long()
    above_G = torch.minimum(below_G + 1, (count_G - 1).clamp(min=0))
    key_T, bits = ordered_key(value_T), key_bits(value_T)
    lower_G, upper_G = (
        values_of_keys(_kth_smallest(key_T, bits, sequence_T, k_G, across), value_T.dtype).double()
        for k_G in (below_G, above_G)
    )
    return (lower_G + (position_G - below_G) * (upper_G - lower_G))[sequence_T]


def largest_per_sequence(
    value_T: Tensor,
    index_T: Tensor,
    sequence_T: Tensor,
    size: int,
    k_of: Callable[[int], int],
    across: Across,
) -> Tensor:
    """bool mask_T of the k_of(n) largest of the n values of each whole sequence, by (value
    descending, `index_T` ascending); give the negated values for the smallest ones.

    `index_T` is the batch's int64 order of tokens, unique: it breaks ties, so that exactly k_of(n)
    are chosen. `sequence_T` and `size` as in `sequence_quantile`. Collective. Raises ValueError, on
    every rank, for NaN.
    """
    _refuse(torch.isnan(value_T), "largest_per_sequence: NaN", across)
    count_G = _summed(torch.bincount(sequence_T, minlength=size), across)
    k_G = torch.tensor([k_of(n) if n else 0 for n in count_G.tolist()], dtype=torch.int64)
    k_G = torch.minimum(k_G.to(value_T.device).clamp(min=0), count_G)
    key_T, bits = ordered_key(-value_T), key_bits(value_T)  # ascending
    last_G = (k_G - 1).clamp(min=0)
    edge_T = _kth_smallest(key_T, bits, sequence_T, last_G, across)[sequence_T]
    # unsigned: keys of fp64 fill the sign bit
    lowest = torch.iinfo(torch.int64).min
    inside_T, tied_T = (key_T ^ lowest) < (edge_T ^ lowest), key_T == edge_T
    missing_G = k_G - _summed(torch.bincount(sequence_T[inside_T], minlength=size), across)
    last_index_G = _kth_smallest(
        index_T[tied_T], _INDEX_BITS, sequence_T[tied_T], (missing_G - 1).clamp(min=0), across
    )
    chosen_T = inside_T | (tied_T & (index_T <= last_index_G[sequence_T]))
    return chosen_T & (k_G > 0)[sequence_T]


def _kth_smallest(
    key_C: Tensor, bits: int, sequence_C: Tensor, k_G: Tensor, across: Across
) -> Tensor:
    """key_G: the k-th smallest (from 0) key of each sequence, read as unsigned; any value where a
    sequence has no more than k.
    """
    size, width = k_G.numel(), 1 << _BITS
    left_G, found_G = k_G.clone(), torch.zeros_like(k_G)
    for low in range(bits - _BITS, -1, -_BITS):
        digit_C = (key_C >> low) & (width - 1)
        histogram = torch.bincount(sequence_C * width + digit_C, minlength=size * width)
        at_most = _summed(histogram, across).view(size, width).cumsum(1)
        digit_G = (at_most <= left_G[:, None]).sum(1).clamp(max=width - 1)
        below_G = at_most.gather(1, (digit_G - 1).clamp(min=0)[:, None]).squeeze(1)
        left_G = left_G - torch.where(digit_G > 0, below_G, 0)
        found_G = found_G | (digit_G << low)
        kept_C = digit_C == digit_G[sequence_C]
        key_C, sequence_C = key_C[kept_C], sequence_C[kept_C]
    return found_G


def _summed(count: Tensor, across: Across) -> Tensor:
    if across.group is not None:
        dist.all_reduce(count, group=across.group)
    return count


def _refuse(bad_T: Tensor, what: str, across: Across) -> None:
    bad = across.count(bad_T)
    if bad:
        raise ValueError(f"{what} among the values of {bad} tokens")
