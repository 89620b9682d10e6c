"""Batch-wide reductions over values that live on many ranks,
with the same answer under every layout.

`Across(group)` is all that a loss's `plan` sees of the other ranks. Every method is collective: all
ranks of the group call it in the same order, ranks without values included. Faulty input (NaN, an
infinity where no finite answer exists, lengths or arguments that disagree) raises the same
ValueError on EVERY rank, naming rank and position, so none hangs.

How it stays exact:
- sums are carried as integers. Each fp64 value is a 53-bit integer times a power of two; its two
  halves are added into bins of eight binary exponents, the bins are all-reduced as int64, and their
  total is rounded once. The result is the correctly rounded true sum, so it has the same bits
  whatever the layout (about 526 int64 on the wire).
- order statistics come from radix selection. A float's bits, read as an order-preserving unsigned
  integer, are fixed eleven at a time from the top; each round all-reduces a histogram of 2048
  counts. The traffic is 3 rounds for fp32 and 6 for fp64 (16 KiB each) however many values there
  are. Ties go to the smallest global index, found the same way.

Shape legend: T values of this rank (0 is allowed), C candidates still in the running.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.numerics.transfer import to_device

DIGIT_BITS = 11
DIGIT_COUNT = 1 << DIGIT_BITS

_SUM_BIN_EXPONENTS = 8
_SUM_BIN_COUNT = 264
_LOWEST_EXPONENT = -1074 - 53

_FAULTS = {
    1: "value_T holds NaN",
    2: "value_T holds an infinity, which has no finite sum",
    3: "value_T and its companion tensors differ in length",
    4: "value_T must be a one-dimensional floating-point tensor",
    5: "index_T must be an int64 tensor",
}


@dataclass(frozen=True)
class Across:
    """The ranks a batch is spread over; `group=None` means one process and no collective at all."""

    group: dist.ProcessGroup | None = None

    def count(self, mask_or_length: Tensor | int) -> int:
        """Global number of true entries of a mask, or the global sum of plain lengths."""
        if isinstance(mask_or_length, Tensor):
            local = mask_or_length.ne(0).sum().reshape(1)
        else:
            local = torch.tensor([int(mask_or_length)], dtype=torch.int64)
        return int(self._reduced(local, dist.ReduceOp.SUM))

    def sum(self, value_T: Tensor) -> float:
        """The true global sum, rounded once to fp64:
        the same bits under every layout. 0.0 where there is no value.
        """
        self._agree(value_T, finite=True)
        return self._exact_sum(value_T)

    def mean(self, value_T: Tensor) -> float:
        """Global mean [fp64]. ValueError where there is no value on any rank."""
        total = self._agree(value_T, finite=True)
        return self._exact_sum(value_T) / _required(total, "mean")

    def std(self, value_T: Tensor, unbiased: bool = False) -> float:
        """sqrt(sum (x - mean)^2 / n), n - 1 if `unbiased` [fp64].
        ValueError where the divisor is not positive.
        """
        total = self._agree(value_T, finite=True, argument=int(unbiased))
        mean = self._exact_sum(value_T) / _required(total, "std")
        divisor = _required(total - int(unbiased), "unbiased std" if unbiased else "std")
        return (self._exact_sum((value_T.double() - mean).square_()) / divisor) ** 0.5

    def sum_by(self, value_T: Tensor, key_T: Tensor, size: int) -> Tensor:
        """The global sum [fp64] of all values with a value's key, for each value: `sums` at its
        key.
        """
        return self.sums(value_T, key_T, size)[key_T]

    def sums(self, value_T: Tensor, key_T: Tensor, size: int) -> Tensor:
        """[size]: the global sum [fp64] of all values with each key, 0 <= key < `size`, the same on
        all ranks.
        """
        self._agree(value_T, finite=True, argument=size)
        total = value_T.new_zeros(size, dtype=torch.float64).index_add_(0, key_T, value_T.double())
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total

    def minimum(self, value_T: Tensor) -> float:
        """Global minimum; an infinity is allowed.
        ValueError where there is no value on any rank.
        """
        _required(self._agree(value_T), "minimum")
        return float(self._reduced(_extreme(value_T, largest=False), dist.ReduceOp.MIN))

    def maximum(self, value_T: Tensor) -> float:
        """Global maximum; an infinity is allowed.
        ValueError where there is no value on any rank.
        """
        _required(self._agree(value_T), "maximum")
        return float(self._reduced(_extreme(value_T, largest=True), dist.ReduceOp.MAX))

    def quantile(self, value_T: Tensor, q: float) -> float:
        """The exact q-quantile, 0 <= q <= 1:
        linear interpolation at position q (n - 1), as torch.quantile, in fp64.

        Raises ValueError for q outside [0, 1], for a q that differs between ranks, and where there
        is no value at all.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"quantile: q must lie in [0, 1], got {q}")
        total = _required(self._agree(value_T, argument=_bits_of(q)), "quantile")
        position = q * (total - 1)
        below = min(int(position), total - 1)
        fraction = position - below
        key_T = ordered_key(value_T)
        key, above_count, _ = self._kth_largest(key_T, key_bits(value_T), total - below)
        lower = float(values_of_keys(torch.tensor(key), value_T.dtype))
        not_above = total - above_count
        if fraction == 0.0 or not_above > below + 1:
            return lower
        upper_T = value_T[value_T > lower]
        upper = float(self._reduced(_extreme(upper_T, largest=False), dist.ReduceOp.MIN))
        return lower if math.isinf(lower) else lower + fraction * (upper - lower)

    def top_k(self, value_T: Tensor, index_T: Tensor, k: int) -> Tensor:
        """bool mask_T of the min(k, n) largest values over all ranks, by (value descending,
        index ascending).

        `index_T` is a global int64 order of the values, unique over all ranks, |index| < 2^62: it
        breaks ties, so that exactly min(k, n) are chosen, the same ones under every layout. -0.0
        and 0.0 tie. k <= 0 chooses nothing. Raises ValueError, on every rank, for NaN, for a k that
        differs between ranks and for indices that repeat where a tie must be broken.
        """
        total = self._agree(value_T, index_T, argument=int(k))
        wanted = max(0, min(int(k), total))
        if wanted == 0:
            return torch.zeros_like(value_T, dtype=torch.bool)
        if wanted == total:
            return torch.ones_like(value_T, dtype=torch.bool)
        key_T = ordered_key(value_T)
        key, above_count, tie_count = self._kth_largest(key_T, key_bits(value_T), wanted)
        mask_T = _unsigned_greater(key_T, key)
        missing = wanted - above_count
        tied_T = key_T == key
        if missing == tie_count:
            return mask_T | tied_T
        last_index = self._kth_smallest_index(index_T[tied_T], missing)
        return mask_T | (tied_T & (index_T <= last_index))

    def _kth_largest(self, key_T: Tensor, key_bits: int, k: int) -> tuple[int, int, int]:
        """The k-th largest key (1-based), how many keys are larger, how many are equal:
        globally.
        """
        candidate_C, key, larger, equal = key_T, 0, 0, 0
        for low, width in _digits(key_bits):
            digit_C = (candidate_C >> low) & ((1 << width) - 1)
            histogram = self._histogram(digit_C)
            at_least = histogram.flip(0).cumsum(0).flip(0)
            digit = int(torch.nonzero(at_least >= k - larger)[-1])
            equal = int(histogram[digit])
            larger += int(at_least[digit]) - equal
            key |= digit << low
            candidate_C = candidate_C[digit_C == digit]
        return _as_int64(key), larger, equal

    def _kth_smallest_index(self, index_C: Tensor, k: int) -> int:
        """The k-th smallest (1-based) of the tied global indices.
        ValueError if it is not unique.
        """
        outer = torch.stack(
            [_outermost(index_C, largest=True), -_outermost(index_C, largest=False)]
        )
        largest, negated_smallest = self._reduced(outer, dist.ReduceOp.MAX).tolist()
        smallest = -negated_smallest
        candidate_C, offset, smaller, equal = index_C - smallest, 0, 0, 0
        for low, width in _digits(max(1, (largest - smallest).bit_length())):
            digit_C = (candidate_C >> low) & ((1 << width) - 1)
            histogram = self._histogram(digit_C)
            at_most = histogram.cumsum(0)
            digit = int(torch.nonzero(at_most >= k - smaller)[0])
            equal = int(histogram[digit])
            smaller += int(at_most[digit]) - equal
            offset |= digit << low
            candidate_C = candidate_C[digit_C == digit]
        if equal != 1:
            raise ValueError(
                f"top_k: global index {smallest + offset} occurs {equal} times among tied values; "
                "it must be unique"
            )
        return smallest + offset

    def _histogram(self, digit_C: Tensor) -> Tensor:
        local = torch.bincount(digit_C, minlength=DIGIT_COUNT)
        return self._reduced(local, dist.ReduceOp.SUM).cpu()

    def _exact_sum(self, value_T: Tensor) -> float:
        """Correctly rounded global sum of finite values (module docstring, first point)."""
        fraction_T, exponent_T = torch.frexp(value_T.double())
        integer_T = (fraction_T * 2.0**53).long()
        place_T = exponent_T.long() - 53 - _LOWEST_EXPONENT
        bin_T, shift_T = place_T // _SUM_BIN_EXPONENTS, place_T % _SUM_BIN_EXPONENTS
        bins = torch.zeros(2, _SUM_BIN_COUNT, dtype=torch.int64, device=value_T.device)
        bins[0].index_add_(0, bin_T, (integer_T >> 26) << shift_T)
        bins[1].index_add_(0, bin_T, (integer_T & ((1 << 26) - 1)) << shift_T)
        high, low = self._reduced(bins, dist.ReduceOp.SUM).tolist()
        total = 0
        for place, (upper, lower) in enumerate(zip(high, low, strict=True)):
            total += ((upper << 26) + lower) << (_SUM_BIN_EXPONENTS * place)
        return total / (1 << -_LOWEST_EXPONENT)

    def _agree(
        self,
        value_T: Tensor,
        index_T: Tensor | None = None,
        finite: bool = False,
        argument: int = 0,
    ) -> int:
        """Global number of values, after all ranks agreed that the input is sound.
        One all-gather of five int64.
        """
        kind = torch.finfo(value_T.dtype).bits if value_T.is_floating_point() else 0
        fault = _stated_fault(value_T, index_T)
        found = _first_fault(value_T, finite) if fault is None else torch.tensor(fault)
        device = found.device
        header = torch.cat(
            [to_device([value_T.numel()], device), found, to_device([kind, argument], device)]
        )
        rows = self._gathered(header, value_T.device)
        for rank, (_, rank_fault, rank_position, _, _) in enumerate(rows):
            if rank_fault:
                raise ValueError(f"{_FAULTS[rank_fault]}: rank {rank}, position {rank_position}")
        for rank, row in enumerate(rows):
            if row[3:] != rows[0][3:]:
                raise ValueError(
                    f"rank {rank} disagrees with rank 0 on dtype or argument: {row[3:]} against "
                    f"{rows[0][3:]}"
                )
        return sum(row[0] for row in rows)

    def _gathered(self, header: Tensor, device: torch.device) -> list[list[int]]:
        if self.group is None:
            return [header.tolist()]
        local = self._on_wire(header.to(device))
        rows = [torch.empty_like(local) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, local, group=self.group)
        return torch.stack(rows).tolist()

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is None:
            return tensor
        wire = self._on_wire(tensor)
        dist.all_reduce(wire, op=operation, group=self.group)
        return wire

    def _on_wire(self, tensor: Tensor) -> Tensor:
        """The tensor where the group's backends can reach it: NCCL moves device memory only."""
        assert self.group is not None, "there is a wire"
        if tensor.device.type == "cpu" and tensor.device not in self.group._device_types:
            return tensor.to(torch.device("cuda", torch.cuda.current_device()))
        return tensor


