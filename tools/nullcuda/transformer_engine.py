"""True values for TransformerEngine's kernels on small tensors, and its attention.

Its bindings run in full: checks, allocations, launches. Then the functions below compute what the
kernels did not. cuBLASLt's products are computed by the device itself. cuDNN is not answered: the
fused attention is asked of nobody, and its results have the right shapes and values. A quantised
tensor has no values.
"""

from __future__ import annotations

import collections
import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tools.nullcuda import attention
from tools.nullcuda.memory import alias, aliases, is_small, on_device
from tools.nullcuda.values import not_computed, tensors_of

# (which way, layout, mask) -> how often cuDNN's attention would have run
attention_calls: collections.Counter[tuple[str, str, str]] = collections.Counter()
# Products, which the device computes; what makes tensors without values of their own.
COMPUTED_BELOW = {"generic_gemm", "te_general_grouped_gemm", "bulk_allocate"}


def install(module: ModuleType) -> None:
    """Around `transformer_engine.common`, which loads the bindings."""
    load = module.load_framework_extension

    @functools.wraps(load)
    def load_framework_extension(framework: str) -> None:
        load(framework)
        if framework == "torch":
            _prepare(sys.modules["transformer_engine_torch"])

    module.load_framework_extension = load_framework_extension


def _prepare(bindings: ModuleType) -> None:
    kernels = importlib.import_module("tools.nullcuda.transformer_engine_kernels")
    rotation = importlib.import_module("tools.nullcuda.transformer_engine_rotation")
    afterwards = kernels.AFTERWARDS | rotation.AFTERWARDS
    for name, kernel in vars(bindings).copy().items():
        if name in afterwards:
            setattr(bindings, name, _then(name, kernel, afterwards[name]))
        elif type(kernel).__name__ == "builtin_function_or_method" and name not in COMPUTED_BELOW:
            setattr(bindings, name, _zeroed(name, kernel))
    kinds, wide = bindings.NVTE_Fused_Attn_Backend, bindings.DType.kFloat32

    def backend(params: Any) -> tuple[Any, str]:
        if params.qkv_dtype == wide:
            return kinds.NVTE_No_Backend, "the null device: cuDNN's attention is of 16 bits"
        return kinds.NVTE_F16_arbitrary_seqlen, ""

    bindings.get_fused_attn_backend = backend
    bindings.fused_attn_fwd = _attention_forward
    bindings.fused_attn_bwd = _attention_backward


def _zeroed(name: str, kernel: Callable[..., Any]) -> Any:
    """A kernel whose values nobody computes: its new small tensors are zero."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        _zero(name, result, (args, kwargs))
        return result

    return run


def _zero(name: str, result: Any, given: Any) -> None:
    """Write zeros to the small tensors of a result that were not given to the kernel."""
    known = {id(tensor) for tensor in tensors_of(given)}
    fresh = [x for x in tensors_of(result) if id(x) not in known and on_device(x)]
    if fresh:
        not_computed[name, "no values: zero"] += 1
    for tensor in fresh:
        if type(tensor) is Tensor and tensor.numel() and is_small(tensor):
            alias(tensor).zero_()


def _is_quantised(values: Any) -> bool:
    """Whether a quantised tensor, or what makes one, is among them; some are no torch.Tensor."""
    kinds = {type(leaf).__module__ for leaf in tree_leaves(values)}
    return any(kind.startswith("transformer_engine.pytorch.tensor") for kind in kinds)


def _then(name: str, kernel: Callable[..., Any], compute: Callable[..., None]) -> Any:
    """`kernel`, then `compute(result, *args)` on aliases of its small tensors."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        tensors = tensors_of((result, args, kwargs))
        plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
        if plain and not _is_quantised((result, args, kwargs)):
            if is_small(*tensors):
                with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                    compute(aliases(result), *aliases(args), **aliases(kwargs))
                return result
        else:
            not_computed[name, "a quantised tensor"] += 1
            _zero(name, result, (args, kwargs))
        return result

    return run


# ---- cuDNN's attention ------------------------------------------------------------------------
# Arguments by position, as transformer_engine/pytorch/cpp_extensions/fused_attn.py passes them.


def _attention_forward(*args: Any) -> list[Any]:
    scale, layout, mask = args[3], args[6], args[10]
    bottom_right, (starts_q, starts_k, q, k, v) = args[13], args[14:19]
    padded_q, padded_k = args[20:22]
    attention_calls["forward", _name(layout), _name(mask)] += 1
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
    attention_calls["backward", _name(layout), _name(mask)] += 1
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
