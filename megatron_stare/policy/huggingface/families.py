"""The families of models: one table per model_type, to be read next to a config.json.

A table says what becomes of every field of config.json. It is in exactly one of these places:

    fields    becomes a field of Megatron's TransformerConfig, as it is
    computed  becomes some after a calculation
    needs     has one supported value (each element, of a list); another is refused by name
    ignored   changes nothing that a training step computes

`always` holds what the family fixes and its config.json does not name. `megatron_fields` is the
outcome: all other code asks it what a model has, under Megatron-Core's names, and no other code
looks at model_type. Weights are named by parts (names.py). A new family of which every part exists
is one more table here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from megatron_stare.config import UserError

# Read by build.py, or without influence on the mathematics, in every family.
BUILT = frozenset({"vocab_size", "max_position_embeddings", "tie_word_embeddings"})
_IGNORED = frozenset(
    {"attention_dropout", "initializer_range", "pretraining_tp", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id"}
)
# Of RoPE's scaling in Llama 3.1, besides its factor: Megatron-Core has no other values.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Fields of other families, which some implementations read in every model.
_FOREIGN: dict[str, Any] = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
    "layer_types": "full_attention",
    "logit_scale": 1,
    "logits_scaling": 1,
    "mlp_bias": False,
    "residual_multiplier": 1,
    "sliding_window": None,
    "use_sliding_window": False,
}


@dataclass(frozen=True)
class Family:
    """One model_type. `models`: public ones whose config.json it builds; `fields`: by Megatron's
    names; `computed`: by the fields that each function reads; `routed`: which layers have experts,
    and the fields that say so.
    """

    models: tuple[str, ...]
    fields: Mapping[str, str]
    always: Mapping[str, Any] = field(default_factory=dict)
    computed: Mapping[str, Callable[[PretrainedConfig], dict[str, Any]]] = field(
        default_factory=dict
    )
    routed: tuple[str, Callable[[PretrainedConfig], list[bool]]] | None = None
    needs: dict[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def places(self) -> dict[str, str]:
        """The place of each field of config.json in the table."""
        computed = " ".join([*self.computed, self.routed[0] if self.routed else ""]).split()
        return (
            dict.fromkeys(_IGNORED | self.ignored, "ignored")
            | {name: "needs" for name in (_FOREIGN | self.needs) if name not in self.ignored}
            | dict.fromkeys(self.fields.values(), "fields")
            | dict.fromkeys(computed, "computed")
            | dict.fromkeys(BUILT, "built")
        )


def _head_width(hf: PretrainedConfig) -> dict[str, Any]:
    given = getattr(hf, "head_dim", None)
    return {"kv_channels": given or hf.hidden_size // hf.num_attention_heads}


def _rope(hf: PretrainedConfig) -> dict[str, Any]:
    rope = dict(hf.rope_parameters)
    _require("rope partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
    return _partial_rope(hf)


def _partial_rope(hf: PretrainedConfig) -> dict[str, Any]:
    """Megatron-Core fixes llama3's frequency factors, so other values are refused."""
    rope = dict(hf.rope_parameters)
    kind = rope.get("rope_type", "default")
    percent = rope.get("partial_rotary_factor", 1.0)
    found: dict[str, Any] = {"rotary_base": rope["rope_theta"], "rotary_percent": percent}
    if kind == "default":
        return {"rope": found}
    if kind != "llama3":
        raise UserError(
            f"config.json: rope_type={kind!r} is not supported; use 'default' or 'llama3'"
        )
    for name, value in LLAMA3_ROPE.items():
        if rope.get(name) != value:
            raise UserError(
                f"config.json: rope {name}={rope.get(name)} is not supported; Megatron-Core has "
                f"{value:g}"
            )
    return {"rope": found | {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}}


