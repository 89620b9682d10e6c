"""Triton kernels for the elementwise work of `vocab_statistics`:
one read of the logits, then one in-place rewrite.

Both compute in fp32 whatever the logits' dtype. Every lane of the statistics kernel keeps its own
running maximum and sums, so that a row is reduced across lanes once, at its end; the order of
additions is fixed, so results are deterministic. With TRITON_INTERPRET=1 they run on CPU tensors
(tests/numerics/test_vocab_kernels.py).

Shape legend: n rows of a tile, v its columns, F partial sums (5, or 7 with collision).
"""

# mypy: disable-error-code="no-untyped-def, import-untyped"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_stare.numerics.vocab_shard import FIELDS_WITH_COLLISION, RowMoments

STATISTICS_BLOCK = 2048
GRADIENT_BLOCK = 4096
_LOWEST_Y = tl.constexpr(-1.0e4)
_NO_MAXIMUM = tl.constexpr(-1.0e30)


def add_tile_(
    partial_nF: Tensor,
    tile_nv: Tensor,
    first_column: int,
    target_n: Tensor,
    inverse_temperature_n: Tensor | None,
) -> None:
    """See `vocab_statistics.add_tile_`; fp32 partial sums, contiguous rows."""
    row_count, column_count = tile_nv.shape
    block = min(STATISTICS_BLOCK, triton.next_power_of_2(column_count))
    _statistics_kernel[(row_count,)](
        partial_nF,
        tile_nv,
        target_n,
        target_n if inverse_temperature_n is None else inverse_temperature_n,
        first_column,
        column_count,
        tile_nv.stride(0),
        FIELD_COUNT=partial_nF.shape[1],
        TEMPERED=inverse_temperature_n is not None,
        COLLISION=partial_nF.shape[1] == FIELDS_WITH_COLLISION,
        BLOCK_COUNT=triton.cdiv(column_count, block),
        BLOCK=block,
    )


def write_gradient_(
    tile_nv: Tensor,
    first_column: int,
    target_n: Tensor,
    inverse_temperature_n: Tensor | None,
    moments: RowMoments,
    grad_surprisal_n: Tensor,
    grad_entropy_n: Tensor | None,
) -> None:
    """See `vocab_statistics.write_gradient_`."""
    row_count, column_count = tile_nv.shape
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(column_count))
    slope_n = grad_surprisal_n.float().contiguous()
    entropy_slope_n = slope_n if grad_entropy_n is None else grad_entropy_n.float().contiguous()
    # Rows on the grid's first axis: the others end at 65,535.
    _gradient_kernel[(row_count, triton.cdiv(column_count, block))](
        tile_nv,
        target_n,
        slope_n if inverse_temperature_n is None else inverse_temperature_n,
        moments.maximum_n,
        moments.normalizer_n,
        moments.mean_n,
        slope_n,
        entropy_slope_n,
        first_column,
        column_count,
        tile_nv.stride(0),
        TEMPERED=inverse_temperature_n is not None,
        ENTROPY=grad_entropy_n is not None,
        BLOCK=block,
    )


