"""The head with the loss inside: hidden -> logits -> statistics -> token loss -> gradient,
chunk by chunk.

Once `plan` has run, a policy loss is a pure function of one token's surprisal and entropy. So a
chunk of rows can be finished while its logits are still in the workspace: the forward pass does all
three matrix products (logits, hidden gradient, weight gradient) and holds [n, V/TP] logits of one
chunk only; the backward pass hands the gradients out. On a CPU rows whose gradient is
exactly zero (clipped, zero advantage) skip the last two products; on a device the host would have
to wait for their number, chunk by chunk.

A loss that needs other tokens of its sequence (GSPO) has no per-token gradient here: use
`token_stats` for it.

Shape legend: N rows (loss tokens), n rows of a chunk, H hidden width (alone: entropy), V rows of
the weight shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stare.numerics import vocab_statistics
from megatron_stare.numerics.token_stats import WORKSPACE_BYTES, tile_of, token_stats
from megatron_stare.numerics.vocab_shard import (
    Tiling,
    VocabShard,
    checked_inverse_temperature,
    compute_dtype,
)
from megatron_stare.numerics.weight_gradient import (
    WeightGradient,
    add_vocabulary_sum_,
    compact_rows_,
    live_rows,
)

# surprisal_n, entropy_n and their place among the N rows -> finished token losses, coefficient
# included
ChunkLoss = Callable[..., Tensor]


def fused_loss(
    hidden_NH: Tensor,
    shard: VocabShard,
    target_N: Tensor,
    token_loss: ChunkLoss,
    *,
    temperature: float | Tensor = 1.0,
    needs_entropy_grad: bool = False,
    workspace_bytes: int = WORKSPACE_BYTES,
    reduce_hidden_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, surprisal_N, entropy_N, variance_N): loss = sum_n token_loss, differentiable;
    the statistics are detached.

    `token_loss(surprisal_n, entropy_n, rows)` returns the finished loss of the tokens `rows`,
    coefficient included, from torch operations; it is called once per chunk, in row order, on every
    rank of the vocabulary group alike. Its entropy argument carries a gradient only if
    `needs_entropy_grad`. Without gradients (torch.no_grad, or nothing requires one) only statistics
    are computed and `token_loss` sees all rows at once.

    The gradients are made for a backward that receives 1, the weight's in Megatron's main_grad at
    once, and the backward refuses any other value; a forward without its backward leaves main_grad
    wrong. Memory beyond inputs, gradients and `workspace_bytes`: 8 bytes per token (results), about
    40 per row of a chunk; with `shard.fp32_logits` the gradient of a chunk's logits in the inputs'
    dtype.

    Raises ValueError like `token_stats`, and where `token_loss` returns another shape than it was
    given. On a device a backward that receives another value than 1 fails where the device is next
    waited for.
    """
    if not (torch.is_grad_enabled() and (hidden_NH.requires_grad or shard.weight_VH.requires_grad)):
        stats = token_stats(
            hidden_NH, shard, target_N, temperature=temperature, workspace_bytes=workspace_bytes
        )
        loss_N = token_loss(stats.surprisal_N, stats.entropy_N, slice(0, target_N.numel()))
        loss = loss_N.sum(dtype=torch.float64).to(stats.surprisal_N.dtype)
        return loss, stats.surprisal_N, stats.entropy_N, stats.variance_N
    inverse_N = checked_inverse_temperature(hidden_NH, shard, target_N, temperature)
    call = _LossCall(
        *(shard, target_N, inverse_N, token_loss),
        *(needs_entropy_grad, workspace_bytes, reduce_hidden_grad),
    )
    return _FusedLoss.apply(hidden_NH, shard.weight_VH, call)


@dataclass
class _LossCall:
    """Everything of one call that is not differentiated;
    after the forward also the gradients themselves.
    """

    shard: VocabShard
    target_N: Tensor
    inverse_temperature_N: Tensor | None
    token_loss: ChunkLoss
    needs_entropy_grad: bool
    workspace_bytes: int
    reduce_hidden_grad: bool
    grad_hidden_NH: Tensor | None = None
    weight_gradient: WeightGradient | None = None
    spent: bool = False


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, call: _LossCall
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows_total, shard = hidden_NH.shape[0], call.shard
        dtype = shard.logits_dtype
        tiling = Tiling.full_width(rows_total, shard.rows, dtype.itemsize, call.workspace_bytes)
        row_blocks = tiling.row_blocks(rows_total)
        if ctx.needs_input_grad[0]:
            call.grad_hidden_NH = torch.empty_like(hidden_NH)
        if ctx.needs_input_grad[1]:
            call.weight_gradient = WeightGradient(weight_VH, len(row_blocks))
        workspace = hidden_NH.new_empty(tiling.row_count * tiling.column_count, dtype=dtype)
        statistics_3N = torch.empty(
            3, rows_total, dtype=compute_dtype(hidden_NH), device=hidden_NH.device
        )
        loss = torch.zeros((), dtype=torch.float64, device=hidden_NH.device)
        for rows in row_blocks:
            tile_nv = tile_of(workspace, hidden_NH[rows], weight_VH[: shard.real_rows])
            loss += _finish_chunk(tile_nv, hidden_NH, rows, call, statistics_3N)
        if call.grad_hidden_NH is not None and call.reduce_hidden_grad:
            shard.summed_(call.grad_hidden_NH)
        ctx.call = call
        surprisal_N, entropy_N, variance_N = statistics_3N.unbind()
        ctx.mark_non_differentiable(surprisal_N, entropy_N, variance_N)
        return loss.to(statistics_3N.dtype), surprisal_N, entropy_N, variance_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, None]:
        call: _LossCall = ctx.call
        if call.spent:
            raise RuntimeError("fused_loss hands its gradients out once: no second backward")
        call.spent = True
        _require_one(grad_loss)
        grad_hidden_NH, call.grad_hidden_NH = call.grad_hidden_NH, None
        weight_gradient, call.weight_gradient = call.weight_gradient, None
        return grad_hidden_NH, None if weight_gradient is None else weight_gradient.finish(), None


