"""Elementwise work over tiles of logits:
partial statistics of a row, their combination, and the gradient in place.

With x = z / T the tempered logits of a row and m their maximum, y = x - m, a row is summed up by
    S0 = sum e^y    S1 = sum e^y y    S2 = sum e^y y^2    Q0 = sum e^2y    Q1 = sum e^2y y
    x_a = the target's logit
over the columns at hand. Two such sums over different columns combine by shifting to the common
maximum, so tiles of one rank and shards of all ranks are merged by one function. Then
    surprisal s = ln S0 - (x_a - m)        entropy H = ln S0 - S1/S0
    variance of s under p: S2/S0 - (S1/S0)^2
    c = sum p^2 (s_j - H) = (S1 Q0/S0 - Q1)/S0^2
    ds/dx_j = p_j - 1[j = a]               dH/dx_j = p_j (S1/S0 - y_j)

CUDA tensors (fp32 and narrower) go through the Triton kernels of `vocab_kernels`; everything else
runs here, a block of rows at a time so that the passes stay in cache. Reading a masked logit of
-inf is safe: its y is clamped to a value whose exponential is exactly 0.

Shape legend: n rows of a tile, v its columns, R the G sets of partial sums to merge, F their fields
(5 or 7).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_stare.numerics.vocab_shard import (
    FIELDS,
    FIELDS_WITH_COLLISION,
    MAXIMUM,
    Q0,
    Q1,
    S0,
    S1,
    S2,
    SCRATCH_ELEMENTS,
    TARGET,
    RowMoments,
    VocabShard,
)

_LOWEST_Y = -1.0e4
_COMBINE_ROWS = 4096


def empty_partials(rows: int, collision: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n, F] sums over no column at all."""
    partial_nF = torch.zeros(
        rows, FIELDS_WITH_COLLISION if collision else FIELDS, dtype=dtype, device=device
    )
    partial_nF[:, MAXIMUM] = float("-inf")
    return partial_nF