@triton.jit
def _statistics_kernel(
    partial_pointer,
    tile_pointer,
    target_pointer,
    inverse_temperature_pointer,
    first_column,
    column_count,
    row_stride,
    FIELD_COUNT: tl.constexpr,
    TEMPERED: tl.constexpr,
    COLLISION: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program sums up one row of the tile and merges it into the row's partial sums."""
    row = tl.program_id(0).to(tl.int64)
    row_pointer = tile_pointer + row * row_stride
    inverse_temperature = 1.0
    if TEMPERED:
        inverse_temperature = tl.load(inverse_temperature_pointer + row)
    lane = tl.arange(0, BLOCK)
    maximum = tl.full([BLOCK], _NO_MAXIMUM, tl.float32)
    zero = tl.zeros([BLOCK], tl.float32)
    s0, s1, s2, q0, q1 = zero, zero, zero, zero, zero
    for block in range(BLOCK_COUNT):
        column = block * BLOCK + lane
        inside = column < column_count
        x = tl.load(row_pointer + column, mask=inside, other=float("-inf")).to(tl.float32)
        if TEMPERED:
            x = x * inverse_temperature
        higher = tl.maximum(maximum, x)
        shift = tl.maximum(maximum - higher, _LOWEST_Y)
        y = x - higher
        y = tl.where(y < _LOWEST_Y, _LOWEST_Y, y)
        weight = tl.exp(shift)
        term = tl.exp(y)
        s2 = weight * (s2 + shift * (2 * s1 + shift * s0)) + term * y * y
        s1 = weight * (s1 + shift * s0) + term * y
        s0 = weight * s0 + term
        if COLLISION:
            q1 = weight * weight * (q1 + shift * q0) + term * term * y
            q0 = weight * weight * q0 + term * term
        maximum = higher
    base = partial_pointer + row * FIELD_COUNT
    earlier = tl.load(base)
    earlier = tl.where(earlier == float("-inf"), _NO_MAXIMUM, earlier)
    total = tl.maximum(tl.max(maximum, 0), earlier)
    tl.store(base, tl.where(total == _NO_MAXIMUM, float("-inf"), total))
    shift = tl.maximum(maximum - total, _LOWEST_Y)
    earlier_shift = tl.maximum(earlier - total, _LOWEST_Y)
    weight, earlier_weight = tl.exp(shift), tl.exp(earlier_shift)
    _merge_square(base, s0, s1, s2, weight, shift, earlier_weight, earlier_shift)
    _merge_pair(base + 1, s0, s1, weight, shift, earlier_weight, earlier_shift)
    if COLLISION:
        square, earlier_square = weight * weight, earlier_weight * earlier_weight
        _merge_pair(base + 5, q0, q1, square, shift, earlier_square, earlier_shift)
    target = tl.load(target_pointer + row) - first_column
    here = (target >= 0) & (target < column_count)
    logit = tl.load(row_pointer + target, mask=here, other=0.0).to(tl.float32)
    tl.store(base + 3, logit * inverse_temperature, mask=here)


@triton.jit
def _merge_square(base, s0, s1, s2, weight, shift, earlier_weight, earlier_shift):
    """Add the lanes' sum e^y y^2, moved to the common maximum, to the row's. The row's other sums
    must still be those of the earlier tiles.
    """
    earlier = 2 * tl.load(base + 2) + earlier_shift * tl.load(base + 1)
    earlier = tl.load(base + 4) + earlier_shift * earlier
    moved = s2 + shift * (2 * s1 + shift * s0)
    tl.store(base + 4, tl.sum(weight * moved, 0) + earlier_weight * earlier)


@triton.jit
def _merge_pair(pointer, zeroth, first, weight, shift, earlier_weight, earlier_shift):
    """Add the lanes' (sum e^y, sum e^y y), moved to the common maximum,
    to the pair stored at `pointer`.
    """
    earlier_zeroth = tl.load(pointer)
    earlier_first = tl.load(pointer + 1) + earlier_shift * earlier_zeroth
    tl.store(pointer, tl.sum(weight * zeroth, 0) + earlier_weight * earlier_zeroth)
    tl.store(
        pointer + 1, tl.sum(weight * (first + shift * zeroth), 0) + earlier_weight * earlier_first
    )


@triton.jit
def _gradient_kernel(
    tile_pointer,
    target_pointer,
    inverse_temperature_pointer,
    maximum_pointer,
    normalizer_pointer,
    mean_pointer,
    slope_pointer,
    entropy_slope_pointer,
    first_column,
    column_count,
    row_stride,
    TEMPERED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program rewrites one block of columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointer = tile_pointer + row * row_stride + column
    inside = column < column_count
    y = tl.load(pointer, mask=inside, other=float("-inf")).to(tl.float32)
    inverse_temperature = 1.0
    if TEMPERED:
        inverse_temperature = tl.load(inverse_temperature_pointer + row)
        y = y * inverse_temperature
    y = y - tl.load(maximum_pointer + row)
    y = tl.where(y < _LOWEST_Y, _LOWEST_Y, y)
    probability = tl.exp(y) / tl.load(normalizer_pointer + row)
    slope = tl.load(slope_pointer + row)
    target = tl.load(target_pointer + row) - first_column
    gradient = slope * (probability - tl.where(column == target, 1.0, 0.0))
    if ENTROPY:
        gradient += (
            tl.load(entropy_slope_pointer + row) * probability * (tl.load(mean_pointer + row) - y)
        )
    tl.store(
        pointer, (gradient * inverse_temperature).to(tile_pointer.dtype.element_ty), mask=inside
    )