def _finish_chunk(
    tile_nv: Tensor,
    hidden_NH: Tensor,
    rows: slice,
    call: _LossCall,
    statistics_3N: Tensor,
) -> Tensor:
    """Statistics, loss and gradients of the rows whose logits are in the tile;
    returns the sum of their losses.
    """
    target_n = call.target_N[rows] - call.shard.start
    inverse_n = None if call.inverse_temperature_N is None else call.inverse_temperature_N[rows]
    partial_nF = vocab_statistics.empty_partials(
        tile_nv.shape[0], collision=False, dtype=statistics_3N.dtype, device=tile_nv.device
    )
    vocab_statistics.add_tile_(partial_nF, tile_nv, 0, target_n, inverse_n)
    statistics = vocab_statistics.finish(partial_nF, call.shard)
    for row_N, value_n in zip(
        statistics_3N,
        (statistics.surprisal_n, statistics.entropy_n, statistics.variance_n),
        strict=True,
    ):
        row_N[rows] = value_n
    loss, grad_surprisal_n, grad_entropy_n = _loss_and_slopes(
        call.token_loss, statistics.surprisal_n, statistics.entropy_n, rows, call.needs_entropy_grad
    )
    live = live_rows(grad_surprisal_n, grad_entropy_n)
    kept: slice | Tensor = slice(None)
    if live is not None:
        kept, tile_nv = live, compact_rows_(tile_nv, live)
    vocab_statistics.write_gradient_(
        tile_nv,
        0,
        target_n[kept],
        None if inverse_n is None else inverse_n[kept],
        statistics.moments.rows(kept),
        grad_surprisal_n[kept],
        None if grad_entropy_n is None else grad_entropy_n[kept],
    )
    _add_products(tile_nv.to(hidden_NH.dtype), hidden_NH, rows, live, call)
    return loss


def _add_products(
    tile_nv: Tensor, hidden_NH: Tensor, rows: slice, live: Tensor | None, call: _LossCall
) -> None:
    """The two products of a chunk's logit gradient;
    `live` names its rows inside the chunk, None means all.
    """
    columns = slice(0, call.shard.real_rows)
    weight_vH = call.shard.weight_VH[columns]
    if call.grad_hidden_NH is not None:
        grad_nH = call.grad_hidden_NH[rows]
        if live is None:
            add_vocabulary_sum_(grad_nH, tile_nv, weight_vH, beta=0.0)
        else:
            live_grad_nH = grad_nH.new_empty(live.numel(), grad_nH.shape[1])
            add_vocabulary_sum_(live_grad_nH, tile_nv, weight_vH, beta=0.0)
            grad_nH.zero_().index_copy_(0, live, live_grad_nH)
    if call.weight_gradient is not None and tile_nv.shape[0] > 0:
        hidden_nH = hidden_NH[rows] if live is None else hidden_NH[rows][live]
        call.weight_gradient.add(columns, tile_nv, hidden_nH)


def _loss_and_slopes(
    token_loss: ChunkLoss,
    surprisal_n: Tensor,
    entropy_n: Tensor,
    rows: slice,
    needs_entropy_grad: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(sum of token losses in fp64, d/d surprisal_n, d/d entropy_n or None)."""
    surprisal_n = surprisal_n.detach().requires_grad_()
    entropy_n = entropy_n.detach().requires_grad_(needs_entropy_grad)
    wanted = (surprisal_n, entropy_n) if needs_entropy_grad else (surprisal_n,)
    with torch.enable_grad():
        loss_n = token_loss(surprisal_n, entropy_n, rows)
        if loss_n.shape != surprisal_n.shape:
            raise ValueError(
                f"token_loss returned shape {tuple(loss_n.shape)} for {tuple(surprisal_n.shape)} "
                "tokens; it must return one loss per token"
            )
        slopes: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if loss_n.requires_grad:
            slopes = torch.autograd.grad(loss_n.sum(), wanted, allow_unused=True)
    grad_surprisal_n = torch.zeros_like(surprisal_n) if slopes[0] is None else slopes[0]
    loss = loss_n.detach().sum(dtype=torch.float64)
    return loss, grad_surprisal_n.detach(), slopes[1] if needs_entropy_grad else None


def _require_one(grad_loss: Tensor) -> None:
    """ValueError: the gradients, main_grad included, are not those of the incoming gradient."""
    if grad_loss.is_cuda:
        close = torch.isclose(grad_loss, torch.ones_like(grad_loss), rtol=1e-6, atol=0.0)
        torch._assert_async(close, "fused_loss: its backward received another gradient than 1")
    elif not math.isclose(float(grad_loss), 1.0, rel_tol=1e-6):
        raise ValueError(
            f"fused_loss: its backward received {float(grad_loss)}; the gradients, main_grad "
            "included, are already made for 1"
        )
