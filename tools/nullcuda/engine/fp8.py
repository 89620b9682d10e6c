"""Values of TransformerEngine's fp8 tensors: numbers really rounded to E4M3 or E5M2, under the
scales of their recipe.

    data = round(x s)    x ~ data / s    s = F / max|x|, F the largest number of the format

`s` is one of a tensor, of the steps before (delayed) or of this tensor (current, tensorwise), or
one of each 128 numbers of a row, for weights of each 128 x 128 (blockwise). Next to the rows a
tensor may hold itself transposed, which for 128 in a row is rounded under other scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.nullcuda.memory import alias

BLOCK = 128
LARGEST = torch.finfo(torch.float32).max


def is_quantised(value: Any) -> bool:
    """Whether it is one of TransformerEngine's tensors; some are no torch.Tensor."""
    return type(value).__module__.startswith("transformer_engine.pytorch.tensor")


def put(target: Any, values: Tensor) -> None:
    """`values` into what a kernel gave back: a plain CPU tensor, or a quantised one of the device.

    NotImplementedError: of a format that this GPU has not (mxfp8, nvfp4).
    """
    if isinstance(target, Tensor) and not is_quantised(target):
        target.copy_(values.reshape(target.shape))
        return
    values = values.float()
    kind = type(target._quantizer).__name__
    if kind == "Float8Quantizer":
        _put_delayed(target, values)
    elif kind == "Float8CurrentScalingQuantizer":
        _put_scaled(target, values, _scale(_largest(target._quantizer, values), target))
    elif kind == "Float8BlockQuantizer":
        _put_blocks(target, values)
    else:
        raise NotImplementedError(kind)


def _number_format(value: Any) -> torch.dtype:
    return torch.float8_e5m2 if value.name == "kFloat8E5M2" else torch.float8_e4m3fn


def _rounded(values: Tensor, kind: torch.dtype) -> Tensor:
    most = torch.finfo(kind).max
    return values.clamp(-most, most).to(kind).view(torch.uint8)


