"""Tiny random Hugging Face checkpoints and a byte-level tokenizer,
in the form of a user's model directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Dots1Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Four layers of which the first has no experts; under STEPPED only every second layer has.
SPARSE = {
    "head_dim": 12,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
STEPPED = {"mlp_only_layers": [], "decoder_sparse_step": 2, "norm_topk_prob": False}
# Every part that GLM-4.5's shape can have.
SIGMOID = {
    "head_dim": 12,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
}
GLM = SIGMOID | {"attention_bias": True, "use_qk_norm": True, "rms_norm_eps": 1e-5}
# Every part that DeepSeek-V3's shape can have; queries and keys are wider than values.
LATENT = {name: value for name, value in SIGMOID.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rms_norm_eps": 1e-5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# Three layers with a gated delta net and one with gated attention.
DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "pad_token_id": None,
}
DELTA_SPARSE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """Two layers (four if some have experts), four heads, two key-value heads;
    an odd vocabulary.

    `family` names a case below.
    """
    shape: dict[str, Any] = {
        "vocab_size": 71,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    classes: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
        "qwen2": (Qwen2Config, {}),
        "qwen2_tied": (Qwen2Config, {"tie_word_embeddings": True}),
        "qwen3": (Qwen3Config, {"head_dim": 12}),
        "qwen3_tied": (Qwen3Config, {"head_dim": 12, "tie_word_embeddings": True}),
        "qwen3_moe": (Qwen3MoeConfig, SPARSE),
        "qwen3_moe_stepped": (Qwen3MoeConfig, SPARSE | STEPPED),
        "qwen3_5_text": (Qwen3_5TextConfig, DELTA),
        "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, DELTA | DELTA_SPARSE),
        "glm4_moe": (Glm4MoeConfig, GLM),
        "dots1": (Dots1Config, SIGMOID | {"n_group": 1, "n_shared_experts": 2}),
        "deepseek_v3": (DeepseekV3Config, LATENT | {"rope_parameters": YARN}),
        "glm4_moe_lite": (Glm4MoeLiteConfig, LATENT | {"v_head_dim": 12, "n_group": 1}),
        "llama": (LlamaConfig, {"rms_norm_eps": 1e-5}),
        "mistral": (MistralConfig, {"head_dim": 12, "sliding_window": None}),
        "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0], "pad_token_id": None}),
        "seed_oss": (SeedOssConfig, {"head_dim": 12, "pad_token_id": None}),
        "llama3_rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    }
    kind, special = classes[family]
    return kind(**(shape | special | overrides))


def write_checkpoint(directory: Path, config: PretrainedConfig, seed: int = 0, **save: Any) -> Path:
    """Save a model in which every weight is random, including biases and norms
    (0 and 1 in a new model).
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(directory, **save)
    return directory


def reference_logits(directory: Path, ids_BS: torch.Tensor) -> torch.Tensor:
    """transformers' logits of right-unpadded ids."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(ids_BS).logits


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """One id per byte and one end token (id 0): vocabulary 257, decodes any text back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {END: 0} | {letter: number for number, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tokenizer(directory: Path) -> None:
    """Write the byte tokenizer so that transformers 4 (of an older SGLang) also reads it."""
    byte_tokenizer().save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    content = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(content))
