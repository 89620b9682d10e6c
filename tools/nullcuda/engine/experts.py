"""TransformerEngine's kernels for experts on small tensors: the choice of the router, and rows
padded for fp8.

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
    """Softmax: softmax(logits)[chosen], where `before`, or softmax(logits[chosen]). Sigmoid: the
    chosen sigmoids over their sum; the largest, bias added, of the best groups are chosen. Zero
    elsewhere. What is kept for the gradient are the scores, of all or of the chosen.
    """
    if score not in ("softmax", "sigmoid") or packing or indices is not None:
        raise NotImplementedError("the null device's router: softmax or sigmoid, a byte each")
    probability_RE, chosen_RE, kept_RE = result
    logits_RE = logits_RE.float()
    score_RE = logits_RE.sigmoid() if score == "sigmoid" else logits_RE
    ranked_RE = score_RE if bias is None else score_RE + bias.float()
    if groups:
        ranked_RE = _in_best_groups(ranked_RE, groups, group_top_k or 1, top_k)
    top = ranked_RE.topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(chosen_RE).scatter(-1, top, True)
    if score == "sigmoid":
        kept_RE.copy_(score_RE)
        found = score_RE / _sum_of(score_RE, chosen) if top_k > 1 else score_RE
    else:
        hidden = logits_RE.masked_fill(~chosen, float("-inf"))
        found = torch.softmax(logits_RE if before else hidden, dim=-1)
        kept_RE.copy_(found)
    chosen_RE.copy_(chosen)
    probability_RE.copy_(found * chosen * (factor or 1.0))


def _in_best_groups(ranked_RE: Tensor, groups: int, kept: int, top_k: int) -> Tensor:
    """-inf outside of each row's `kept` groups, those of the largest sums of top_k / kept."""
    grouped = ranked_RE.unflatten(-1, (groups, -1))
    sums = grouped.topk(top_k // kept, dim=-1).values.sum(-1)
    best = torch.zeros_like(sums).scatter(-1, sums.topk(kept, dim=-1).indices, 1.0)
    return grouped.masked_fill(best[..., None] == 0, float("-inf")).flatten(-2)


def _sum_of(score_RE: Tensor, chosen_RE: Tensor) -> Tensor:
    return (score_RE * chosen_RE).sum(-1, keepdim=True) + 1e-20


def choose_backward(
    result: None,
    chosen_RE: Tensor,
    kept_RE: Tensor,
    grad_RE: Tensor,
    slope_RE: Tensor,
    top_k: int,
    before: bool,
    factor: float | None,
    score: str,
    *rest: Any,
) -> None:
    """d logits = p (g - sum g p) of a softmax p, with g of the chosen alone. Of sigmoids s with sum
    S: s (1 - s) (g - sum g s / S) / S.
    """
    grad = grad_RE.float() * chosen_RE * (factor or 1.0)
    if score == "softmax":
        slope_RE.copy_(kept_RE * (grad - (grad * kept_RE).sum(-1, keepdim=True)))
        return
    if top_k > 1:
        total = _sum_of(kept_RE, chosen_RE)
        grad = (grad - chosen_RE * (grad * kept_RE).sum(-1, keepdim=True) / total) / total
    slope_RE.copy_(kept_RE * (1 - kept_RE) * grad)


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
