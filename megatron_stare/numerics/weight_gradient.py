"""Matrix products that accumulate, which rows take part in them, and where the gradient of the
output matrix goes.

Megatron's convention (megatron.core.tensor_parallel.layers and the hook of its
DistributedDataParallel): a weight that carries `main_grad` gets its gradient added there, in
main_grad's precision; if it also carries the flag `grad_added_to_main_grad`, that is set and a
dummy of the weight's shape is returned, which the hook drops. Where the weight is also the
embedding (`zero_out_wgrad`) the hook adds what autograd brings, so the dummy must be zeros. Any
other weight gets an ordinary gradient.

Shape legend: n rows of a tile, v its columns, H hidden width, V rows of the weight shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CONVERT_ELEMENTS = 1 << 20
_SUMMANDS = 4096
_MOVE_BYTES = 4 << 20


def add_product_(out_ab: Tensor, left_an: Tensor, right_nb: Tensor, beta: float) -> None:
    """out = beta * out + left @ right, accumulated in out's precision;
    beta = 0 overwrites whatever was there.
    """
    if left_an.shape[1] == 0 or left_an.shape[0] == 0:
        if beta == 0:
            out_ab.zero_()
        return
    if out_ab.dtype == left_an.dtype:
        out_ab.addmm_(left_an, right_nb, beta=beta)
    elif out_ab.is_cuda:
        torch.addmm(out_ab, left_an, right_nb, out_dtype=out_ab.dtype, beta=beta, out=out_ab)
    else:
        right_nb = right_nb.to(out_ab.dtype)
        for rows in torch.arange(left_an.shape[0]).split(
            max(1, _CONVERT_ELEMENTS // left_an.shape[1])
        ):
            block = slice(int(rows[0]), int(rows[-1]) + 1)
            out_ab[block].addmm_(left_an[block].to(out_ab.dtype), right_nb, beta=beta)


def add_vocabulary_sum_(out_nH: Tensor, tile_nv: Tensor, weight_vH: Tensor, beta: float) -> None:
    """out = beta * out + tile @ weight for beta 0 or 1:
    the hidden gradient, whose sums run over the vocabulary.

    For few rows a CPU's BLAS may add 150,000 terms one after the other, and in fp32 the target's
    large term then swallows the small ones (5e-5 of error was seen). So there the terms are summed
    in blocks of 4096.
    """
    if out_nH.is_cuda or out_nH.dtype != torch.float32:
        return add_product_(out_nH, tile_nv, weight_vH, beta)
    if beta == 0:
        out_nH.zero_()
    for tile_columns, weight_rows in zip(
        tile_nv.split(_SUMMANDS, 1), weight_vH.split(_SUMMANDS), strict=True
    ):
        out_nH.add_(torch.mm(tile_columns.to(out_nH.dtype), weight_rows.to(out_nH.dtype)))
    return None


def live_rows(grad_surprisal_n: Tensor, grad_entropy_n: Tensor | None) -> Tensor | None:
    """The rows whose gradient is not exactly zero, ascending; None for all of them.

    None on a device always: their number decides shapes, and the host would wait for it. A row of
    zeros adds zeros.
    """
    if grad_surprisal_n.is_cuda:
        return None
    live_n = grad_surprisal_n != 0
    if grad_entropy_n is not None:
        live_n |= grad_entropy_n != 0
    live = live_n.nonzero().squeeze(1)
    return None if live.numel() == live_n.numel() else live


def compact_rows_(tile_nv: Tensor, live: Tensor) -> Tensor:
    """Move the rows `live` (ascending) to the top of the tile, 4 MiB at a time, and return them."""
    block_rows = max(1, _MOVE_BYTES // max(1, tile_nv.shape[1] * tile_nv.element_size()))
    for first in range(0, live.numel(), block_rows):
        source = live[first : first + block_rows]
        tile_nv[first : first + source.numel()] = tile_nv[source]
    return tile_nv[: live.numel()]


class WeightGradient:
    """The gradient of one weight shard [V, H] during one pass over the logits;
    finish it exactly once.

    `row_blocks` is how often every element will be added to: with more than once, a narrow weight
    without main_grad accumulates in a separate fp32 tensor and is rounded at the end.
    """

    def __init__(self, weight_VH: Tensor, row_blocks: int) -> None:
        self.weight_VH = weight_VH
        own = hasattr(weight_VH, "__fsdp_param__")
        main_grad: Tensor | None = None if own else getattr(weight_VH, "main_grad", None)
        self.direct = main_grad is not None
        if main_grad is None:
            wide = weight_VH.dtype.itemsize < 4 and row_blocks > 1
            dtype = torch.float32 if wide else weight_VH.dtype
            main_grad = torch.empty(weight_VH.shape, dtype=dtype, device=weight_VH.device)
        self.sum_VH = main_grad
        self.written = 0

    def add(self, columns: slice, gradient_nv: Tensor, hidden_nH: Tensor) -> None:
        """Add gradient^T hidden to the rows `columns`;
        within one pass over the rows, columns come in order.
        """
        fresh = not self.direct and columns.stop > self.written
        add_product_(self.sum_VH[columns], gradient_nv.t(), hidden_nH, beta=0.0 if fresh else 1.0)
        self.written = max(self.written, columns.stop)

    def finish(self) -> Tensor | None:
        """The value that a backward returns for the weight: its gradient, or Megatron's dummy."""
        weight_VH = self.weight_VH
        if not self.direct:
            self.sum_VH[self.written :].zero_()
            return self.sum_VH.to(weight_VH.dtype)
        if not hasattr(weight_VH, "grad_added_to_main_grad"):
            return None
        weight_VH.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight_VH, "zero_out_wgrad", False) else torch.empty_like
        return make(weight_VH, requires_grad=False)
