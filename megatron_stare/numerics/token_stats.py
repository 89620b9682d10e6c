"""Surprisal, entropy and entropy sensitivity of every loss token,
from hidden states and one shard of the vocabulary.

For row n with tempered logits x = W h / T, p = softmax(x) and target a:
    surprisal   s = -ln p_a                          entropy   H = -sum_j p_j ln p_j
                [nats]
    collision   c = sum_j p_j^2 (s_j - H)
    variance    Var s = sum_j p_j (s_j - H)^2, so that the s of sampled tokens lie around H by it
    sensitivity g = p_a (s - H) - c                  dH = eta A g for a logit step eta A (e_a - p)
    kept mass   ln of the sum of p_j over p_j >= kappa max p, inf if p_a is below it      [nats]
s and H are differentiable in hidden states and weight, the entropy gradient included; the rest is
not. Sources: STARE, arXiv 2606.19236 (the paper's Phi is -g); Lp-Reg, arXiv 2510.03222 (the
kept mass normalises its proxy distribution).

Two ways, one contract:
    logits     keeps the shard's logits [N, V/TP] in the input dtype and writes the gradient over
               them: three products
    recompute  keeps 12 bytes per token; tiles of logits live in one reused workspace and are
               computed again in the backward pass: four products
Either way the forward does one small all-gather over the vocabulary group per block of rows, the
backward none: it only all-reduces the hidden gradient. Only the rows given are projected. The kept
mass needs the maximum before it can sum, so that `recompute` makes every tile a second time for it
(`logits` reads its own again), with one more all-gather per block.

Shape legend: N rows (loss tokens), n rows of a block, H hidden width (alone: entropy), V rows of
the weight shard, v columns of a tile, F partial sums, K candidates of a nucleus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_stare.numerics import vocab_statistics
from megatron_stare.numerics.vocab_shard import (
    Tiling,
    VocabShard,
    checked_inverse_temperature,
    compute_dtype,
)
from megatron_stare.numerics.vocab_statistics import RowMoments, RowStatistics
from megatron_stare.numerics.weight_gradient import (
    WeightGradient,
    add_vocabulary_sum_,
    compact_rows_,
    live_rows,
)

__all__ = ["TokenStats", "VocabShard", "Way", "nucleus_entropy", "token_stats"]

Way = Literal["logits", "recompute"]
Tiles = Iterable[tuple[slice, Tensor]]  # columns of the shard, and the logits there
WORKSPACE_BYTES = 64 << 20
NUCLEUS_CANDIDATES = 10_000  # leading tokens that are looked at, as in the authors' code


@dataclass(frozen=True)
class TokenStats:
    """Statistics of N tokens, fp32 (fp64 for fp64 input).
    `surprisal_N` and `entropy_N` carry gradients.
    """

    surprisal_N: Tensor
    entropy_N: Tensor
    variance_N: Tensor
    c_N: Tensor | None = None
    log_kept_mass_N: Tensor | None = None

    @property
    def sensitivity_N(self) -> Tensor:
        """g = p (s - H) - c, detached. Needs `collision=True`."""
        if self.c_N is None:
            raise ValueError(
                "the collision terms were not asked for: call token_stats(..., collision=True)"
            )
        surprisal_N, entropy_N = self.surprisal_N.detach(), self.entropy_N.detach()
        return torch.exp(-surprisal_N) * (surprisal_N - entropy_N) - self.c_N


def token_stats(
    hidden_NH: Tensor,
    shard: VocabShard,
    target_N: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    way: Way = "recompute",
    workspace_bytes: int = WORKSPACE_BYTES,
    collision: bool = False,
    kappa: float = 0.0,
    reduce_hidden_grad: bool = True,
) -> TokenStats:
    """Statistics of the tokens `target_N` (global vocabulary
    indices) at the hidden states `hidden_NH`.

    `hidden_NH` is the full hidden state of the loss rows, equal on all ranks of the vocabulary
    group. Its gradient is all-reduced over that group; a sequence-parallel caller whose own
    backward reduce-scatters turns that off with `reduce_hidden_grad=False` and gets this rank's
    partial sum. `temperature` is one number or one per row, constant. The weight's gradient goes
    where `weight_gradient` says (Megatron's fp32 main_grad where there is one). N = 0 is fine.
    `collision` asks for the sensitivity, `kappa` above 0 for the kept mass: both detached.
    Logits are sums in fp32, kept in `shard.logits_dtype`; everything after them is fp32 (fp64 for
    fp64). The matrix products of a gradient take the inputs' dtype.

    Raises ValueError on every rank of the group for the faults that `checked_inverse_temperature`
    lists, and for a `kappa` outside [0, 1]. Where logits are NaN or +inf a token's statistics are
    not finite; the host waits for nothing but the first check.
    """
    if way not in ("logits", "recompute"):
        raise ValueError(f"way must be 'logits' or 'recompute', got {way!r}")
    if not 0.0 <= kappa <= 1.0:
        raise ValueError(f"kappa must lie in [0, 1], got {kappa}")
    inverse_N = checked_inverse_temperature(hidden_NH, shard, target_N, temperature)
    keep = hidden_NH.requires_grad or shard.weight_VH.requires_grad
    call = _StatsCall(
        *(shard, target_N, inverse_N, way, workspace_bytes, collision, kappa, reduce_hidden_grad),
        keep=keep and torch.is_grad_enabled(),
    )
    return TokenStats(*_TokenStats.apply(hidden_NH, shard.weight_VH, call))


@dataclass
class _StatsCall:
    """Everything of one call that is not differentiated;
    after the forward also what the backward needs.
    """

    shard: VocabShard
    target_N: Tensor
    inverse_temperature_N: Tensor | None
    way: Way
    workspace_bytes: int
    collision: bool
    kappa: float
    reduce_hidden_grad: bool
    keep: bool  # what the backward needs
    moments: RowMoments = field(init=False)
    logits_NV: Tensor = field(init=False)
    spent: bool = False

    @property
    def local_target_N(self) -> Tensor:
        """Targets counted from this shard's first row."""
        return self.target_N - self.shard.start

    def inverse_temperature(self, rows: slice | Tensor) -> Tensor | None:
        """1 / temperature of some rows; None where it is 1."""
        return None if self.inverse_temperature_N is None else self.inverse_temperature_N[rows]


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, call: _StatsCall
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        if call.way == "logits" and call.keep:
            blocks = _with_logits(hidden_NH, weight_VH, call)
        else:
            blocks = _with_tiles(hidden_NH, weight_VH, call)
        surprisal_N = _joined(hidden_NH, [block.surprisal_n for block in blocks])
        entropy_N = _joined(hidden_NH, [block.entropy_n for block in blocks])
        constant = [
            _joined(hidden_NH, [getattr(block, name) for block in blocks]) if wanted else None
            for name, wanted in (
                ("variance_n", True),
                ("c_n", call.collision),
                ("log_kept_mass_n", call.kappa > 0),
            )
        ]
        ctx.mark_non_differentiable(*(column for column in constant if column is not None))
        if call.keep:
            call.moments = RowMoments(
                *(
                    _joined(hidden_NH, [block.moments[field] for block in blocks])
                    for field in range(3)
                )
            )
            ctx.save_for_backward(hidden_NH, weight_VH)
            ctx.call = call
        return surprisal_N, entropy_N, *constant

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_surprisal_N: Tensor | None, grad_entropy_N: Tensor | None, *_: Any
    ) -> Any:
        hidden_NH, _saved = ctx.saved_tensors
        call: _StatsCall = ctx.call
        if grad_surprisal_N is None:
            grad_surprisal_N = torch.zeros_like(call.moments.mean_n)
        live = live_rows(grad_surprisal_N, grad_entropy_N)
        grad_hidden_NH, weight_gradient = _backward(
            hidden_NH, call, live, grad_surprisal_N, grad_entropy_N, ctx.needs_input_grad[:2]
        )
        if grad_hidden_NH is not None and call.reduce_hidden_grad:
            call.shard.summed_(grad_hidden_NH)
        return grad_hidden_NH, None if weight_gradient is None else weight_gradient.finish(), None


