"""Weights in FP8 blocks on an SGLang server without a GPU.

SGLang multiplies FP8 blocks by kernels of a GPU, or of AMX in a wheel that has no build for CPUs
alone; without them a server ends while it starts. `install` keeps codes and scales as they were
loaded, and multiplies by the decoded matrix in the layer's dtype, in experts too. Loading, fusing,
splitting, updates and checksums are SGLang's own. A GPU's kernels also round inputs; these do not.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def install() -> None:
    """Before the server makes its model."""
    from sglang.srt.layers.quantization import fp8

    fp8.dispatch_w8a8_block_fp8_linear = lambda **unused: multiplied
    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod):
        method.process_weights_after_loading_block_quant = kept
    fp8.Fp8MoEMethod.create_moe_runner = noted
    fp8.Fp8MoEMethod.apply = through_experts


def kept(method: Any, layer: torch.nn.Module) -> None:
    """Stands in `process_weights_after_loading_block_quant`: codes and scales stay as they are."""


def multiplied(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """input @ decoded weight^T + bias."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    assert input_scale is None, "nothing before a linear layer rounds its input on a CPU"
    decoded = block_quant_dequant(weight, weight_scale, block_size, input.dtype)
    return torch.nn.functional.linear(input, decoded, bias)


def noted(method: Any, layer: torch.nn.Module, moe_runner_config: Any) -> None:
    """Stands in `create_moe_runner`, which takes a runner of a GPU."""
    method.moe_runner_config = moe_runner_config


def through_experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Stands in the `apply` of experts: SGLang's own code for experts on a CPU, on the decoded
    matrices.
    """
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    hidden, block = dispatch_output.hidden_states, method.quant_config.weight_block_size
    decoded = {
        name: block_quant_dequant(
            getattr(layer, name), getattr(layer, f"{name}_scale_inv"), block, hidden.dtype
        )
        for name in ("w13_weight", "w2_weight")
    }
    experts: Any = SimpleNamespace(num_experts=layer.num_experts, **decoded)
    config, chosen = method.moe_runner_config, dispatch_output.topk_output
    return StandardCombineInput(moe_forward_native(experts, hidden, chosen, config))
