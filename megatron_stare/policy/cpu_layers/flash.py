"""Exact causal attention over ragged spans by torch's fused kernels:
out and log-sum-exp, never a score matrix.

A *span* is a run of queries that are the last ones of a run of keys: query i of Q sees keys 0 .. K
- Q + i of its own K (the causal mask aligned bottom-right). The first K - Q keys, its prefix, may
lie apart from the others. Padded batches, packed sequences, responses to one prompt and the zigzag
chunks of context parallelism are all lists of spans, so one forward and one backward serve them.

    lse_i = ln sum_j exp(scale q_i k_j)     out_i = sum_j exp(scale q_i k_j - lse_i) v_j
    D_i = <dout_i, out_i>    dS_ij = P_ij (<dout_i, v_j> - D_i)
    dq = scale dS k    dk = scale dS^T q    dv = P^T dout

The backward needs the final out and lse only, so the keys may be handed to it in any parts
(FlashAttention, arXiv 2205.14135, sections 3.1 and B.4; blockwise over devices: ring attention,
arXiv 2310.01889).

CPU: spans of one shape run as one call; their prefixes, which need no mask, are further calls, and
the results are merged by log-sum-exp. CUDA: one varlen call for everything, whose causal mask is
bottom-right already: FlashAttention-2 in half precision, the memory-efficient kernel in fp32. The
tests marked `gpu` in tests/policy/cpu_layers/test_attention.py check the CUDA functions.

Shape legend: N query rows, U key rows, H query heads, G key-value heads (G divides H), D head
width; in one call n spans of L rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_stare.numerics.vocab_shard import compute_dtype
from megatron_stare.policy.cpu_layers.spans import Bundle, Spans

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_BOTTOM_RIGHT = 2  # custom_mask_type of aten._efficient_attention_forward
_SHORT = 256  # queries or keys of a call whose half-precision backward runs in fp32 on a CPU
_FLASH_WIDTH = 8  # FlashAttention's head widths are multiples of this


# q_NHD, k_UGD and v_UGD, or their gradients.
Qkv = tuple[Tensor, ...]


def attend(qkv: Qkv, spans: Spans, scale: float) -> tuple[Tensor, ...]:
    """(out_NHD, *state): attention of every span,
    and what `attend_backward` needs besides (the log-sum-exp).

    Every query row belongs to one span; a key row to any number of prefixes, and to at most one
    span besides. Widths and dtypes of q, k and v agree.
    """
    q_NHD = qkv[0]
    if not spans.spans:
        return torch.zeros_like(q_NHD), q_NHD.new_zeros(q_NHD.shape[:2])
    return (_cuda_forward if q_NHD.is_cuda else _cpu_forward)(qkv, spans, scale)


def attend_backward(
    grad_NHD: Tensor,
    qkv: Qkv,
    out_NHD: Tensor,
    state: Sequence[Tensor],
    spans: Spans,
    scale: float,
) -> Qkv:
    """Gradients of q, k and v from that of out."""
    if not spans.spans:
        return tuple(map(torch.zeros_like, qkv))
    backward = _cuda_backward if grad_NHD.is_cuda else _cpu_backward
    return backward(grad_NHD.contiguous(), qkv, out_NHD, state, spans, scale)


def _cpu_forward(qkv: Qkv, spans: Spans, scale: float) -> tuple[Tensor, ...]:
    q_NHD = qkv[0]
    out_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
    lse_NH = q_NHD.new_empty(q_NHD.shape[:2], dtype=compute_dtype(q_NHD))
    for bundle in spans.squares:
        out, lse = _cpu_call(_read(bundle, qkv), True, scale)
        bundle.queries.write(out_NHD, out)
        bundle.queries.write(lse_NH, lse)
    for bundle in spans.prefixes:
        others = _cpu_call(_read(bundle, qkv), False, scale)
        own = (bundle.queries.read(out_NHD), bundle.queries.read(lse_NH))
        out, lse = _merged(*own, *others)
        bundle.queries.write(out_NHD, out)
        bundle.queries.write(lse_NH, lse)
    return out_NHD, lse_NH


def _read(bundle: Bundle, qkv: Qkv) -> Qkv:
    q_NHD, k_UGD, v_UGD = qkv
    return bundle.queries.read(q_NHD), bundle.keys.read(k_UGD), bundle.keys.read(v_UGD)


def _cpu_call(qkv: Qkv, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out_nLHD, lse_nLH) of [n, L, ...]. The kernel takes strided views and
    fewer key-value heads than query heads.
    """
    heads_first = (x.transpose(1, 2) for x in qkv)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, 0.0, causal, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def _merged(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys:
    lse = ln(e^a + e^b), out weighted by e^(a - lse).
    """
    both = torch.logaddexp(lse, other_lse)
    mine, others = ((part - both).exp().unsqueeze(-1) for part in (lse, other_lse))
    return (out * mine + other_out * others).to(out.dtype), both


def _cpu_backward(
    grad_NHD: Tensor,
    qkv: Qkv,
    out_NHD: Tensor,
    state: Sequence[Tensor],
    spans: Spans,
    scale: float,
) -> Qkv:
    def gradients(bundle: Bundle, causal: bool) -> Qkv:
        results = [bundle.queries.read(x) for x in (grad_NHD, out_NHD, state[0])]
        return _cpu_call_backward(results, _read(bundle, qkv), causal, scale)

    q_NHD, k_UGD, v_UGD = qkv
    empty = torch.zeros_like if spans.prefixes else torch.empty_like  # squares write every key row
    dq_NHD, dk_UGD, dv_UGD = torch.empty_like(q_NHD), empty(k_UGD), empty(v_UGD)
    for bundle in spans.squares:
        dq, dk, dv = gradients(bundle, causal=True)
        bundle.queries.write(dq_NHD, dq)
        bundle.keys.write(dk_UGD, dk)
        bundle.keys.write(dv_UGD, dv)
    for bundle in spans.prefixes:
        dq, dk, dv = gradients(bundle, causal=False)
        bundle.queries.add(dq_NHD, dq)
        bundle.keys.add(dk_UGD, dk)
        bundle.keys.add(dv_UGD, dv)
    return dq_NHD, dk_UGD, dv_UGD


def _cpu_call_backward(results: list[Tensor], qkv: Qkv, causal: bool, scale: float) -> Qkv:
    """Gradients of q, k, v [n, L, ...]. `results`: the output's gradient, output, log-sum-exp."""
    q_nLHD, k_nLGD, _ = qkv
    dtype = k_nLGD.dtype
    # torch's kernel needs two to six times as long in bf16 for so few rows, and less for 1024
    few = min(q_nLHD.shape[1], k_nLGD.shape[1]) <= _SHORT
    wide = torch.float32 if dtype in _HALF and few else dtype
    grad, out, q, k, v = (x.to(wide).transpose(1, 2) for x in (*results[:2], *qkv))
    lse = results[2].transpose(1, 2)
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    return tuple(x.transpose(1, 2).to(dtype) for x in gradients)


def _cuda_forward(qkv: Qkv, spans: Spans, scale: float) -> tuple[Tensor, ...]:
    ragged = spans.ragged
    q, k, v = map(_gathered, qkv, ragged.indices)
    if q.dtype in _HALF:
        out, lse, rng, unused, _ = _aten._flash_attention_forward(
            q, k, v, *ragged.runs, 0.0, True, False, scale=scale
        )
        return _scattered(out, ragged.indices[0], qkv[0]), lse, rng, unused
    k, v = (_expanded(x, q.shape[1]) for x in (k, v))
    batch_of_one = (x.unsqueeze(0) for x in (q, k, v))
    out, lse, seed, offset, _, _ = _aten._efficient_attention_forward(
        *batch_of_one, None, *ragged.runs, 0.0, _BOTTOM_RIGHT, True, scale=scale
    )
    return _scattered(out.squeeze(0), ragged.indices[0], qkv[0]), lse, seed, offset


def _cuda_backward(
    grad_NHD: Tensor,
    qkv: Qkv,
    out_NHD: Tensor,
    state: Sequence[Tensor],
    spans: Spans,
    scale: float,
) -> Qkv:
    ragged = spans.ragged
    grad, out = (_gathered(x, ragged.indices[0]) for x in (grad_NHD, out_NHD))
    q, k, v = map(_gathered, qkv, ragged.indices)
    lse, seed, offset = state
    if q.dtype in _HALF:
        dq, dk, dv = _aten._flash_attention_backward(
            grad, q, k, v, out, lse, *ragged.runs, 0.0, True, seed, offset, scale=scale
        )
    else:
        k, v = (_expanded(x, q.shape[1]) for x in (k, v))
        grad, *qkv1, out = (x.unsqueeze(0) for x in (grad, q, k, v, out))
        rest = (lse, 0.0, seed, offset, _BOTTOM_RIGHT, False)
        dq, dk, dv, _ = _aten._efficient_attention_backward(
            grad, *qkv1, None, out, *ragged.runs, *rest, scale=scale
        )
        dq = dq.squeeze(0)
        dk, dv = (x.squeeze(0).unflatten(1, (qkv[1].shape[1], -1)).sum(2) for x in (dk, dv))
    return tuple(map(_scattered, (dq, dk, dv), ragged.indices, qkv))


def _gathered(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows in the order of the index, contiguous, the width padded to what FlashAttention takes."""
    x = x.contiguous() if index is None else x.index_select(0, index)
    spare = -x.shape[-1] % _FLASH_WIDTH
    return nn.functional.pad(x, (0, spare)) if spare else x


def _scattered(values: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    """The inverse of `_gathered`; rows that the index names twice are added,
    rows that it does not name are zero.
    """
    values = values[..., : like.shape[-1]]
    if index is None:
        return values.contiguous()
    return torch.zeros_like(like).index_add_(0, index, values)


def _expanded(x_UGD: Tensor, heads: int) -> Tensor:
    """Every key-value head repeated for its group of query heads, for kernels that want as many."""
    return x_UGD.repeat_interleave(heads // x_UGD.shape[1], dim=1)