def largest_per_segment(
    value_T: Tensor, index_T: Tensor, segment_T: Tensor, k_of: Callable[[int], int]
) -> Tensor:
    """bool mask_T of the k_of(n) largest values inside every local segment of n values.

    Order inside a segment: value descending, then `index_T` ascending; segments need not be
    contiguous. No collective:
    a segment (sequence, micro-batch) lies on one rank. Raises ValueError for NaN and for lengths
    that differ.
    """
    if not value_T.shape == index_T.shape == segment_T.shape or value_T.dim() != 1:
        raise ValueError(
            f"largest_per_segment: value_T {tuple(value_T.shape)}, index_T {tuple(index_T.shape)} "
            f"and segment_T {tuple(segment_T.shape)} must be equally long vectors"
        )
    nan_T = torch.isnan(value_T)
    if nan_T.any():
        raise ValueError(
            f"largest_per_segment: value_T holds NaN at position {int(nan_T.nonzero()[0])}"
        )
    order_T = torch.argsort(index_T, stable=True)
    order_T = order_T[torch.argsort(value_T[order_T], descending=True, stable=True)]
    order_T = order_T[torch.argsort(segment_T[order_T], stable=True)]
    _, length_G = torch.unique_consecutive(segment_T[order_T], return_counts=True)
    chosen_G = torch.tensor(
        [k_of(length) for length in length_G.tolist()], dtype=torch.int64, device=value_T.device
    )
    place_T = torch.arange(value_T.numel(), device=value_T.device)
    place_T = place_T - torch.repeat_interleave(length_G.cumsum(0) - length_G, length_G)
    mask_T = torch.zeros_like(value_T, dtype=torch.bool)
    mask_T[order_T] = place_T < torch.repeat_interleave(chosen_G, length_G)
    return mask_T


