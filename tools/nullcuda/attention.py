"""Attention in plain arithmetic, for CUDA's fused kernels.

    S = scale q k^T (+ bias, masked)    P = softmax S    out = P v    lse = ln sum exp S
    dv = P^T do    dP = do v^T    dS = P (dP - sum_j dP P)    dq = scale dS k    dk = scale dS^T q

Shape legend: N query rows, U key rows, H query heads, G key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def forward(
    q_HND: Tensor, k_GUD: Tensor, v_GUD: Tensor, scale: float, mask_NU: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp in fp32); `mask` is True where a query does not see a key."""
    probability, lse_HN = _probabilities(q_HND, k_GUD, scale, mask_NU)
    values = _repeated(v_GUD, q_HND.shape[0]).double()
    return (probability @ values).to(q_HND.dtype), lse_HN.float()


def backward(
    grad_HND: Tensor,
    q_HND: Tensor,
    k_GUD: Tensor,
    v_GUD: Tensor,
    scale: float,
    mask_NU: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    heads, shared = q_HND.shape[0], k_GUD.shape[0]
    probability, _ = _probabilities(q_HND, k_GUD, scale, mask_NU)
    grad = grad_HND.double()
    slope = grad @ _repeated(v_GUD, heads).double().transpose(1, 2)
    slope = probability * (slope - (slope * probability).sum(-1, keepdim=True)) * scale
    dq = slope @ _repeated(k_GUD, heads).double()
    dk = slope.transpose(1, 2) @ q_HND.double()
    dv = probability.transpose(1, 2) @ grad
    dk, dv = (x.unflatten(0, (shared, -1)).sum(1) for x in (dk, dv))
    return dq.to(q_HND.dtype), dk.to(k_GUD.dtype), dv.to(v_GUD.dtype)


def causal_mask(queries: int, keys: int, *, bottom_right: bool) -> Tensor:
    """True where query i does not see key j: j > i, or, aligned bottom-right,
    j > i + keys - queries.
    """
    shift = keys - queries if bottom_right else 0
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + shift)


def _repeated(x_GUD: Tensor, heads: int) -> Tensor:
    return x_GUD.repeat_interleave(heads // x_GUD.shape[0], 0)


def _probabilities(
    q_HND: Tensor, k_GUD: Tensor, scale: float, mask_NU: Tensor | None
) -> tuple[Tensor, Tensor]:
    keys = _repeated(k_GUD, q_HND.shape[0]).double()
    score = q_HND.double() @ keys.transpose(1, 2) * scale
    if mask_NU is not None:
        score = score.masked_fill(mask_NU, float("-inf"))
    lse = score.logsumexp(-1)
    floor = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))  # a query that sees nothing
    return (score - floor.unsqueeze(-1)).exp(), lse


# ---- torch's kernels over ragged spans --------------------------------------------------------


def spans(starts_q: Tensor, starts_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and keys of each span, from their cumulative lengths."""
    q, k = starts_q.tolist(), starts_k.tolist()
    for row, end, key, last in zip(q, q[1:], k, k[1:], strict=False):
        yield slice(row, end), slice(key, last)


def ragged_forward(q: Tensor, k: Tensor, v: Tensor, starts: Any, causal: bool, scale: float) -> Any:
    """q [N, H, D], k and v [U, G, D] -> out [N, H, D], lse [H, N]."""
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for rows, keys in spans(*starts):
        mask = _span_mask(rows, keys) if causal else None
        heads = (x.transpose(0, 1) for x in (q[rows], k[keys], v[keys]))
        part, lse[:, rows] = forward(*heads, scale, mask)
        out[rows] = part.transpose(0, 1)
    return out, lse


def ragged_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Any, causal: bool, scale: float
) -> Any:
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for rows, keys in spans(*starts):
        mask = _span_mask(rows, keys) if causal else None
        heads = (x.transpose(0, 1) for x in (grad[rows], q[rows], k[keys], v[keys]))
        parts = backward(*heads, scale, mask)
        for total, place, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
            total[place] += part.transpose(0, 1)
    return dq, dk, dv


def _span_mask(rows: slice, keys: slice) -> Tensor:
    return causal_mask(rows.stop - rows.start, keys.stop - keys.start, bottom_right=True)


def _flash(q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, causal, debug, *, scale):
    _require(dropout == 0 and q.shape[-1] % 8 == 0, "flash attention: no dropout, widths of 8")
    _require(int(starts_q.diff().max()) <= longest_q, "flash attention: the longest query span")
    return ragged_forward(q, k, v, (starts_q, starts_k), causal, scale)


def _flash_backward(
    grad, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, dropout, causal, *rest, scale
):
    return ragged_backward(grad, q, k, v, (starts_q, starts_k), causal, scale)


def _efficient(
    q, k, v, bias, starts_q, starts_k, longest_q, longest_k, dropout, kind, keep, *, scale
):
    _require(bias is None and kind in (0, 2), "memory-efficient attention: no bias, bottom-right")
    out, _ = ragged_forward(q[0], k[0], v[0], (starts_q, starts_k), kind == 2, scale)
    return (out.unsqueeze(0),)


def _efficient_backward(
    grad, q, k, v, bias, out, starts_q, starts_k, longest_q, longest_k, *rest, scale
):
    kind = rest[-2]
    rows = (x[0] for x in (grad, q, k, v))
    found = ragged_backward(*rows, (starts_q, starts_k), kind == 2, scale)
    return tuple(x.unsqueeze(0) for x in found)


# ---- torch's kernels over padded batches, [B, H, N, D] ----------------------------------------


def _dense(q, k, v, bias, causal, scale):
    return torch.nn.functional.scaled_dot_product_attention(
        q.float(),
        k.float(),
        v.float(),
        attn_mask=None if bias is None else bias.float(),
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    ).to(q.dtype)


def _dense_efficient(q, k, v, bias, keep, dropout=0.0, is_causal=False, *, scale=None):
    return (_dense(q, k, v, bias, is_causal, scale),)


def _dense_flash(q, k, v, dropout=0.0, is_causal=False, debug=False, *, scale=None):
    return (_dense(q, k, v, None, is_causal, scale),)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise NotImplementedError(what)


OPERATORS = {
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
    "_efficient_attention_forward": _efficient,
    "_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_efficient_attention": _dense_efficient,
    "_scaled_dot_product_flash_attention": _dense_flash,
}