def _latent(hf: PretrainedConfig) -> dict[str, Any]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are
    products of one latent vector per token. config.json calls the rotary width head_dim.
    """
    heads, width = hf.num_attention_heads, hf.qk_nope_head_dim + hf.qk_rope_head_dim
    _require("num_key_value_heads", hf.num_key_value_heads, heads, f" for {hf.model_type}")
    if hf.v_head_dim > width:
        raise UserError(
            f"config.json: v_head_dim={hf.v_head_dim} is not supported; need at most "
            f"qk_nope_head_dim + qk_rope_head_dim = {width}, to which packed values are padded"
        )
    return {
        "multi_latent_attention": True,
        "kv_channels": width,
        "num_query_groups": heads,
        "rope": {},  # the layers have their own
    }


def _latent_rope(hf: PretrainedConfig) -> dict[str, Any]:
    """RoPE of the shared part of the keys, or YaRN (arXiv 2309.00071). transformers scales its
    angles by mscale(factor, mscale) / mscale(factor, mscale_all_dim) only if both are given.
    """
    rope = dict(hf.rope_parameters)
    kind = rope.get("rope_type", "default")
    for name, need in {"partial_rotary_factor": 1.0, "attention_factor": None}.items():
        if rope.get(name, need) != need:
            _require(f"rope {name}", rope[name], need)
    found = {"rope_type": "rope", "rotary_base": rope["rope_theta"], "rotary_scaling_factor": 1.0}
    if kind == "default":
        return found
    if kind != "yarn":
        raise UserError(
            f"config.json: rope_type={kind!r} is not supported for {hf.model_type}; use 'default' "
            "or 'yarn'"
        )
    _require("rope truncate", rope.get("truncate", True), True)
    scale, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    original = rope["original_max_position_embeddings"]
    return found | {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"] or hf.max_position_embeddings / original,
        "original_max_position_embeddings": original,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": scale if whole else None,
        "mscale_all_dim": whole or 0.0,
    }


def _delta_layers(hf: PretrainedConfig) -> dict[str, Any]:
    """Gated delta nets (arXiv 2412.06464) in place of the attention of most layers."""
    for kind in hf.layer_types:
        if kind not in ("linear_attention", "full_attention"):
            raise UserError(
                f"config.json: layer_types holds {kind!r}, which is not supported for "
                f"{hf.model_type}; need linear_attention or full_attention"
            )
    return {"linear_attention_freq": [int(k == "linear_attention") for k in hf.layer_types]}


def _layers_without_rope(hf: PretrainedConfig) -> dict[str, Any]:
    """SmolLM3 calls a layer with RoPE 1 in no_rope_layers; Megatron calls one without it 1."""
    return {"no_rope_freq": [int(not rotated) for rotated in hf.no_rope_layers]}


def _stepped(hf: PretrainedConfig) -> list[bool]:
    return [
        layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
        for layer in range(hf.num_hidden_layers)
    ]


def _after_first(hf: PretrainedConfig) -> list[bool]:
    return [layer >= hf.first_k_dense_replace for layer in range(hf.num_hidden_layers)]


def _everywhere(hf: PretrainedConfig) -> list[bool]:
    return [True] * hf.num_hidden_layers


def _listed(hf: PretrainedConfig) -> list[bool]:
    return [kind == "sparse" for kind in hf.mlp_layer_types]


def _softmax_weights(hf: PretrainedConfig) -> dict[str, Any]:
    """The weights of the chosen experts are softmax(logits)[chosen], or softmax(logits[chosen]),
    as Qwen3.5 always has them. The logits have the model's dtype, as in transformers.
    """
    normalised = getattr(hf, "norm_topk_prob", True)
    _check_several(hf, normalised)
    return {"moe_router_pre_softmax": not normalised}


def _sigmoid_weights(hf: PretrainedConfig) -> dict[str, Any]:
    """With s = sigmoid(logits) in fp32 the experts with the largest s + bias are chosen, and have
    the weights scale s / sum s (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). The bias stays as
    it was loaded. Of several groups only the best count, by the sum of their two best experts.
    """
    _check_several(hf, hf.norm_topk_prob)
    groups, best, top_k = hf.n_group or 1, hf.topk_group or 1, hf.num_experts_per_tok
    if not hf.norm_topk_prob:
        raise UserError(
            f"config.json: norm_topk_prob={hf.norm_topk_prob} is not supported for "
            f"{hf.model_type}; Megatron-Core normalises sigmoid scores: need True"
        )
    if groups > 1 and top_k != 2 * best:
        raise UserError(
            f"config.json: n_group={groups} with num_experts_per_tok={top_k} and topk_group={best} "
            "is not supported; Megatron-Core ranks groups by their num_experts_per_tok / "
            "topk_group best experts, which must be two"
        )
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": best if groups > 1 else None,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * (hf.n_shared_experts or 0)
        or None,
    }


def _check_several(hf: PretrainedConfig, normalised: bool) -> None:
    if hf.num_experts_per_tok == 1 and normalised:
        raise UserError(
            "config.json: num_experts_per_tok=1 with normalised weights (norm_topk_prob=true) is "
            "not supported by Megatron-Core"
        )


_BLOCK = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "layernorm_epsilon": "rms_norm_eps",
}
_DENSE = _BLOCK | {"num_query_groups": "num_key_value_heads"}
_GROUPED = {"head_dim": _head_width, "rope_parameters": _rope}
_ROUTED = {
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
_SIGMOID = {
    "n_group topk_group routed_scaling_factor n_shared_experts norm_topk_prob": _sigmoid_weights
}
_LATENT = _BLOCK | {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_DELTA_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads")
_DELTA = {f"linear_{name}": f"linear_{name}" for name in (*_DELTA_SIZES, "num_value_heads")}
_WITH_DELTA_NETS = {
    "qk_layernorm": True,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
}
_BETWEEN_DELTA_NETS = _GROUPED | {"rope_parameters": _partial_rope, "layer_types": _delta_layers}
_QWEN_WINDOW = frozenset({"sliding_window", "max_window_layers"})  # need use_sliding_window

FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        models=("Qwen2", "Qwen2.5", "Qwen2.5-Math", "DeepSeek-R1-Distill-Qwen"),
        fields=_DENSE,
        always={"add_qkv_bias": True},
        computed=_GROUPED,
        ignored=_QWEN_WINDOW | {"attention_bias"},
    ),
    "qwen3": Family(
        models=("Qwen3 (dense)",),
        fields=_DENSE,
        always={"qk_layernorm": True},
        computed=_GROUPED,
        ignored=_QWEN_WINDOW,
    ),
    "qwen3_moe": Family(
        models=("Qwen3-30B-A3B", "Qwen3-235B-A22B"),
        fields=_DENSE | _ROUTED,
        always={"qk_layernorm": True},
        computed=_GROUPED | {"norm_topk_prob": _softmax_weights},
        routed=("decoder_sparse_step mlp_only_layers", _stepped),
        needs={"output_router_logits": False},  # asks for a load-balancing loss
        ignored=_QWEN_WINDOW | {"router_aux_loss_coef"},
    ),
    "qwen3_5_text": Family(
        models=("Qwen3.5 (dense), the text part",),
        fields=_DENSE | _DELTA,
        always=_WITH_DELTA_NETS,
        computed=_BETWEEN_DELTA_NETS,
        needs={"attn_output_gate": True},
    ),
    "qwen3_5_moe_text": Family(
        models=("Qwen3.5 (MoE), Qwen3.6-35B-A3B, the text part",),
        fields=_DENSE
        | _DELTA
        | _ROUTED
        | {
            "ffn_hidden_size": "moe_intermediate_size",  # no layer has a dense MLP
            "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        },
        always=_WITH_DELTA_NETS | {"moe_shared_expert_gate": True},
        computed=_BETWEEN_DELTA_NETS | {"num_experts_per_tok": _softmax_weights},
        routed=("", _everywhere),
        needs={"attn_output_gate": True, "output_router_logits": False, "mlp_only_layers": []},
        ignored=frozenset({"router_aux_loss_coef"}),
    ),
    "llama": Family(
        models=("Llama 2, 3, 3.1, 3.2, 3.3", "DeepSeek-R1-Distill-Llama", "SmolLM, SmolLM2"),
        fields=_DENSE,
        computed=_GROUPED,
    ),
    "mistral": Family(
        models=("Mistral-7B v0.2 and later", "Mistral-Nemo", "Mistral-Small 2501"),
        fields=_DENSE,
        computed=_GROUPED,
    ),
    "smollm3": Family(
        models=("SmolLM3-3B",),
        fields=_DENSE,
        computed=_GROUPED | {"no_rope_layers": _layers_without_rope},
        ignored=_QWEN_WINDOW | {"no_rope_layer_interval"},
    ),
    "seed_oss": Family(
        models=("Seed-OSS-36B",),
        fields=_DENSE | {"add_qkv_bias": "attention_bias"},
        computed=_GROUPED,
        needs={"attention_out_bias": False},
        ignored=frozenset({"residual_dropout"}),
    ),
    "glm4_moe": Family(
        models=("GLM-4.5", "GLM-4.5-Air", "GLM-4.6", "GLM-4.7"),
        fields=_DENSE
        | _ROUTED
        | {
            "num_moe_experts": "n_routed_experts",
            "add_qkv_bias": "attention_bias",
            "qk_layernorm": "use_qk_norm",
        },
        computed=_GROUPED | _SIGMOID | {"rope_parameters": _partial_rope},
        routed=("first_k_dense_replace", _after_first),
        ignored=frozenset({"num_mtp_layers"}),  # predict further tokens, and train nothing here
    ),
    "dots1": Family(
        models=("dots.llm1",),
        fields=_DENSE | _ROUTED | {"num_moe_experts": "n_routed_experts"},
        always={"qk_layernorm": True},
        computed=_GROUPED | _SIGMOID,
        routed=("first_k_dense_replace", _after_first),
        ignored=_QWEN_WINDOW,
    ),
    "deepseek_v3": Family(
        models=("DeepSeek-V3, DeepSeek-R1", "Moonlight-16B-A3B"),
        fields=_LATENT | _ROUTED | {"num_moe_experts": "n_routed_experts"},
        computed=_SIGMOID | {"num_key_value_heads": _latent, "rope_parameters": _latent_rope},
        routed=("first_k_dense_replace", _after_first),
        needs={"rope_interleave": True, "moe_layer_freq": 1}
        | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        ignored=frozenset({"num_mtp_layers"}),
    ),
    "glm4_moe_lite": Family(
        models=("GLM-4.7-Flash",),
        fields=_LATENT | _ROUTED | {"num_moe_experts": "n_routed_experts"},
        computed=_SIGMOID | {"num_key_value_heads": _latent, "rope_parameters": _latent_rope},
        routed=("mlp_layer_types", _listed),
        needs={"rope_interleave": True},
    ),
}


# Vision-language models, of which the text part is trained.
VISION_LANGUAGE = frozenset({"qwen3_5", "qwen3_5_moe"})


def text_config(hf: PretrainedConfig) -> PretrainedConfig:
    """The part of a config.json that the trainer reads: all of it, but of a vision-language model
    its text part. tie_word_embeddings may be in either; the format of the weights is outside.
    """
    if hf.model_type not in VISION_LANGUAGE:
        return hf
    text = hf.get_text_config()
    text.tie_word_embeddings = text.tie_word_embeddings or hf.tie_word_embeddings
    if (quantization := getattr(hf, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def megatron_fields(hf: PretrainedConfig) -> dict[str, Any]:
    """The values of config.json under the names of Megatron's TransformerConfig; under `rope` the
    arguments of GPTModel. The fields of experts are there if a layer has some. UserError: a value
    that the family does not support.
    """
    family = FAMILIES[hf.model_type]
    found = dict(family.always)
    found |= {ours: getattr(hf, theirs) for ours, theirs in family.fields.items()}
    for function in family.computed.values():
        found |= function(hf)
    sparse = sparse_layers(hf)
    if any(sparse):
        return found | {"moe_layer_freq": [int(routed) for routed in sparse]}
    return {name: value for name, value in found.items() if "moe_" not in name}


def sparse_layers(hf: PretrainedConfig) -> list[bool]:
    """The layers with routed experts; the others, and all of a dense family, have one MLP."""
    family = FAMILIES[hf.model_type]
    if family.routed is None or not getattr(hf, family.fields["num_moe_experts"]):
        return [False] * hf.num_hidden_layers
    return family.routed[1](hf)


def has_delta_nets(hf: PretrainedConfig) -> bool:
    """Whether some layers have a gated delta net in place of attention."""
    return any(megatron_fields(hf).get("linear_attention_freq", ()))


def check_supported(hf: PretrainedConfig) -> None:
    """UserError: a field of config.json has a value that this model would not reproduce."""
    family, places = FAMILIES[hf.model_type], FAMILIES[hf.model_type].places()
    for name, need in (_FOREIGN | family.needs).items():
        if places[name] == "needs":
            value = getattr(hf, name, need)
            for one in value if isinstance(value, list) else [value]:
                _require(name, one, need, f" for {hf.model_type}")
    megatron_fields(hf)


def _require(name: str, value: Any, need: Any, where: str = "") -> None:
    if value != need and value is not None:
        raise UserError(f"config.json: {name}={value!r} is not supported{where}; need {need!r}")
