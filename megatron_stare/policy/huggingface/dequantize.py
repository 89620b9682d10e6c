"""Read what `quantize` wrote back as a transformers model that computes what a
server of the quantised model computes.

Weights are decoded; every quantised layer's input is rounded as the server's matrix product rounds
it. What differs from a server is accumulation order, its KV cache and attention kernels. Formulas
per layer, x its input, W its weight:

    fp8    round_E4M3(x / s_x) s_x  and  W_8 s_w
    int8   round((x p) / s_x) s_x   and  W_8 s_w[row]       p: SmoothQuant's factor per input
    nvfp4  group of 16: scale t = E4M3(max|x| / (6 s_x)) s_x, round_E2M1(x / t) t;  W_4 E4M3[row,
           group] s_w
    fp8_experts  x  and  W_8 s_w[block of 128 x 128], of experts

Of fp8_experts a server rounds inputs too, by scales that it makes; that is not computed here.
The model has the export's dtype, so decoded weights are rounded to it. Shape legend: O outputs, I
inputs, G groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from megatron_stare.policy import runtime
from megatron_stare.policy.huggingface import block_fp8

# (values, scale) -> what a server's matrix product sees
Rounding = Callable[[Tensor, Tensor], Tensor]

_E4M3_MAX, _E2M1_MAX, _GROUP = 448.0, 6.0, 16
# Codes 0 to 7; 8 to 15 are their negatives.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "weight_scale_inv")


def load_exported(directory: Path) -> PreTrainedModel:
    """The exported model, in memory as large as the original. RuntimeError:
    tensors are missing or left over.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    del config.quantization_config
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    scales: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name in list(tensors):
        layer, _, part = name.rpartition(".")
        if part in _SCALES:
            scales[layer][part] = tensors.pop(name)
    rounding = {
        layer: _ROUND[tensors[f"{layer}.weight"].dtype]
        for layer, parts in scales.items()
        if "input_scale" in parts
    }
    for layer, parts in scales.items():
        decoded = decode_weight(tensors[f"{layer}.weight"], parts)
        tensors[f"{layer}.weight"] = decoded.to(config.dtype)
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=config.dtype, output_loading_info=True
    )
    wrong = sorted(report["missing_keys"] | report["unexpected_keys"])
    if wrong or not scales:
        raise RuntimeError(
            f"{directory} is not a whole export of a quantised model: "
            f"{wrong or 'nothing is quantised'}"
        )
    model = model.to(runtime.device()).eval()
    for layer, function in rounding.items():
        hook = _input_hook(function, scales[layer], model.device)
        model.get_submodule(layer).register_forward_pre_hook(hook)
    return model


def _input_hook(rounding: Rounding, scales: dict[str, Tensor], device: torch.device) -> Any:
    """A forward pre-hook that rounds a layer's input in fp32 and hands it on in its own dtype."""
    scale = scales["input_scale"].to(device)
    factor = scales["pre_quant_scale"].to(device) if "pre_quant_scale" in scales else None

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        x = inputs[0].float()
        return rounding(x if factor is None else x * factor, scale).to(inputs[0].dtype)

    return hook


def decode_weight(weight: Tensor, scales: dict[str, Tensor]) -> Tensor:
    """The weight [O, I] in fp32. nvfp4 packs two codes in a byte, the lower half first, [O,
    I / 2].
    """
    if "weight_scale_inv" in scales:
        return block_fp8.decode(weight, scales["weight_scale_inv"])
    scale = scales["weight_scale"].float()
    if weight.dtype == torch.uint8:
        code_OI = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).long()
        value_OI = torch.cat([_E2M1, -_E2M1]).to(weight.device)[code_OI]
        return value_OI * (scale * scales["weight_scale_2"]).repeat_interleave(_GROUP, dim=1)
    return weight.float() * (scale[:, None] if scale.dim() == 1 else scale)


def round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Round to the nearest multiple of `scale` by an E4M3 number; beyond 448 it saturates."""
    return (x / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def round_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Round to the nearest integer multiple of `scale` in [-128, 127]."""
    return (x / scale).round().clamp(-128, 127) * scale


def round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """E2M1 in groups of 16 along the last axis,
    each with an E4M3 multiple of `scale` as its own scale.
    """
    group_G16 = x.unflatten(-1, (-1, _GROUP))
    largest = group_G16.abs().amax(-1, keepdim=True)
    factor = (largest / (_E2M1_MAX * scale)).clamp(2**-9, _E4M3_MAX)
    own = factor.to(torch.float8_e4m3fn).float() * scale
    size = (group_G16 / own).abs().clamp(max=_E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # E2M1's spacing
    return ((size / step).round() * step * own * group_G16.sign()).flatten(-2)


# By the dtype that a quantised weight is stored in.
_ROUND: dict[torch.dtype, Rounding] = {
    torch.float8_e4m3fn: round_fp8,
    torch.int8: round_int8,
    torch.uint8: round_nvfp4,
}
