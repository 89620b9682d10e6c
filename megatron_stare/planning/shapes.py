"""The dimensions of a model that memory and work depend on.

Those of the recipes' models, from their config.json, are listed here: a plan needs no download.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from megatron_stare.config import UserError, nearest
from megatron_stare.policy import build
from megatron_stare.policy.huggingface.families import megatron_fields

_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, groups: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": False,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, **rest: Any) -> dict[str, Any]:
    return (
        _qwen2(hidden, intermediate, layers, heads, 8)
        | _QWEN3
        | {"model_type": "qwen3", "max_position_embeddings": 40960}
        | rest
    )


MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-7B": _qwen2(3584, 18944, 28, 28, 4) | {"max_position_embeddings": 4096},
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen2.5-14B-Instruct": _qwen2(5120, 13824, 48, 40, 8) | {"max_position_embeddings": 32768},
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 8960, 28, 12, 2) | {"vocab_size": 151936},
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _qwen3(
        2048,
        6144,
        48,
        32,
        model_type="qwen3_moe",
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}


def model_shape(hf_checkpoint: str) -> PretrainedConfig:
    """The config of a checkpoint directory or, if it is missing, of the model of that name.
    UserError: neither.
    """
    if (Path(hf_checkpoint) / "config.json").is_file():
        return build.read_hf_config(hf_checkpoint)
    name = Path(hf_checkpoint).name
    if name not in MODELS:
        raise UserError(
            f"policy.hf_checkpoint={hf_checkpoint!r} has no config.json and is the name of no "
            f"model whose shape is known{nearest(name, MODELS)}; give a model directory"
        )
    fields = dict(MODELS[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@dataclass(frozen=True)
class Shape:
    """Widths in elements. `expert_width` and `experts_per_token` are 0 without experts."""

    hidden: int
    query: int  # heads times head width
    key: int  # key-value heads times head width
    head_width: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    layers: int
    sparse_layers: int
    experts: int
    experts_per_token: int
    expert_width: int
    tied: bool  # one matrix for embedding and head
    normalised_queries: bool  # Qwen3's norms of queries and keys

    @property
    def attention_matrices(self) -> int:
        """Weights of one layer's four projections."""
        return self.hidden * (2 * self.query + 2 * self.key)

    @property
    def active_matrices(self) -> int:
        """Weights of all layers that one token is multiplied by; without embedding and head."""
        dense = self.layers - self.sparse_layers
        routed = 3 * self.expert_width * self.experts_per_token + self.experts
        return self.hidden * (3 * self.intermediate * dense + routed * self.sparse_layers) + (
            self.attention_matrices * self.layers
        )

    @property
    def expert_matrices(self) -> int:
        """Weights of all experts of all layers."""
        return 3 * self.hidden * self.expert_width * self.experts * self.sparse_layers

    @property
    def head(self) -> int:
        return self.hidden * self.vocabulary


def shape_of(hf: PretrainedConfig) -> Shape:
    """The shape of a config.json."""
    fields = megatron_fields(hf)
    width = fields["kv_channels"]
    return Shape(
        hidden=hf.hidden_size,
        query=hf.num_attention_heads * width,
        key=hf.num_key_value_heads * width,
        head_width=width,
        heads=hf.num_attention_heads,
        key_heads=hf.num_key_value_heads,
        intermediate=hf.intermediate_size,
        vocabulary=hf.vocab_size,
        layers=hf.num_hidden_layers,
        sparse_layers=sum(fields.get("moe_layer_freq", [])),
        experts=fields.get("num_moe_experts", 0),
        experts_per_token=fields.get("moe_router_topk", 0),
        expert_width=fields.get("moe_ffn_hidden_size", 0),
        tied=bool(hf.tie_word_embeddings),
        normalised_queries=bool(fields.get("qk_layernorm")),
    )
