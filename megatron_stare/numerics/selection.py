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
  are; per segment eight bits at a time, in 4 or 8 rounds of 2 KiB for each segment. Ties go to the
  smallest global index, found the same way.

Shape legend: T values of this rank (0 is allowed), C candidates still in the running, G segments of
values (sequences), each selected from on its own, D values of a digit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.numerics.exchange import to_device

# Bits of a key, fixed in one round of the radix selection: of all values, and of each segment.
_DIGIT_BITS, _SEGMENT_DIGIT_BITS = 11, 8
_NO_INDEX = -(1 << 62)  # below every index

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

    def std(self, value_T: Tensor) -> float:
        """sqrt(sum (x - mean)^2 / n) [fp64]. ValueError where there is no value on any rank."""
        total = _required(self._agree(value_T, finite=True), "std")
        mean = self._exact_sum(value_T) / total
        return (self._exact_sum((value_T.double() - mean).square_()) / total) ** 0.5

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
        """Global minimum; may be infinite. ValueError where there is no value on any rank."""
        return -self._maximum(-value_T, "minimum")

    def maximum(self, value_T: Tensor) -> float:
        """Global maximum; may be infinite. ValueError where there is no value on any rank."""
        return self._maximum(value_T, "maximum")

    def _maximum(self, value_T: Tensor, name: str) -> float:
        _required(self._agree(value_T), name)
        local = value_T.max() if value_T.numel() else value_T.new_full((), float("-inf"))
        return float(self._reduced(local.double().reshape(1), dist.ReduceOp.MAX))

    def quantile(self, value_T: Tensor, q: float) -> float:
        """The exact q-quantile, 0 <= q <= 1:
        linear interpolation at position q (n - 1), as torch.quantile, in fp64.

        Raises ValueError for q outside [0, 1], for a q that differs between ranks, and where there
        is no value at all.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"quantile: q must lie in [0, 1], got {q}")
        total = _required(self._agree(value_T, argument=_bits_of(q)), "quantile")
        return float(self.quantiles(value_T, None, q, to_device([total], value_T.device)))

    def quantiles(
        self, value_T: Tensor, segment_T: Tensor | None, q: float, count_G: Tensor
    ) -> Tensor:
        """[G]: the q-quantile [fp64] of the `count_G` values of each segment, or of all; any number
        where there is no value. The values hold no NaN.
        """
        last_G = (count_G - 1).clamp(min=0)
        position_G = q * last_G.double()
        below_G = position_G.long()
        key_T, bits = ordered_key(value_T), key_bits(value_T)
        lower_G, upper_G = (
            values_of_keys(self._kth_smallest(key_T, bits, segment_T, k_G)[0], value_T.dtype)
            for k_G in (below_G, torch.minimum(below_G + 1, last_G))
        )
        lower_G, fraction_G = lower_G.double(), position_G - below_G
        found_G = lower_G + fraction_G * (upper_G.double() - lower_G)
        return torch.where((fraction_G == 0) | torch.isinf(lower_G), lower_G, found_G)

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
        if wanted in (0, total):
            return torch.full_like(value_T, wanted > 0, dtype=torch.bool)
        k_G = to_device([wanted], value_T.device)
        return self.largest(value_T, index_T, None, k_G)

    def largest(
        self, value_T: Tensor, index_T: Tensor, segment_T: Tensor | None, k_G: Tensor
    ) -> Tensor:
        """bool mask_T of the `k_G` largest values of each segment, or of all, over all ranks, in
        the order of `top_k`; k_G is at most the number of the values, which hold no NaN. Raises
        ValueError, on every rank, for indices that repeat where a tie must be broken.
        """
        key_T = ordered_key(-value_T)  # ascending
        last_G, any_G = (k_G - 1).clamp(min=0), k_G > 0
        edge_G, place_G, tied_G = self._kth_smallest(key_T, key_bits(value_T), segment_T, last_G)
        edge_T = _of_each(edge_G, segment_T)
        # unsigned: keys of fp64 fill the sign bit
        lowest = torch.iinfo(torch.int64).min
        inside_T, tied_T = (key_T ^ lowest) < (edge_T ^ lowest), key_T == edge_T
        if bool(((place_G + 1 < tied_G) & any_G).any()):
            segment_C = None if segment_T is None else segment_T[tied_T]
            last_index_G = self._kth_index(index_T[tied_T], segment_C, place_G, any_G)
            tied_T &= index_T <= _of_each(last_index_G, segment_T)
        return (inside_T | tied_T) & _of_each(any_G, segment_T)

    def counts(self, key_T: Tensor, size: int) -> Tensor:
        """[size]: the global number of values with each key, 0 <= key < `size`."""
        local = torch.bincount(key_T, minlength=size)
        return self._reduced(local, dist.ReduceOp.SUM).to(key_T.device)

    def _kth_smallest(
        self, key_C: Tensor, bits: int, segment_C: Tensor | None, k_G: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The k-th smallest (from 0) key of each segment, read as unsigned; k less the number of
        smaller keys; and the number of equal keys, 0 where a segment has none.
        """
        digit_bits = _DIGIT_BITS if segment_C is None else _SEGMENT_DIGIT_BITS
        size, width = k_G.numel(), 1 << digit_bits
        left_G, found_G, equal_G = k_G, torch.zeros_like(k_G), torch.zeros_like(k_G)
        for low in reversed(range(0, bits, digit_bits)):
            digit_C = (key_C >> low) & (width - 1)
            cell_C = digit_C if segment_C is None else segment_C * width + digit_C
            count_GD = self.counts(cell_C, size * width).view(size, width)
            at_most_GD = count_GD.cumsum(1)
            digit_G = (at_most_GD <= left_G[:, None]).sum(1).clamp(max=width - 1)
            equal_G, at_most_G = (
                table_GD.gather(1, digit_G[:, None]).squeeze(1)
                for table_GD in (count_GD, at_most_GD)
            )
            left_G = left_G - (at_most_G - equal_G)
            found_G = found_G | (digit_G << low)
            kept_C = digit_C == _of_each(digit_G, segment_C)
            key_C, segment_C = key_C[kept_C], None if segment_C is None else segment_C[kept_C]
        return found_G, left_G, equal_G

    def _kth_index(
        self, index_C: Tensor, segment_C: Tensor | None, k_G: Tensor, any_G: Tensor
    ) -> Tensor:
        """The k-th smallest (from 0) of the tied global indices of each segment. ValueError where
        it is not unique in a segment of `any_G`.
        """
        span = torch.full((2,), _NO_INDEX, dtype=torch.int64, device=index_C.device)
        if index_C.numel():
            span = torch.stack([index_C.max(), -index_C.min()])
        largest, negated_smallest = self._reduced(span, dist.ReduceOp.MAX).tolist()
        bits = max(1, (largest + negated_smallest).bit_length())
        found_G, _, equal_G = self._kth_smallest(index_C + negated_smallest, bits, segment_C, k_G)
        found_G = found_G - negated_smallest
        repeated_G = any_G & (equal_G > 1)
        if bool(repeated_G.any()):
            raise ValueError(
                f"top_k: global index {int(found_G[repeated_G][0])} occurs "
                f"{int(equal_G[repeated_G][0])} times among tied values; it must be unique"
            )
        return found_G

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


def _of_each(value_G: Tensor, segment_C: Tensor | None) -> Tensor:
    """The value of each token's segment; the only one where there are no segments."""
    return value_G if segment_C is None else value_G[segment_C]


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


def _bits_of(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float64).view(torch.int64))
