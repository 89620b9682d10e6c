"""Families with sigmoid routers against transformers' own implementation, all in float64: the
log-probs and the gradient of every weight, each option on and off.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import build, topology
from megatron_stare.policy.huggingface import weights as hf_weights
from megatron_stare.policy.huggingface.names import from_shards, name_table
from megatron_stare.policy.topology import Topology
from tests.policy.test_model_experts import token_ids, transformers_gradient
from tests.tiny_models import YARN, tiny_config, write_checkpoint

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm, every part": ("glm4_moe", {}),
    "glm, no norm of heads": ("glm4_moe", {"use_qk_norm": False}),
    "glm, no bias": ("glm4_moe", {"attention_bias": False}),
    "glm, one group": ("glm4_moe", {"n_group": 1, "num_experts_per_tok": 3}),
    "glm, two groups of four": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2} | {"num_experts_per_tok": 4},
    ),
    "glm, no scale": ("glm4_moe", {"routed_scaling_factor": 1.0}),
    "glm, two shared experts": ("glm4_moe", {"n_shared_experts": 2}),
    "glm, two dense layers": ("glm4_moe", {"first_k_dense_replace": 2}),
    "glm, whole heads turned": (
        "glm4_moe",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
            | {"partial_rotary_factor": 1.0}
        },
    ),
    "dots": ("dots1", {}),
    "deepseek, every part": ("deepseek_v3", {}),
    "deepseek, no latent queries": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek, no yarn": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    "deepseek, yarn without a scale of scores": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}},
    ),
    "deepseek, yarn of two scales": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "deepseek, yarn without mscale": (
        "deepseek_v3",
        {"rope_parameters": {k: v for k, v in YARN.items() if k != "mscale"}},
    ),
    "deepseek, one group, two shared": (
        "deepseek_v3",
        {"n_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 2},
    ),
    "deepseek, wide values": ("deepseek_v3", {"v_head_dim": 12}),
    "deepseek, dense": ("deepseek_v3", {"first_k_dense_replace": 4}),
    "glm flash": ("glm4_moe_lite", {}),
    "glm, tied, no dense layer": (
        "glm4_moe",
        {"tie_word_embeddings": True, "first_k_dense_replace": 0},
    ),
    "deepseek, tied, three dense layers": (
        "deepseek_v3",
        {"tie_word_embeddings": True, "first_k_dense_replace": 3},
    ),
    "deepseek, no dense layer": ("deepseek_v3", {"first_k_dense_replace": 0}),
    "glm flash, no latent queries, groups, a dense layer between": (
        "glm4_moe_lite",
        {"q_lora_rank": None, "n_group": 2, "topk_group": 1}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "experts, tied, a weight of the chosen one alone": (
        "qwen3_moe",
        {"tie_word_embeddings": True, "num_experts_per_tok": 1, "norm_topk_prob": False},
    ),
    "delta nets": ("qwen3_5_text", {}),
    "delta nets, tied, one value head for each of keys": (
        "qwen3_5_text",
        {"tie_word_embeddings": True, "linear_num_value_heads": 4},
    ),
    "delta nets, more layers of attention": (
        "qwen3_5_text",
        {"layer_types": ["full_attention", "linear_attention"] * 2},
    ),
    "delta nets, experts": ("qwen3_5_moe_text", {}),
    "seed, no bias": ("seed_oss", {"attention_bias": False}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "qwen2, wide heads": ("qwen2", {"head_dim": 12}),
}
_WHOLE = ("qwen2", "qwen2_tied", "qwen3", "qwen3_moe", "llama", "mistral", "smollm3")
OPTIONS |= {family: (family, {}) for family in (*_WHOLE, "seed_oss")}


class Float64(TorchFunctionMode):
    """While it is on, what asks for float32 has float64: norms, routers and rotary angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {
            name: torch.float64 if each is torch.float32 else each
            for name, each in (kwargs or {}).items()
        }
        return func(*wide, **named)


@pytest.fixture(scope="module")
def alone() -> Iterator[Topology]:
    yield topology.start(PolicyConfig())
    topology.stop()


def log_probs(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor:
    return torch.log_softmax(logits_BSV[:, :-1, :71], -1).gather(-1, ids_BS[:, 1:, None])


def exact_angles(rotary: Any, rope: dict[str, Any]) -> None:
    """The frequencies that a module keeps from its construction, in float64."""
    width = 2 * len(rotary.inv_freq)
    places = torch.arange(0, width, 2, dtype=torch.float64) / width
    rotary.inv_freq = rotary.inv_freq_extra = rope["rope_theta"] ** -places
    rotary.inv_freq_inter = rotary.inv_freq_extra / rope.get("factor", 1.0)


def relative(ours: Tensor, theirs: Tensor) -> float:
    with torch.no_grad():
        return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))


@pytest.mark.parametrize("option", OPTIONS)
def test_log_probs_and_gradients_are_those_of_transformers(
    option: str, alone: Topology, tmp_path: Path
) -> None:
    family, changes = OPTIONS[option]
    directory = write_checkpoint(tmp_path / "model", tiny_config(family, **changes), seed=3)
    ids_BS = token_ids()
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **eager)
    hf = build.read_hf_config(str(directory))
    (ours,) = build.build_model(hf, PolicyConfig(), alone)
    hf_weights.load_hf([ours], str(directory), hf, alone)
    ours.double().config.moe_router_dtype = "fp64"
    from megatron.core.models.common.embeddings import RotaryEmbedding

    with Float64():
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
        for module in ours.modules():
            if isinstance(module, RotaryEmbedding):
                exact_angles(module, hf.rope_parameters)
        expected = log_probs(theirs(ids_BS).logits, ids_BS)
        found = log_probs(ours(ids_BS, torch.arange(24).expand_as(ids_BS), None), ids_BS)
        assert found.dtype == torch.float64
        for each in (expected, found):
            each.square().sum().backward()
    assert relative(found, expected) < 1e-9
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    weights = hf_weights.named_parameters([ours])
    for entry in name_table(hf):
        if entry.dtype is None:  # the routers' bias has no gradient
            parts = from_shards(entry, [weights[entry.megatron].grad])  # type: ignore[list-item]
            for name, gradient in zip(entry.hf, parts, strict=True):
                assert relative(gradient, transformers_gradient(gradients, name)) < 1e-9, name
