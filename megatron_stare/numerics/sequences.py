"""Sums, scans and order statistics along sequences whose tokens lie on several ranks.

Context parallelism leaves each rank two separate chunks of a sequence. Every function here gives
the same answer however the tokens are split over ranks, and is collective: every rank of the group
calls it, ranks without a token included.

    sequence_sum            y = sum_r sum_{i in T_r} x_i, differentiable, T_r the tokens of rank r
    sequence_scan           a function of whole rows of tokens: kalman_mean, preceding_minimum
    sequence_quantile, largest_per_sequence    exact order statistics by radix selection

Shape legend: N or T tokens of this rank (0 is allowed), M tokens of all ranks of the group, B or G
sequences on all ranks, L places of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.numerics.selection import Across

Scan = Callable[[Tensor], Tensor]


def sequence_sum(
    value_N: Tensor, sequence_N: Tensor, count: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """For each token the sum of `value_N` over its whole sequence, on all ranks of `group`.

    `sequence_N` numbers the sequences from 0 to `count` - 1, on all ranks alike. Added up in fp64
    and rounded once to the dtype of `value_N`. Collective, in the forward pass and, where
    `value_N` requires a gradient, in the backward pass: every rank calls it equally often and in
    the same order, ranks without a token included, and takes the gradient of what it made of it.

    With L = sum_r L_r the loss over all ranks, dL/dx_i = sum_r sum_{j in T_r} dL_r/dy_j: the map is
    its own adjoint, so the backward pass is the forward pass on the gradient.

    Raises ValueError where `value_N` has not one floating-point value per token.
    """
    if value_N.shape != sequence_N.shape or not value_N.is_floating_point():
        raise ValueError(
            f"sequence_sum: {value_N.dtype} values of shape {tuple(value_N.shape)} for "
            f"{sequence_N.numel()} tokens; it takes one floating-point value per token"
        )
    shared = group is not None and dist.get_world_size(group) > 1
    result: Tensor = _SequenceSum.apply(value_N, sequence_N, count, group if shared else None)
    return result


class _SequenceSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value_N: Tensor, sequence_N: Tensor, count: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.call = sequence_N, count, group
        total_B = torch.zeros(count, dtype=torch.float64, device=value_N.device)
        total_B.index_add_(0, sequence_N, value_N.double())
        if group is not None:
            dist.all_reduce(total_B, group=group)
        return total_B[sequence_N].to(value_N.dtype)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        # apply, not forward: a second derivative goes over the ranks too
        return _SequenceSum.apply(grad_N, *ctx.call), None, None, None


@torch.no_grad()
def sequence_scan(
    scan: Scan,
    value_N: Tensor,
    *,
    sequence_N: Tensor,
    position_N: Tensor,
    count: int,
    group: dist.ProcessGroup | None = None,
    every_position: bool = False,
) -> Tensor:
    """`scan` over whole sequences: the result at this rank's tokens, in the dtype of `value_N`.

    Every sequence of a micro-batch is laid out as one row on every rank, and every rank scans the
    same rows. Values are constants here: no gradient passes a scan.

    `sequence_N` numbers the sequences from 0 to `count` - 1 on all ranks alike, `position_N` is the
    token's place in its response. `scan` gets [B, L] in fp64, a sequence's tokens from the left in
    the order of their positions and 0 after them, and returns that shape. With `every_position`
    the places are the positions themselves, and those without a token (tool output) hold 0.

    One all-gather of the micro-batch's tokens. Raises ValueError where the tensors are not equally
    long vectors.
    """
    if not value_N.shape == sequence_N.shape == position_N.shape or value_N.dim() != 1:
        raise ValueError(
            f"sequence_scan: value_N {tuple(value_N.shape)}, sequence_N {tuple(sequence_N.shape)} "
            f"and position_N {tuple(position_N.shape)} must be equally long vectors"
        )
    own_3N = torch.stack([value_N.double(), sequence_N.double(), position_N.double()])
    all_3M, first = _gathered(own_3N, group)
    value_M, sequence_M, position_M = all_3M[0], all_3M[1].long(), all_3M[2].long()
    place_M = position_M if every_position else _places(sequence_M, position_M, count)
    longest = int(place_M.max()) + 1 if place_M.numel() else 0
    row_BL = value_M.new_zeros(count, longest)
    row_BL[sequence_M, place_M] = value_M
    own = slice(first, first + value_N.numel())
    return scan(row_BL)[sequence_M[own], place_M[own]].to(value_N.dtype)


def preceding_minimum(value_BL: Tensor) -> Tensor:
    """[B, L]: w_t = min_{j < t} r_j along each row, w_1 = 1 (MinPRO, arXiv 2601.22718)."""
    if value_BL.shape[1] < 2:
        return torch.ones_like(value_BL)
    before_BL = torch.cummin(value_BL[:, :-1], dim=1).values
    return torch.cat([torch.ones_like(value_BL[:, :1]), before_BL], dim=1)


def kalman_gains(length: int, process_noise: float, measurement_noise: float) -> list[float]:
    """K_1 ... K_length of a scalar random walk seen through noise, from P_0 = 0:

        K_t = (P_{t-1} + Q) / (P_{t-1} + Q + R)        P_t = R K_t

    Q `process_noise`, R `measurement_noise`; not negative, and not both 0.
    """
    gains, spread = [], 0.0
    for _ in range(length):
        gain = (spread + process_noise) / (spread + process_noise + measurement_noise)
        spread = measurement_noise * gain
        gains.append(gain)
    return gains


def kalman_mean(value_BL: Tensor, process_noise: float, measurement_noise: float) -> Tensor:
    """[B, L]: x_t = (1 - K_t) x_{t-1} + K_t z_t along each row, x_0 = 0, gains as `kalman_gains`
    (KPO, arXiv 2602.10609).

    The steps x -> a x + b are composed in pairs, then fours and so on: log2(L) passes over the
    rows, and no division by a product that may underflow.
    """
    gains = kalman_gains(value_BL.shape[1], process_noise, measurement_noise)
    gain_L = torch.tensor(gains, dtype=value_BL.dtype, device=value_BL.device)
    slope_L, mean_BL = 1.0 - gain_L, gain_L * value_BL
    step = 1
    while step < value_BL.shape[1]:
        mean_BL = torch.cat(
            [
                mean_BL[:, :step],
                mean_BL[:, step:] + slope_L[step:] * mean_BL[:, :-step],
            ],
            dim=1,
        )
        slope_L = torch.cat([slope_L[:step], slope_L[step:] * slope_L[:-step]])
        step *= 2
    return mean_BL


def _gathered(own_3N: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """The columns of all ranks in rank order, and where this rank's begin."""
    if group is None or dist.get_world_size(group) == 1:
        return own_3N, 0
    size = dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=own_3N.device)
    lengths[dist.get_rank(group)] = own_3N.shape[1]
    dist.all_reduce(lengths, group=group)
    padded = own_3N.new_zeros(3, int(lengths.max()))
    padded[:, : own_3N.shape[1]] = own_3N
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    gathered = torch.cat(
        [part[:, :length] for part, length in zip(parts, lengths.tolist(), strict=True)], dim=1
    )
    return gathered, int(lengths[: dist.get_rank(group)].sum())


def _places(sequence_M: Tensor, position_M: Tensor, count: int) -> Tensor:
    """Each token's number among the tokens of its sequence, by position."""
    order_M = torch.argsort(position_M, stable=True)
    order_M = order_M[torch.argsort(sequence_M[order_M], stable=True)]
    length_B = torch.bincount(sequence_M, minlength=count)
    start_B = length_B.cumsum(0) - length_B
    place_M = torch.empty_like(position_M)
    place_M[order_M] = torch.arange(order_M.numel(), device=order_M.device)
    return place_M - start_B[sequence_M]


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
    count_G = across.counts(sequence_T, size)
    return across.quantiles(value_T, sequence_T, q, count_G)[sequence_T]


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
    count_G = across.counts(sequence_T, size)
    k_G = torch.tensor([k_of(n) if n else 0 for n in count_G.tolist()], dtype=torch.int64)
    k_G = torch.minimum(k_G.to(value_T.device).clamp(min=0), count_G)
    return across.largest(value_T, index_T, sequence_T, k_G)


def _refuse(bad_T: Tensor, what: str, across: Across) -> None:
    bad = across.count(bad_T)
    if bad:
        raise ValueError(f"{what} among the values of {bad} tokens")
