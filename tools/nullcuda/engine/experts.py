"""What TransformerEngine's kernels for experts do to small tensors: whom the router chooses, and
rows padded to what fp8 multiplies.

Shape legend: R rows (tokens), E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def choose(
    result: Any,
    logits_RE: Tensor,
    top_k: int,
    before: bool,
    groups: int | None,
    group_top_k: int | None,
    factor: float | None,
    score: str,
    bias: Tensor | None,
    packing: int,
    indices: Tensor | None,
) -> None:
    """softmax(logits)[chosen], where `before`, or softmax(logits[chosen]); zero elsewhere. What is
    kept for the gradient are the probabilities, of all or of the chosen.
    """
    if score != "softmax" or groups or bias is not None or packing or indices is not None:
        raise NotImplementedError("the null device's router: softmax over all experts, a byte each")
    probability_RE, chosen_RE, kept_RE = result
    top = logits_RE.float().topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(chosen_RE).scatter(-1, top, True)
    hidden = logits_RE.float().masked_fill(~chosen, float("-inf"))
    found = torch.softmax(logits_RE.float() if before else hidden, dim=-1)
    chosen_RE.copy_(chosen)
    kept_RE.copy_(found)
    probability_RE.copy_(found * chosen * (factor or 1.0))


def choose_backward(
    result: None,
    chosen_RE: Tensor,
    kept_RE: Tensor,
    grad_RE: Tensor,
    slope_RE: Tensor,
    top_k: int,
    before: bool,
    factor: float | None,
    *rest: Any,
) -> None:
    """d logits = p (g - sum g p), with g of the chosen alone."""
    grad = grad_RE.float() * chosen_RE * (factor or 1.0)
    slope_RE.copy_(kept_RE * (grad - (grad * kept_RE).sum(-1, keepdim=True)))


def pad(result: None, rows: Tensor, out: Tensor, counts: list[int], padded: list[int]) -> None:
    """Each expert's rows, then zeros up to its padded count."""
    out.zero_()
    for part, place in zip(rows.split(counts), out.split(padded), strict=True):
        place[: len(part)] = part


def unpad(result: None, rows: Tensor, out: Tensor, padded: list[int], counts: list[int]) -> None:
    """The rows without what was padded."""
    for part, place in zip(rows.split(padded), out.split(counts), strict=True):
        place.copy_(part[: len(place)])


AFTERWARDS: dict[str, Callable[..., None]] = {
    "fused_topk_with_score_function_fwd": choose,
    "fused_topk_with_score_function_bwd": choose_backward,
    "fused_multi_row_padding": pad,
    "fused_multi_row_unpadding": unpad,
}
