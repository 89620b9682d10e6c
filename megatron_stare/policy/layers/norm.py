"""RMSNorm for machines without TransformerEngine, right under tensor and sequence parallelism.

Under sequence parallelism every tensor-parallel rank normalises other tokens, so the weight's
gradient is a partial sum on each; Megatron's finalize_model_grads adds it up over the tensor group
for parameters whose `sequence_parallel` is true (and, with config.qk_layernorm, for everything
named q_layernorm or k_layernorm: other heads on each rank).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_HALF = (torch.bfloat16, torch.float16)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis;
    x [..., hidden_size] -> the same shape and dtype.

    In half precision the statistics are fp32 and the quotient is rounded before the weight
    multiplies it, as Hugging Face's Qwen2, Qwen3 and Llama do. Constructor arguments are those
    Megatron passes to any norm. Source: Zhang and Sennrich, arXiv 1910.07467.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in _HALF:
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return (
            nn.functional.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)
            * self.weight
        )