def _required(divisor: int, name: str) -> int:
    if divisor <= 0:
        raise ValueError(f"{name}: too few values on all ranks together for it to exist")
    return divisor


def _stated_fault(value_T: Tensor, index_T: Tensor | None) -> tuple[int, int] | None:
    """(fault code, position) of what the host knows of this rank's input."""
    if value_T.dim() != 1 or not value_T.is_floating_point():
        return 4, -1
    if index_T is not None and index_T.shape != value_T.shape:
        return 3, min(index_T.numel(), value_T.numel())
    if index_T is not None and index_T.dtype != torch.int64:
        return 5, -1
    return None


def _first_fault(value_T: Tensor, finite: bool) -> Tensor:
    """[2] int64 where the values are: fault code or 0, and the position of the first value that has
    it; NaN goes before infinity.
    """
    found = to_device([0, -1], value_T.device)
    if not value_T.numel():
        return found
    for fault, bad_T in ((2, torch.isinf(value_T)), (1, torch.isnan(value_T))):
        if fault == 1 or finite:
            place = bad_T.int().argmax().reshape(1)  # the first of the largest
            found = torch.where(
                bad_T.any(), torch.cat([torch.full_like(place, fault), place]), found
            )
    return found


def _extreme(value_T: Tensor, largest: bool) -> Tensor:
    """[1] fp64 local extremum; the neutral infinity where this rank has no value."""
    if value_T.numel() == 0:
        return torch.full(
            (1,), float("-inf" if largest else "inf"), dtype=torch.float64, device=value_T.device
        )
    return (value_T.max() if largest else value_T.min()).double().reshape(1)