def add_tile_(
    partial_nF: Tensor,
    tile_nv: Tensor,
    first_column: int,
    target_n: Tensor,
    inverse_temperature_n: Tensor | None,
) -> None:
    """Add the columns [first_column, first_column + v) to the partial sums;
    `target_n` counts the same columns.

    A target outside these columns adds nothing. The tile is only read.
    """
    if tile_nv.numel() == 0:
        return
    if _by_kernel(tile_nv):
        from megatron_stare.numerics import vocab_kernels

        vocab_kernels.add_tile_(partial_nF, tile_nv, first_column, target_n, inverse_temperature_n)
        return
    tile_partial_nF = torch.zeros_like(partial_nF)
    block = max(1, SCRATCH_ELEMENTS // tile_nv.shape[1])
    scratch_knv = torch.empty(
        3 if partial_nF.shape[1] == FIELDS_WITH_COLLISION else 2,
        min(block, tile_nv.shape[0]),
        tile_nv.shape[1],
        dtype=partial_nF.dtype,
        device=tile_nv.device,
    )
    for first in range(0, tile_nv.shape[0], block):
        rows = slice(first, first + block)
        inverse_n = None if inverse_temperature_n is None else inverse_temperature_n[rows]
        _sum_up(
            tile_nv[rows],
            target_n[rows] - first_column,
            inverse_n,
            scratch_knv[:, : tile_nv[rows].shape[0]],
            tile_partial_nF[rows],
        )
    partial_nF.copy_(combine(torch.stack([partial_nF, tile_partial_nF])))


def _sum_up(
    tile_nv: Tensor,
    column_n: Tensor,
    inverse_temperature_n: Tensor | None,
    scratch_knv: Tensor,
    partial_nF: Tensor,
) -> None:
    """Fill [n, F] with the sums over one tile. `scratch_knv`: two buffers of the tile's shape,
    three with collision terms, which read e^y once more after e^y y.
    """
    y_nv, exp_nv, product_nv = scratch_knv[0], scratch_knv[1], scratch_knv[-1]
    y_nv.copy_(tile_nv)
    if inverse_temperature_n is not None:
        y_nv.mul_(inverse_temperature_n.unsqueeze(1))
    here_n = (column_n >= 0) & (column_n < tile_nv.shape[1])
    target_logit_n = y_nv.gather(1, column_n.clamp(0, tile_nv.shape[1] - 1).unsqueeze(1)).squeeze(1)
    partial_nF[:, TARGET] = torch.where(here_n, target_logit_n, 0.0)
    maximum_n = y_nv.amax(1)
    partial_nF[:, MAXIMUM] = maximum_n
    y_nv.sub_(torch.where(torch.isfinite(maximum_n), maximum_n, 0.0).unsqueeze(1)).clamp_(
        min=_LOWEST_Y
    )
    torch.exp(y_nv, out=exp_nv)
    partial_nF[:, S0] = exp_nv.sum(1)
    torch.mul(exp_nv, y_nv, out=product_nv)  # in place of e^y if there are two buffers
    partial_nF[:, S1] = product_nv.sum(1)
    partial_nF[:, S2] = y_nv.mul_(product_nv).sum(1)
    if partial_nF.shape[1] == FIELDS_WITH_COLLISION:
        partial_nF[:, Q1] = product_nv.mul_(exp_nv).sum(1)
        partial_nF[:, Q0] = exp_nv.square_().sum(1)


def combine(partial_GnF: Tensor) -> Tensor:
    """[n, F] sums over the union of the columns of G disjoint sets, in fp64 inside,
    set 0 first (deterministic).

    A set without columns (maximum -inf) weighs nothing. The target field is simply added: one set
    holds it, the others hold 0.
    """
    if partial_GnF.shape[1] > _COMBINE_ROWS:
        return torch.cat([combine(block) for block in partial_GnF.split(_COMBINE_ROWS, dim=1)])
    field_FGn = partial_GnF.double().permute(2, 0, 1)
    maximum_n = field_FGn[MAXIMUM].amax(0)
    shift_Gn = field_FGn[MAXIMUM] - maximum_n
    shift_Gn = torch.where(torch.isneginf(field_FGn[MAXIMUM]), _LOWEST_Y, shift_Gn)
    shift_Gn = shift_Gn.clamp(min=_LOWEST_Y)  # its square stays finite; the weight is 0 there
    weight_Gn = torch.exp(shift_Gn)
    columns = [
        maximum_n,
        (weight_Gn * field_FGn[S0]).sum(0),
        (weight_Gn * (field_FGn[S1] + shift_Gn * field_FGn[S0])).sum(0),
        field_FGn[TARGET].sum(0),
        (
            weight_Gn * (field_FGn[S2] + shift_Gn * (2 * field_FGn[S1] + shift_Gn * field_FGn[S0]))
        ).sum(0),
    ]
    if partial_GnF.shape[2] == FIELDS_WITH_COLLISION:
        weight_Gn = weight_Gn.square_()
        columns.append((weight_Gn * field_FGn[Q0]).sum(0))
        columns.append((weight_Gn * (field_FGn[Q1] + shift_Gn * field_FGn[Q0])).sum(0))
    return torch.stack(columns, dim=1).to(partial_GnF.dtype)


def add_kept_(
    kept_n: Tensor,
    tile_nv: Tensor,
    inverse_temperature_n: Tensor | None,
    maximum_n: Tensor,
    kappa: float,
) -> None:
    """Add sum of e^y over the tile's columns with e^y >= kappa to `kept_n`; y counts from
    `maximum_n`, the rows' maximum over the whole vocabulary, so e^y is p over the largest p.

    Torch operations on every device, a block of rows at a time. The tile is only read.
    """
    if tile_nv.numel() == 0:
        return
    block = max(1, SCRATCH_ELEMENTS // tile_nv.shape[1])
    for first in range(0, tile_nv.shape[0], block):
        rows = slice(first, first + block)
        y_nv = tile_nv[rows].to(kept_n.dtype, copy=True)
        if inverse_temperature_n is not None:
            y_nv.mul_(inverse_temperature_n[rows].unsqueeze(1))
        y_nv.sub_(maximum_n[rows].unsqueeze(1))
        dropped_nv = y_nv < math.log(kappa)
        kept_n[rows] += y_nv.exp_().masked_fill_(dropped_nv, 0.0).sum(1)


def finish_kept(
    kept_n: Tensor, moments: RowMoments, shard: VocabShard, surprisal_n: Tensor, kappa: float
) -> Tensor:
    """ln of the kept share of every row's probability, from all ranks' sums, at most 0; inf where
    the target, of surprisal `surprisal_n`, is not kept itself.
    """
    kept_n = shard.gathered(kept_n).double().sum(0)
    normalizer_n = moments.normalizer_n.double()
    share_n = (kept_n / normalizer_n).log().clamp(max=0.0)
    # the largest probability is 1 / normalizer; rounding must not part a target from the edge
    outside_n = normalizer_n.log() - surprisal_n.double() < math.log(kappa) - 1e-6
    return share_n.masked_fill(outside_n, math.inf).to(moments.normalizer_n.dtype)


class RowStatistics(NamedTuple):
    """Per row, over the whole vocabulary; the last two are None unless they are asked for."""

    surprisal_n: Tensor
    entropy_n: Tensor
    moments: RowMoments
    variance_n: Tensor  # of the surprisal, under the row's own distribution
    c_n: Tensor | None
    log_kept_mass_n: Tensor | None = None


def finish(partial_nF: Tensor, shard: VocabShard) -> RowStatistics:
    """Every rank's sums made into statistics: the one collective over the vocabulary. Where a logit
    is NaN or +inf, or no logit of the row is finite, the row's surprisal or entropy is not finite.
    """
    total_nF = combine(shard.gathered(partial_nF))
    maximum_n, s0_n, s1_n, target_n = (
        total_nF[:, field].double() for field in (MAXIMUM, S0, S1, TARGET)
    )
    log_n, mean_n = s0_n.log(), s1_n / s0_n
    c_n = None
    if total_nF.shape[1] == FIELDS_WITH_COLLISION:
        sum_p2_n = total_nF[:, Q0].double() / s0_n.square()
        c_n = (mean_n * sum_p2_n - total_nF[:, Q1].double() / s0_n.square()).to(total_nF.dtype)
    dtype = total_nF.dtype
    return RowStatistics(
        surprisal_n=(log_n - (target_n - maximum_n)).to(dtype),
        entropy_n=(log_n - mean_n).to(dtype),
        moments=RowMoments(
            total_nF[:, MAXIMUM].contiguous(), total_nF[:, S0].contiguous(), mean_n.to(dtype)
        ),
        variance_n=(total_nF[:, S2].double() / s0_n - mean_n.square()).clamp(min=0.0).to(dtype),
        c_n=c_n,
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
    """Overwrite logits z by dL/dz = (g_s (p_j - 1[j = a]) + g_H p_j (S1/S0 - y_j)) / T,
    in the tile's own dtype.
    """
    if tile_nv.numel() == 0:
        return
    row_values = (target_n, inverse_temperature_n, moments, grad_surprisal_n, grad_entropy_n)
    if _by_kernel(tile_nv):
        from megatron_stare.numerics import vocab_kernels

        vocab_kernels.write_gradient_(tile_nv, first_column, *row_values)
        return
    slope_n = grad_surprisal_n.to(moments.normalizer_n.dtype)
    slope_n = slope_n if inverse_temperature_n is None else slope_n * inverse_temperature_n
    block = max(1, SCRATCH_ELEMENTS // tile_nv.shape[1])
    for first in range(0, tile_nv.shape[0], block):
        rows = slice(first, first + block)
        y_nv = tile_nv[rows].to(slope_n.dtype)
        if inverse_temperature_n is not None:
            y_nv.mul_(inverse_temperature_n[rows].unsqueeze(1))
        y_nv.sub_(moments.maximum_n[rows].unsqueeze(1))
        if grad_entropy_n is None:
            y_nv.exp_().mul_((slope_n[rows] / moments.normalizer_n[rows]).unsqueeze(1))
        else:
            entropy_slope_n = grad_entropy_n[rows].to(y_nv.dtype)
            if inverse_temperature_n is not None:
                entropy_slope_n = entropy_slope_n * inverse_temperature_n[rows]
            _write_with_entropy_(y_nv, moments.rows(rows), slope_n[rows], entropy_slope_n)
        _subtract_at_target_(y_nv, target_n[rows] - first_column, slope_n[rows])
        if y_nv.dtype != tile_nv.dtype:
            tile_nv[rows] = y_nv


def _write_with_entropy_(
    y_nv: Tensor, moments: RowMoments, slope_n: Tensor, entropy_slope_n: Tensor
) -> None:
    """Overwrite y_j by p_j (slope + entropy_slope (S1/S0 - y_j)):
    the gradient without the target's term.
    """
    y_nv.clamp_(min=_LOWEST_Y)
    probability_nv = y_nv.exp().div_(moments.normalizer_n.unsqueeze(1))
    level_n = slope_n + entropy_slope_n * moments.mean_n
    y_nv.mul_(-entropy_slope_n.unsqueeze(1)).add_(level_n.unsqueeze(1))
    y_nv.mul_(probability_nv)


def _subtract_at_target_(gradient_nv: Tensor, column_n: Tensor, amount_n: Tensor) -> None:
    width = gradient_nv.shape[1]
    here_n = (column_n >= 0) & (column_n < width)
    gradient_nv.scatter_add_(
        1,
        column_n.clamp(0, width - 1).unsqueeze(1),
        torch.where(here_n, -amount_n, 0.0).unsqueeze(1),
    )


def _by_kernel(tile_nv: Tensor) -> bool:
    return tile_nv.is_cuda and tile_nv.dtype != torch.float64
