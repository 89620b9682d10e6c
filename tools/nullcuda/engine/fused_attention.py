"""cuDNN's attention, which nothing else answers: not computed, its results have the right shapes
and, of small tensors, the right values. Arguments are taken by position, as
transformer_engine/pytorch/cpp_extensions/fused_attn.py passes them.
"""

from __future__ import annotations

import collections
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tools.nullcuda import attention
from tools.nullcuda.memory import alias, is_small

# (which way, layout, mask) -> how often it would have run
calls: collections.Counter[tuple[str, str, str]] = collections.Counter()


def prepare(bindings: ModuleType) -> None:
    """Around what TransformerEngine asks of cuDNN."""
    kinds, wide = bindings.NVTE_Fused_Attn_Backend, bindings.DType.kFloat32

    def backend(params: Any) -> tuple[Any, str]:
        if params.qkv_dtype == wide:
            return kinds.NVTE_No_Backend, "the null device: cuDNN's attention is of 16 bits"
        return kinds.NVTE_F16_arbitrary_seqlen, ""

    bindings.get_fused_attn_backend = backend
    bindings.fused_attn_fwd = _attention_forward
    bindings.fused_attn_bwd = _attention_backward


def _attention_forward(*args: Any) -> list[Any]:
    scale, layout, mask = args[3], args[6], args[10]
    bottom_right, (starts_q, starts_k, q, k, v) = args[13], args[14:19]
    padded_q, padded_k = args[20:22]
    calls["forward", _name(layout), _name(mask)] += 1
    q, k, v = (_plain(x) for x in (q, k, v))
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    ragged = q.dim() == 3
    rows = q.shape[0] if ragged else q.shape[0] * q.shape[1]
    state = torch.zeros((rows, q.shape[-2], 1), dtype=torch.float32, device=q.device)
    if is_small(q, k, v):
        with torch.utils._python_dispatch._disable_current_modes():
            for place, keys, seen in _sequences(
                layout, q, k, starts_q, starts_k, padded_q, padded_k, mask, bottom_right
            ):
                heads = (_heads(alias(x), at) for x, at in ((q, place), (k, keys), (v, keys)))
                part, _ = attention.forward(*heads, scale, seen)
                _rows(alias(out), place).copy_(part.transpose(0, 1))
    return [out, state, torch.zeros(2, dtype=torch.int64, device=q.device)]


def _attention_backward(*args: Any) -> list[Any]:
    scale, layout, mask = args[2], args[5], args[12]
    bottom_right, (starts_q, starts_k, q, k, v, _, grad) = args[15], args[17:24]
    padded_q, padded_k = args[26:28]
    calls["backward", _name(layout), _name(mask)] += 1
    q, k, v, grad = (_plain(x) for x in (q, k, v, grad))
    found = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    if is_small(q, k, v):
        with torch.utils._python_dispatch._disable_current_modes():
            for place, keys, seen in _sequences(
                layout, q, k, starts_q, starts_k, padded_q, padded_k, mask, bottom_right
            ):
                places = ((grad, place), (q, place), (k, keys), (v, keys))
                heads = (_heads(alias(x), at) for x, at in places)
                parts = attention.backward(*heads, scale, seen)
                for total, at, part in zip(found, (place, keys, keys), parts, strict=True):
                    _rows(alias(total), at).copy_(part.transpose(0, 1))
    return [*found, None, None]


def _name(value: Any) -> str:
    return getattr(value, "name", str(value))


def _plain(tensor: Any) -> Tensor:
    return tensor if type(tensor) in (Tensor, torch.nn.Parameter) else tensor.dequantize()


def _sequences(
    layout: Any,
    q: Tensor,
    k: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    padded_q: Tensor | None,
    padded_k: Tensor | None,
    mask: Any,
    bottom_right: bool,
) -> Any:
    """(rows, keys, mask) of each sequence; a place is (axis of the batch, its index, slice)."""
    causal = "CAUSAL" in _name(mask)
    aligned = "BOTTOM_RIGHT" in _name(mask) or bool(bottom_right)
    lengths = zip(_lengths(starts_q), _lengths(starts_k), strict=True)
    for number, (queries, keys) in enumerate(lengths):
        if q.dim() == 3:
            first_q = int(alias(starts_q if padded_q is None else padded_q)[number])
            first_k = int(alias(starts_k if padded_k is None else padded_k)[number])
            rows = (None, number, slice(first_q, first_q + queries))
            columns = (None, number, slice(first_k, first_k + keys))
        else:
            axis = 1 if _name(layout).upper().startswith(("NVTE_SB", "SB")) else 0
            rows = (axis, number, slice(0, queries))
            columns = (axis, number, slice(0, keys))
        seen = attention.causal_mask(queries, keys, bottom_right=aligned) if causal else None
        yield rows, columns, seen


def _lengths(starts: Tensor) -> list[int]:
    return alias(starts).diff().tolist()


def _rows(x: Tensor, place: Any) -> Tensor:
    axis, number, rows = place
    return (x if axis is None else x.select(axis, number))[rows]


def _heads(x: Tensor, place: Any) -> Tensor:
    return _rows(x, place).transpose(0, 1)
