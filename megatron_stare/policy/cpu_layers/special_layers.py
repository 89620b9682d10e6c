"""Megatron's multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) and gated delta net, with
the norms of the published models, with TransformerEngine or without. Import it after
policy/runtime.py has prepared Megatron.
"""

from __future__ import annotations

from typing import Any

from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    common,
    gdn,
)
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from megatron_stare.policy.cpu_layers import delta_rule
from megatron_stare.policy.cpu_layers.attention import RMSNorm

# transformers' and SGLang's implementations fix it, whatever rms_norm_eps is.
LATENT_EPS = 1e-6


class LatentAttention(MLASelfAttention):
    """Queries from a normalised latent vector or from the hidden state as it is; keys and values
    from a normalised one.

    Megatron-Core's own choice of norms has rms_norm_eps in them, and can not normalise keys without
    a norm of the queries. Its local down-projections are split over the tensor-parallel ranks, and
    the gradient of the shared rotary key is not added up over them: here they are replicated, as
    with TransformerEngine.
    """

    def __init__(self, config: Any, submodules: Any, **given: Any) -> None:
        super().__init__(config=config, submodules=submodules, **given)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            split = getattr(self, name, None)
            if isinstance(split, ColumnParallelLinear):
                setattr(self, name, ReplicatedLinear(split.input_size, split.output_size, config))

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        kind: Any = RMSNorm
        if submodules.linear_kv_up_proj is not ColumnParallelLinear:  # TransformerEngine's own
            from megatron.core.extensions.transformer_engine import TENorm

            kind = TENorm

        def norm(hidden_size: int, config: Any, eps: float) -> nn.Module:
            return kind(hidden_size=hidden_size, config=config, eps=LATENT_EPS)

        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        projections = {name: getattr(submodules, name) for name in names}
        return projections | {"q_layernorm": norm, "kv_layernorm": norm}


class ReplicatedLinear(nn.Linear):
    """y = x W^T with the whole W on every tensor-parallel rank. Under sequence parallelism each has
    other tokens, and Megatron's finalize_model_grads adds W's gradients up.
    """

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


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
