"""TransformerEngine's kernels in torch: each takes the kernel's result and its
arguments as CPU tensors, and writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tools.nullcuda.engine.fp8 import put


def rms_norm(result: Any, x: Tensor, weight: Tensor, eps: float, *rest: Any) -> None:
    """y = x w r with r = rsqrt(mean x^2 + eps); w + 1 where it is centred on zero."""
    out, _, scale_N = result
    rows = x.reshape(-1, x.shape[-1]).float()
    scale_N.copy_((rows.square().mean(-1) + eps).rsqrt())
    normalised = rows * scale_N.unsqueeze(-1) * _weight(weight, rest[-1])
    put(out, normalised.reshape(x.shape))


def rms_norm_backward(
    result: Any,
    grad: Tensor,
    x: Tensor,
    scale_N: Tensor,
    weight: Tensor,
    margin: int,
    centred: bool,
) -> None:
    """dx = r (g - n mean(g n)), dw = sum_rows dy n, with n = x r and g = w dy."""
    dx, dw = result
    rows, slope = (t.reshape(-1, t.shape[-1]).float() for t in (x, grad))
    normalised = rows * scale_N.unsqueeze(-1)
    inner = slope * _weight(weight, centred)
    inner = inner - normalised * (inner * normalised).mean(-1, keepdim=True)
    dx.copy_((scale_N.unsqueeze(-1) * inner).reshape(dx.shape))
    dw.copy_((slope * normalised).sum(0))


def _weight(weight: Tensor, centred: bool) -> Tensor:
    return weight.float() + 1 if centred else weight.float()


def adam(
    result: None,
    chunk: int,
    skip: Tensor,
    tensors: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    corrected: int,
    weight_decay: float,
) -> None:
    """Adam on (grad, parameter, m, v) or (grad, narrow parameter, m, v, master)."""
    first = 1 - beta1**step if corrected else 1.0
    second = 1 - beta2**step if corrected else 1.0
    for grad, parameter, m, v, *master in zip(*tensors, strict=True):
        held = master[0] if master else parameter
        weight, slope = held.float(), grad.float()
        if not decoupled:
            slope = slope + weight_decay * weight
        m.copy_(beta1 * m.float() + (1 - beta1) * slope)
        v.copy_(beta2 * v.float() + (1 - beta2) * slope.square())
        change = (m.float() / first) / ((v.float() / second).sqrt() + eps)
        if decoupled:
            change = change + weight_decay * weight
        held.copy_(weight - lr * change)
        if master:
            parameter.copy_(held)


def scale(result: None, chunk: int, overflow: Tensor, tensors: list[list[Tensor]], by: Any) -> None:
    """out = in * by; `overflow` becomes 1 where something is not finite."""
    for source, target in zip(*tensors, strict=True):
        scaled = source.float() * float(by)
        target.copy_(scaled)
        if not bool(scaled.isfinite().all()):
            overflow.fill_(1)


def l2_norm(
    result: Any, chunk: int, skip: Tensor, tensors: list[list[Tensor]], each: bool | None = False
) -> None:
    """sqrt of the sum of squares, over all tensors, and of each."""
    squares = torch.stack([tensor.float().square().sum() for tensor in tensors[0]])
    result[0].copy_(squares.sum().sqrt().reshape(1))
    if each:
        result[1].copy_(squares.sqrt())


def to_padded(result: Tensor, rows: Tensor, starts: Tensor, *rest: Any) -> None:
    """[T, H, D] to [B, S, H, D]; zero beyond a sequence's end."""
    result.zero_()
    for number, (first, last) in enumerate(_spans(starts)):
        result[number, : last - first] = rows[first:last]


def to_ragged(result: Tensor, padded: Tensor, starts: Tensor, *rest: Any) -> None:
    """[B, S, H, D] to [T, H, D]."""
    result.zero_()
    for number, (first, last) in enumerate(_spans(starts)):
        result[first:last] = padded[number, : last - first]


def _spans(starts: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts.tolist()))


AFTERWARDS: dict[str, Callable[..., None]] = {
    "rmsnorm_fwd": rms_norm,
    "rmsnorm_bwd": rms_norm_backward,
    "convert_thd_to_bshd": to_padded,
    "convert_bshd_to_thd": to_ragged,
    "multi_tensor_adam": adam,
    "multi_tensor_scale": scale,
    "multi_tensor_scale_tensor": scale,
    "multi_tensor_l2norm": l2_norm,
}