def _joined(hidden_NH: Tensor, pieces: list[Tensor]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else hidden_NH.new_zeros(0, dtype=compute_dtype(hidden_NH))


def _with_logits(hidden_NH: Tensor, weight_VH: Tensor, call: _StatsCall) -> list[RowStatistics]:
    """Forward of 'logits': one product, kept for the backward."""
    columns = call.shard.real_rows
    logits_NV = hidden_NH.new_empty(hidden_NH.shape[0] * columns, dtype=call.shard.logits_dtype)
    call.logits_NV = tile_of(logits_NV, hidden_NH, weight_VH[:columns])
    tiles = [(slice(0, columns), call.logits_NV)]
    return [_statistics(hidden_NH, call, slice(0, hidden_NH.shape[0]), lambda: tiles)]


def _with_tiles(hidden_NH: Tensor, weight_VH: Tensor, call: _StatsCall) -> list[RowStatistics]:
    """Forward of 'recompute': every tile of logits passes through one workspace."""
    dtype = call.shard.logits_dtype
    tiling = Tiling.blocked(
        hidden_NH.shape[0], call.shard.rows, dtype.itemsize, call.workspace_bytes
    )
    workspace = hidden_NH.new_empty(tiling.row_count * tiling.column_count, dtype=dtype)
    column_blocks = tiling.column_blocks(call.shard.real_rows)
    blocks = []
    for rows in tiling.row_blocks(hidden_NH.shape[0]):

        def tiles(hidden_nH: Tensor = hidden_NH[rows]) -> Tiles:
            for columns in column_blocks:
                yield columns, tile_of(workspace, hidden_nH, weight_VH[columns])

        blocks.append(_statistics(hidden_NH, call, rows, tiles))
    return blocks


def _statistics(
    hidden_NH: Tensor, call: _StatsCall, rows: slice, tiles: Callable[[], Tiles]
) -> RowStatistics:
    """Sum up a block of rows over its tiles of columns, then over all ranks."""
    row_count = rows.stop - rows.start
    partial_nF = vocab_statistics.empty_partials(
        row_count, call.collision, compute_dtype(hidden_NH), hidden_NH.device
    )
    target_n, inverse_n = call.local_target_N[rows], call.inverse_temperature(rows)
    for columns, tile_nv in tiles():
        vocab_statistics.add_tile_(partial_nF, tile_nv, columns.start, target_n, inverse_n)
    found = vocab_statistics.finish(partial_nF, call.shard)
    if not call.kappa:
        return found
    kept_n = torch.zeros_like(found.surprisal_n)
    for _, tile_nv in tiles():
        vocab_statistics.add_kept_(kept_n, tile_nv, inverse_n, found.moments.maximum_n, call.kappa)
    log_kept_mass_n = vocab_statistics.finish_kept(
        kept_n, found.moments, call.shard, found.surprisal_n, call.kappa
    )
    return found._replace(log_kept_mass_n=log_kept_mass_n)


def tile_of(workspace: Tensor, hidden_nH: Tensor, weight_vH: Tensor) -> Tensor:
    """hidden @ weight^T at the start of the workspace, as a contiguous [n, v] view of it. An fp32
    workspace gets the fp32 sums of narrower inputs: on a GPU by its matrix cores, without fp32
    copies of the inputs.
    """
    row_count, column_count = hidden_nH.shape[0], weight_vH.shape[0]
    tile_nv = workspace[: row_count * column_count].view(row_count, column_count)
    if workspace.dtype == hidden_nH.dtype:
        return torch.mm(hidden_nH, weight_vH.t(), out=tile_nv)
    if hidden_nH.is_cuda:
        return torch.mm(hidden_nH, weight_vH.t(), out_dtype=workspace.dtype, out=tile_nv)
    wide = workspace.dtype
    return torch.mm(hidden_nH.to(wide), weight_vH.to(wide).t(), out=tile_nv)


def _backward(
    hidden_NH: Tensor,
    call: _StatsCall,
    live: Tensor | None,
    grad_surprisal_N: Tensor,
    grad_entropy_N: Tensor | None,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, WeightGradient | None]:
    """Over the live rows: the logits, kept or made again, the gradient in their place, then the two
    products.
    """
    weight_VH, columns = call.shard.weight_VH, call.shard.real_rows
    count = hidden_NH.shape[0] if live is None else live.numel()
    tiling, tile_at = _backward_tiles(hidden_NH, call, live, count)
    row_blocks, column_blocks = tiling.row_blocks(count), tiling.column_blocks(columns)
    weight_gradient = WeightGradient(weight_VH, len(row_blocks)) if needed[1] else None
    grad_hidden_NH = torch.empty_like(hidden_NH) if live is None else torch.zeros_like(hidden_NH)
    accumulate_in = compute_dtype(hidden_NH) if len(column_blocks) > 1 else hidden_NH.dtype
    for block in row_blocks:
        rows: slice | Tensor = block if live is None else live[block]
        hidden_nH = hidden_NH[rows]
        direct = live is None and accumulate_in == hidden_NH.dtype
        grad_nH = (
            grad_hidden_NH[rows] if direct else torch.empty_like(hidden_nH, dtype=accumulate_in)
        )
        for position, tile_columns in enumerate(column_blocks):
            tile_nv = tile_at(hidden_nH, tile_columns)
            vocab_statistics.write_gradient_(
                tile_nv,
                tile_columns.start,
                call.local_target_N[rows],
                call.inverse_temperature(rows),
                call.moments.rows(rows),
                grad_surprisal_N[rows],
                None if grad_entropy_N is None else grad_entropy_N[rows],
            )
            tile_nv = tile_nv.to(hidden_NH.dtype)
            if needed[0]:
                add_vocabulary_sum_(
                    grad_nH, tile_nv, weight_VH[tile_columns], beta=float(position > 0)
                )
            if weight_gradient is not None:
                weight_gradient.add(tile_columns, tile_nv, hidden_nH)
        if not column_blocks:
            grad_nH.zero_()
        if not direct:
            grad_hidden_NH[rows] = grad_nH.to(hidden_NH.dtype)
    return grad_hidden_NH if needed[0] else None, weight_gradient


def _backward_tiles(
    hidden_NH: Tensor, call: _StatsCall, live: Tensor | None, count: int
) -> tuple[Tiling, Callable[[Tensor, slice], Tensor]]:
    """The tiles of the `count` live rows, and the logits of one from its hidden states and columns.
    The kept logits are one tile, which the gradient replaces: so this runs once.
    """
    weight_VH = call.shard.weight_VH
    if call.way == "recompute":
        dtype = call.shard.logits_dtype
        tiling = Tiling.blocked(count, call.shard.rows, dtype.itemsize, call.workspace_bytes)
        workspace = hidden_NH.new_empty(tiling.row_count * tiling.column_count, dtype=dtype)
        return tiling, lambda hidden_nH, columns: tile_of(workspace, hidden_nH, weight_VH[columns])
    if call.spent:
        raise RuntimeError(
            "token_stats(way='logits') wrote its gradient over the logits: no second backward"
        )
    call.spent = True
    kept_NV = call.logits_NV if live is None else compact_rows_(call.logits_NV, live)
    del call.logits_NV
    return Tiling(max(1, count), max(1, call.shard.real_rows)), lambda hidden_nH, columns: kept_NV


def nucleus_entropy(logits_NV: Tensor, p: float, with_crossing: bool = False) -> Tensor:
    """Entropy [nats, N] of the softmax over its nucleus alone, renormalised; differentiable.

    The nucleus is the leading tokens whose cumulative probability is under `p`, and with
    `with_crossing` the one that reaches it too. An empty nucleus has entropy 0. arXiv 2509.25133.
    """
    log_NV = torch.log_softmax(logits_NV, dim=-1)
    leading_NK = torch.topk(log_NV, min(NUCLEUS_CANDIDATES, log_NV.shape[-1]), dim=-1).values
    mass_NK = leading_NK.detach().exp()
    before_NK = mass_NK.cumsum(-1) - (mass_NK if with_crossing else 0)
    kept_NK = before_NK < p
    inside_NK = torch.where(kept_NK, leading_NK, -torch.inf)
    # an empty nucleus would have NaN slopes: its first token alone has entropy 0 too
    first_NK = torch.where(kept_NK[:, :1], inside_NK[:, :1], leading_NK[:, :1])
    log_NK = torch.log_softmax(torch.cat([first_NK, inside_NK[:, 1:]], dim=-1), dim=-1)
    finite_NK = torch.where(torch.isfinite(log_NK), log_NK, 0.0)
    return -(log_NK.exp() * finite_NK).sum(-1)
