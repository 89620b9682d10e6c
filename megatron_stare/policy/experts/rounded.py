"""Experts whose weights are those of an FP8 server: quantisation-aware training.

    W = decode(encode(bf16(M))),  M <- M - step(dL/dW)        huggingface/block_fp8.py

M is the optimizer's fp32 copy, which bf16 training has anyway. What the model holds, computes with,
saves and sends to servers is W; the gradient by W moves M as if nothing had been rounded (the
straight-through estimator, arXiv 1308.3432). No layer knows of it: after every step of the
optimizer the experts' weights are rounded where they lie, one module per expert or
TransformerEngine's groups alike. A checkpoint of FP8 experts (`quantize --format fp8_experts`)
holds W to the last bit.

A matrix's blocks are those of the whole Hugging Face matrix: gate and up have their own, and ranks
that split an expert split it between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.policy.huggingface import block_fp8
from megatron_stare.policy.huggingface.names import name_table, sparse_layers
from megatron_stare.policy.huggingface.weights import named_parameters
from megatron_stare.policy.topology import expert_tensor_size


class RoundedExperts:
    """The matrices of this rank's experts; none where policy.expert_quantization is none."""

    def __init__(
        self, chunks: Sequence[nn.Module], hf: PretrainedConfig, policy: PolicyConfig
    ) -> None:
        """UserError: the model has no experts, or ranks would split their blocks."""
        self.held: list[tuple[nn.Parameter, int]] = []  # and how many HF matrices it stacks
        if policy.expert_quantization == "none":
            return
        _check(hf, policy)
        parameters = named_parameters(list(chunks))
        for entry in name_table(hf):
            if entry.expert is not None and entry.megatron in parameters:
                self.held.append((parameters[entry.megatron], len(entry.hf)))

    @torch.no_grad()
    def round(self) -> None:
        """Round them in place. Those that are rounded already keep every bit."""
        for parameter, parts in self.held:
            for matrix in parameter.chunk(parts):
                matrix.copy_(block_fp8.rounded(matrix))


def _check(hf: PretrainedConfig, policy: PolicyConfig) -> None:
    asked = f"policy.expert_quantization={policy.expert_quantization}"
    if not any(sparse_layers(hf)):
        raise UserError(f"{asked} needs experts; {hf.model_type} has none: set it to none")
    split = expert_tensor_size(policy)
    if split > 1 and hf.moe_intermediate_size % (split * block_fp8.BLOCK):
        raise UserError(
            f"{asked} has blocks of {block_fp8.BLOCK}, and "
            f"policy.expert_tensor_parallel_size={split} (0: tensor_model_parallel_size) splits "
            f"moe_intermediate_size={hf.moe_intermediate_size} inside them; set it to 1"
        )