def _largest(quantizer: Any, values: Tensor) -> Tensor:
    """max|x|; of all ranks' parts where the recipe says so."""
    found = values.abs().amax() if values.numel() else torch.zeros(())
    if quantizer.with_amax_reduction:
        everyones = found.cuda()
        dist.all_reduce(everyones, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        found = everyones.cpu()
    return found


def _scale(largest: Tensor, target: Any) -> Tensor:
    """F / max|x|; 1 of nothing but zeros, or of what is not finite."""
    quantizer = target._quantizer
    most = torch.finfo(_number_format(target._fp8_dtype)).max
    largest = largest.clamp(min=quantizer.amax_epsilon)
    scale = (most / largest).clamp(max=LARGEST)
    scale = torch.where((largest > 0) & largest.isfinite(), scale, torch.ones_like(scale))
    if quantizer.force_pow_2_scales:
        mantissa, exponent = scale.frexp()
        scale = torch.ldexp(torch.full_like(mantissa, 0.5), exponent)
    return scale


def _put_delayed(target: Any, values: Tensor) -> None:
    quantizer = target._quantizer
    amax = alias(quantizer.amax)
    amax.copy_(torch.maximum(amax, values.abs().amax()) if values.numel() else amax)
    _put_scaled(target, values, alias(quantizer.scale))


def _put_scaled(target: Any, values: Tensor, scale: Tensor) -> None:
    data = _rounded(values * scale, _number_format(target._fp8_dtype))
    alias(target._scale_inv).copy_((1 / scale).reshape(target._scale_inv.shape))
    rows = data.reshape(-1, data.shape[-1])
    if target._data is not None:
        alias(target._data).copy_(data.reshape(target._data.shape))
    if target._transpose is not None:
        alias(target._transpose).copy_(rows.t().reshape(target._transpose.shape))


def _put_blocks(target: Any, values: Tensor) -> None:
    rows = values.reshape(-1, values.shape[-1])
    for name, part in (("rowwise", rows), ("columnwise", rows.t())):
        if (held := getattr(target, f"_{name}_data")) is not None:
            data, inverse = _blocks(target, part)
            alias(held).copy_(data.reshape(held.shape))
            scales = alias(getattr(target, f"_{name}_scale_inv"))
            scales.zero_()
            scales[: inverse.shape[0], : inverse.shape[1]] = inverse


def _blocks(target: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded numbers, and the inverse scales as a product reads them: by block of the row and row,
    or, of squares, by square.
    """
    high = BLOCK if target._is_2D_scaled else 1
    height, width = rows.shape
    down, across = -(-height // high), -(-width // BLOCK)
    padded = rows.new_zeros(down * high, across * BLOCK)
    padded[:height, :width] = rows
    tiles = padded.view(down, high, across, BLOCK)
    scale = _scale(tiles.abs().amax((1, 3)), target)
    data = _rounded(tiles * scale[:, None, :, None], _number_format(target._fp8_dtype))
    inverse = 1 / scale if target._is_2D_scaled else (1 / scale).t()
    return data.view(padded.shape)[:height, :width], inverse


# ---- the kernels ------------------------------------------------------------------------------


def quantize(result: Any, x: Tensor, quantizer: Any, out: Any = None, skip: Any = None) -> None:
    """A tensor rounded; left as it was where `skip` is set."""
    if skip is None or not bool(skip):
        put(result, x)


def bgrad_quantize(result: Any, grad: Tensor, quantizer: Any) -> None:
    """A gradient rounded, and its sum over the rows: a bias's gradient."""
    total, rounded = result
    total.copy_(grad.reshape(-1, grad.shape[-1]).float().sum(0))
    if quantizer is not None:
        put(rounded, grad)


def multi_quantize(result: Any, tensors: list[Tensor], quantizers: Any) -> None:
    """Several tensors rounded."""
    for rounded, x in zip(result, tensors, strict=True):
        put(rounded, x)


def split_quantize(result: Any, x: Tensor, sizes: list[int], quantizers: Any, *rest: Any) -> None:
    """A tensor's rows in parts, each rounded."""
    multi_quantize(result, list(x.split([int(size) for size in sizes])), quantizers)


def dequantize(result: Tensor, given: Any, kind: Any) -> None:
    """data / s, of what has one scale."""
    if not hasattr(given, "_scale_inv") or given._data is None:
        raise NotImplementedError(type(given).__name__)
    data = alias(given._data).view(_number_format(given._fp8_dtype))
    result.copy_(data.float() * alias(given._scale_inv))


def transpose(result: Tensor, data: Tensor, kind: Any, out: Any = None) -> None:
    """Rows and columns exchanged."""
    result.copy_(data.reshape(-1, data.shape[-1]).t().reshape(result.shape))


def largest(result: None, x: Tensor, amax: Tensor) -> None:
    """max|x|."""
    amax.copy_(x.float().abs().amax().reshape(amax.shape))


def update_scales(
    result: None,
    newest: Tensor,
    histories: list[Tensor],
    scales: list[Tensor],
    rule: str,
    kind: Any,
    margin: float,
) -> None:
    """s = F / 2^margin / (the largest of the history, or the newest); the history moves on by one
    and has a zero where the next step's maxima go.
    """
    most = torch.finfo(_number_format(kind)).max * 2.0**-margin
    parts = newest.split([scale.numel() for scale in scales])
    for history, scale, last in zip(histories, scales, parts, strict=True):
        past = torch.cat([history[1:], last.reshape(1, -1)])
        amax = last if rule == "most_recent" else past.amax(0)
        found = (most / amax).clamp(max=LARGEST)
        scale.copy_(torch.where((amax > 0) & amax.isfinite(), found, scale))
        history[1:] = past[1:]
        history[0] = 0


AFTERWARDS: dict[str, Callable[..., None]] = {
    "quantize": quantize,
    "bgrad_quantize": bgrad_quantize,
    "multi_tensor_quantize": multi_quantize,
    "split_quantize": split_quantize,
    "dequantize": dequantize,
    "fp8_transpose": transpose,
    "compute_amax": largest,
    "fused_amax_and_scale_update_after_reduction": update_scales,
}
