"""Operators for which the CPU has no kernel of that name, or one with fewer options.

A function takes the arguments of the operator, as CPU tensors, and returns its results in order;
one whose shape differs from the operator's is left out (what a kernel keeps for its backward).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tools.nullcuda import attention


def _softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.softmax(values.float() if half_to_float else values, dim)


def _log_softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.log_softmax(values.float() if half_to_float else values, dim)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Any:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    dims = tuple(range(-len(shape), 0))
    scale = (x.float().square().mean(dims, keepdim=True) + eps).rsqrt()
    out = x.float() * scale
    return (out if weight is None else out * weight.float()).to(x.dtype), scale


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Tensor | None, mask: Any
) -> Any:
    """y = w x r, r = rsqrt(mean x^2 + eps): dx = r g - x r^3 mean(g x) with g = w dy."""
    dims = tuple(range(-len(shape), 0))
    scale = scale.float().reshape(*x.shape[: -len(shape)], *[1] * len(shape))
    normalised = x.float() * scale
    slope = grad.float() if weight is None else grad.float() * weight.float()
    dx = scale * (slope - normalised * (slope * normalised).mean(dims, keepdim=True))
    if weight is None:
        return dx.to(x.dtype), None
    dw = (grad.float() * normalised).reshape(-1, *shape).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


def _product(left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Any = None) -> Tensor:
    result = (left.float() @ right.float()).to(out_dtype)
    return result if out is None else out.copy_(result)


def _sum_of_product(
    start: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Any = None,
) -> Tensor:
    total = alpha * (left.float() @ right.float())
    total = total + beta * start.float() if beta else total
    return total.to(out_dtype) if out is None else out.copy_(total)


def _histogram(values: Tensor, bins: int = 100, low: Any = 0, high: Any = 0) -> Tensor:
    """The CPU has it for floating-point numbers only."""
    return torch.histc(values.double(), bins, low, high).to(values.dtype)


OPERATORS: dict[str, Callable[..., Any]] = {
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "histc": _histogram,
    "mm.dtype": _product,
    "mm.dtype_out": _product,
    "bmm.dtype": _product,
    "bmm.dtype_out": _product,
    "addmm.dtype": _sum_of_product,
    "addmm.dtype_out": _sum_of_product,
    **attention.OPERATORS,
}