def _outermost(index_C: Tensor, largest: bool) -> Tensor:
    """int64 scalar: local largest or smallest index; a neutral value where this rank has none."""
    if index_C.numel() == 0:
        neutral = -(1 << 62) if largest else 1 << 62
        return torch.tensor(neutral, dtype=torch.int64, device=index_C.device)
    return index_C.max() if largest else index_C.min()


def key_bits(value_T: Tensor) -> int:
    """The number of bits of these values' keys."""
    return 64 if value_T.dtype == torch.float64 else 32


def ordered_key(value_T: Tensor) -> Tensor:
    """int64 key_T whose unsigned order is the order of the values.
    fp32 and narrower use the low 32 bits only.
    """
    if value_T.dtype == torch.float64:
        bits_T = (value_T + 0.0).view(torch.int64)
        return torch.where(bits_T < 0, ~bits_T, bits_T ^ torch.iinfo(torch.int64).min)
    bits_T = (value_T.float() + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(bits_T >= 1 << 31, 0xFFFFFFFF - bits_T, bits_T + (1 << 31))


def values_of_keys(key_G: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `ordered_key`: fp64 for keys of fp64 values, fp32 for all narrower ones."""
    if dtype == torch.float64:
        return torch.where(key_G >= 0, ~key_G, key_G ^ torch.iinfo(torch.int64).min).view(dtype)
    bits_G = torch.where(key_G >= 1 << 31, key_G - (1 << 31), 0xFFFFFFFF - key_G)
    return bits_G.to(torch.int32).view(torch.float32)


def _unsigned_greater(key_T: Tensor, key: int) -> Tensor:
    lowest = torch.iinfo(torch.int64).min
    return (key_T ^ lowest) > (key ^ lowest)


def _as_int64(bits: int, width: int = 64) -> int:
    """A `width`-bit pattern read as a signed integer."""
    return bits - (1 << width) if bits >= 1 << (width - 1) else bits


def _digits(bits: int) -> list[tuple[int, int]]:
    """(lowest bit, width) of every digit, from the top."""
    edges = [*range(0, bits, DIGIT_BITS), bits]
    return [(low, high - low) for low, high in itertools.pairwise(edges)][::-1]


def _bits_of(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float64).view(torch.int64))
