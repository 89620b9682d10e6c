"""Sums over whole sequences whose tokens lie on several ranks, differentiable.

With rank r holding the tokens T_r of a sequence, every token of it gets

    y = sum_r sum_{i in T_r} x_i        and backward        dL/dx_i = sum_r sum_{j in T_r} dL_r/dy_j

where L = sum_r L_r is the loss over all ranks: each rank's losses read every rank's tokens. The map
is its own adjoint, so the backward pass is the forward pass on the gradient.

Shape legend: N tokens of this rank (0 is allowed), B sequences shared by the group's ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sequence_sum(
    value_N: Tensor, sequence_N: Tensor, count: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """For each token the sum of `value_N` over its whole sequence, on all ranks of `group`.

    `sequence_N` numbers the sequences from 0 to `count` - 1, on all ranks alike. Added up in fp64
    and rounded once to the dtype of `value_N`. Collective, in the forward pass and, where
    `value_N` requires a gradient, in the backward pass: every rank calls it equally often and in
    the same order, ranks without a token included, and takes the gradient of what it made of it.

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
