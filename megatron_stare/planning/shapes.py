"""The configs of the recipes' models, from their config.json: a plan needs no download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from megatron_stare.config import UserError, nearest
from megatron_stare.policy import build

_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}

_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


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
    "Qwen2.5-Math-1.5B": _qwen2(1536, 8960, 28, 12, 2)
    | {"vocab_size": 151936, "max_position_embeddings": 4096, "tie_word_embeddings": True},
    "Qwen2.5-Math-7B": _qwen2(3584, 18944, 28, 28, 4) | {"max_position_embeddings": 4096},
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen2.5-14B-Instruct": _qwen2(5120, 13824, 48, 40, 8) | {"max_position_embeddings": 32768},
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 8960, 28, 12, 2) | {"vocab_size": 151936},
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _qwen3(2048, 6144, 48, 32, moe_intermediate_size=768, **_EXPERTS),
    "Qwen3-235B-A22B": _qwen3(4096, 12288, 94, 64, moe_intermediate_size=1536, **_EXPERTS),
    "Llama-3.1-8B": _qwen2(4096, 14336, 32, 32, 8) | {"model_type": "llama", "vocab_size": 128256},
}

MODELS |= {  # of latent attention: what differs from the defaults of transformers
    "GLM-4.7-Flash": {"model_type": "glm4_moe_lite", "rope_parameters": _ROPE},
    "Moonlight-16B-A3B-Instruct": {
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "routed_scaling_factor": 2.446,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE | {"rope_theta": 5e4},
    },
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
