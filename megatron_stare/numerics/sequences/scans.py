"""Operations along whole sequences in their tokens' order, for tokens that lie on several ranks.

Context parallelism leaves each rank two chunks of a sequence that do not touch, so a prefix needs
the other ranks' tokens between its own. `sequence_scan` lays every sequence of a micro-batch out
as one row, runs a scan along it, and hands each token of this rank its result: the same bits
however the tokens are split, as every rank scans the same rows. A scan is a plain function of rows:

    kalman_mean         x_t = (1 - K_t) x_{t-1} + K_t z_t        KPO, arXiv 2602.10609
    preceding_minimum   w_t = min_{j < t} r_j, w_1 = 1           MinPRO, arXiv 2601.22718

Values are constants here: no gradient passes a scan.

Shape legend: N tokens of this rank (0 is allowed), M tokens of all ranks of the group, B sequences,
L places of the longest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Scan = Callable[[Tensor], Tensor]


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
    """What `scan` makes of whole sequences, for each token of this rank; in the dtype of `value_N`.

    `sequence_N` numbers the sequences from 0 to `count` - 1 on all ranks alike, `position_N` is the
    token's place in its response. `scan` gets [B, L] in fp64, a sequence's tokens from the left in
    the order of their positions and 0 behind them, and returns that shape. With `every_position`
    the places are the positions themselves, and those without a token (tool output) hold 0.

    One all-gather of the micro-batch's tokens: every rank calls it, ranks without a token included.
    Raises ValueError where the tensors are not equally long vectors.
    """
    if not value_N.shape == sequence_N.shape == position_N.shape or value_N.dim() != 1:
        raise ValueError(
            f"sequence_scan: value_N {tuple(value_N.shape)}, sequence_N {tuple(sequence_N.shape)} "
            f"and position_N {tuple(position_N.shape)} must be equally long vectors"
        )
    own_3N = torch.stack([value_N.double(), sequence_N.double(), position_N.double()])
    all_3M, first = _everyone(own_3N, group)
    value_M, sequence_M, position_M = all_3M[0], all_3M[1].long(), all_3M[2].long()
    place_M = position_M if every_position else _places(sequence_M, position_M, count)
    longest = int(place_M.max()) + 1 if place_M.numel() else 0
    row_BL = value_M.new_zeros(count, longest)
    row_BL[sequence_M, place_M] = value_M
    own = slice(first, first + value_N.numel())
    return scan(row_BL)[sequence_M[own], place_M[own]].to(value_N.dtype)


def preceding_minimum(value_BL: Tensor) -> Tensor:
    """[B, L]: the smallest value before each place of its row; 1 at the first place."""
    if value_BL.shape[1] < 2:
        return torch.ones_like(value_BL)
    before_BL = torch.cummin(value_BL[:, :-1], dim=1).values
    return torch.cat([torch.ones_like(value_BL[:, :1]), before_BL], dim=1)


def kalman_gains(length: int, process_noise: float, measurement_noise: float) -> list[float]:
    """K_1 ... K_length of a scalar random walk seen through noise, from P_0 = 0:

        K_t = (P_{t-1} + Q) / (P_{t-1} + Q + R)        P_t = R K_t

    Q `process_noise`, R `measurement_noise`; not negative, and not both 0, else ValueError.
    """
    if process_noise < 0 or measurement_noise < 0 or process_noise + measurement_noise <= 0:
        raise ValueError(
            f"kalman_gains: process_noise={process_noise} and measurement_noise="
            f"{measurement_noise} must not be negative, nor both 0"
        )
    gains, spread = [], 0.0
    for _ in range(length):
        gain = (spread + process_noise) / (spread + process_noise + measurement_noise)
        spread = measurement_noise * gain
        gains.append(gain)
    return gains


def kalman_mean(value_BL: Tensor, process_noise: float, measurement_noise: float) -> Tensor:
    """[B, L]: x_t = (1 - K_t) x_{t-1} + K_t z_t along each row, x_0 = 0, gains as `kalman_gains`.

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


def _everyone(own_3N: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
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
    everyone = torch.cat(
        [part[:, :length] for part, length in zip(parts, lengths.tolist(), strict=True)], dim=1
    )
    return everyone, int(lengths[: dist.get_rank(group)].sum())


def _places(sequence_M: Tensor, position_M: Tensor, count: int) -> Tensor:
    """Each token's number among the tokens of its sequence, by position."""
    order_M = torch.argsort(position_M, stable=True)
    order_M = order_M[torch.argsort(sequence_M[order_M], stable=True)]
    length_B = torch.bincount(sequence_M, minlength=count)
    start_B = length_B.cumsum(0) - length_B
    place_M = torch.empty_like(position_M)
    place_M[order_M] = torch.arange(order_M.numel(), device=order_M.device)
    return place_M - start_B[sequence_M]
