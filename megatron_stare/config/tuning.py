"""Switches that make the same training quicker or smaller on a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TuningConfig:
    """Unset, a switch is on wherever hardware and layout have it and it gains (policy/tuning/,
    docs/tuning.md). Names are Megatron's.
    """

    # a weight's gradient is added to its fp32 sum inside the matrix product
    gradient_accumulation_fusion: bool | None = None
    bias_activation_fusion: bool | None = None  # SiLU and product of the gated MLP in one kernel
    bias_dropout_fusion: bool | None = None  # residual additions
    apply_rope_fusion: bool | None = None  # rotation of all packed sequences in one kernel
    moe_permute_fusion: bool | None = None  # tokens to their experts and back
    moe_router_fusion: bool | None = None  # softmax and choice of experts
    overlap_grad_reduce: bool | None = None  # gradients are summed over replicas during backward
    # wait for the device after every send between pipeline stages (a remedy for old torch)
    batch_p2p_sync: bool | None = None
    fp8_recipe: str | None = None  # delayed | tensorwise | blockwise | mxfp8: scales of policy.fp8
