"""Megatron's gated delta net with the norm of the published models, with TransformerEngine or
without. Import it after policy/runtime.py has prepared Megatron.
"""

from __future__ import annotations

from typing import Any

from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    common,
    gdn,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_stare.policy.cpu_layers import delta_rule
from megatron_stare.policy.cpu_layers.attention import RMSNorm


class HeadNorm(RMSNorm):
    """The norm of a head's output: its weight is not centred at zero, whatever those of the other
    norms are. Each tensor-parallel rank has other heads, and config.sequence_parallel lets
    Megatron add the gradients up.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.zero_centered = False


def provide_operations(theirs: bool) -> None:
    """Put our operations where Megatron-Core looks for those of flash-linear-attention, unless
    `theirs` may be used and that package is installed.
    """
    if theirs and common.chunk_gated_delta_rule is not None:
        return
    common.HAVE_FLA = True
    common.l2norm = delta_rule.normalised
    gdn.causal_conv1d = delta_rule.causal_conv1d
    gdn.chunk_gated_delta_rule = delta_rule.gated_delta_rule


def delta_net_spec(attention: ModuleSpec) -> ModuleSpec:
    """A gated delta net with the projections of this self-attention."""
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=attention.submodules.linear_qkv,
            out_norm=HeadNorm,
            out_proj=attention.submodules.linear_proj,
        ),
    )
