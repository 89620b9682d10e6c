"""Tables of families: every field of transformers' config classes has a place, published shapes
build on the meta device with transformers' own parameter count, and foreign values are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_stare.config import AdaptersConfig, Config, PolicyConfig, UserError
from megatron_stare.planning.memory import cache_bytes_per_token, state_bytes
from megatron_stare.policy import build, topology
from megatron_stare.policy.adapters import check as check_adapters
from megatron_stare.policy.huggingface.families import (
    FAMILIES,
    check_supported,
    megatron_fields,
)
from megatron_stare.policy.huggingface.fp8_weights import check_family, check_server
from megatron_stare.policy.huggingface.names import name_table
from megatron_stare.policy.huggingface.shape import forward_operations, shape_of
from megatron_stare.policy.huggingface.weights import named_parameters
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from tests.tiny_models import LLAMA3_ROPE, YARN, tiny_config, write_checkpoint

HERE = Path(__file__).parent
# Shapes of published config.json files: the fields that differ from transformers' defaults.
PUBLISHED = json.loads((HERE / "published_configs.json").read_text())


@pytest.fixture(scope="module")
def alone() -> Iterator[Topology]:
    yield topology.start(PolicyConfig())
    topology.stop()


def published(name: str, **changes: Any) -> PretrainedConfig:
    fields = PUBLISHED[name]["config"] | changes
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_config_json_has_a_place(family: str) -> None:
    base = {field.name for field in dataclasses.fields(PretrainedConfig)}
    theirs = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])} - base
    assert not theirs - FAMILIES[family].places().keys()


# To build their thousands of experts takes many seconds. A smaller model has the same table, or the
# tiny model of the family (test_convert.py), and test_plan_published_shapes.py counts parameters.
LARGEST = ("GLM-4.5", "DeepSeek-V3", "Kimi-K2 (as a DeepSeek-V3)")
LARGEST += ("GLM-4.5-Air", "Qwen3-30B-A3B", "Qwen3.5-35B-A3B")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in LARGEST else []) for n in PUBLISHED],
)
def test_published_shapes_build_with_as_many_parameters(name: str, alone: Topology) -> None:
    hf = published(name)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(hf)
    (ours,) = build.build_model(hf, PolicyConfig(), alone, torch.device("meta"))
    parameters = named_parameters([ours])
    trained = [entry.megatron for entry in name_table(hf) if entry.dtype is None]
    assert sum(parameters[name].numel() for name in trained) == theirs.num_parameters()
    assert theirs.num_parameters() / 1e9 == pytest.approx(PUBLISHED[name]["billions"], rel=0.01)
    assert {entry.megatron for entry in name_table(hf)} == parameters.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_json_in_the_form_of_transformers_4_is_the_same(name: str, tmp_path: Path) -> None:
    """Such a file has rope_theta and rope_scaling, and fields that nothing reads."""
    fields = dict(PUBLISHED[name]["config"])
    rope = dict(fields.pop("rope_parameters"))
    fields["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    fields["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    fields |= {"torch_dtype": "bfloat16", "ep_size": 1, "transformers_version": "4.33.1"}
    fields["auto_map"] = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = build.read_hf_config(str(tmp_path))
    check_supported(found)
    assert megatron_fields(found) == megatron_fields(published(name))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Mistral-7B-v0.3", {"sliding_window": 4096}),
        ("Mistral-7B-v0.3", {"hidden_act": "gelu"}),
        ("Llama-3.1-8B", {"attention_bias": True}),
        ("Llama-3.1-8B", {"mlp_bias": True}),
        ("Llama-3.1-8B", {"final_logit_softcapping": 30.0}),
        ("Qwen2.5-7B", {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}),
        ("Qwen2.5-7B", {"use_sliding_window": True}),
        ("Seed-OSS-36B", {"attention_out_bias": True}),
        ("SmolLM3-3B", {"use_sliding_window": True}),
        ("GLM-4.5-Air", {"norm_topk_prob": False}),
        ("GLM-4.5-Air", {"n_group": 4, "topk_group": 2}),
        ("DeepSeek-V3", {"norm_topk_prob": False}),
        ("DeepSeek-V3", {"scoring_func": "softmax"}),
        ("DeepSeek-V3", {"topk_method": "greedy"}),
        ("DeepSeek-V3", {"moe_layer_freq": 2}),
        ("DeepSeek-V3", {"rope_interleave": False}),
        ("DeepSeek-V3", {"attention_bias": True}),
        ("DeepSeek-V3", {"num_key_value_heads": 64}),
        ("DeepSeek-V3", {"v_head_dim": 256}),
        ("GLM-4.7-Flash", {"topk_group": 3, "n_group": 4}),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 1}),
        ("Qwen3.5-0.8B", {"layer_types": ["linear_attention", "sliding_attention"] * 12}),
        ("Qwen3.5-0.8B", {"attn_output_gate": False}),
        ("Qwen3.5-0.8B", {"attention_bias": True}),
        ("Qwen3.5-35B-A3B", {"mlp_only_layers": [0]}),
        ("Qwen3.5-35B-A3B", {"output_router_logits": True}),
        ("Qwen3.5-35B-A3B", {"num_experts_per_tok": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_settings_foreign_to_a_family_are_refused(
    name: str, changes: dict[str, Any], alone: Topology
) -> None:
    with pytest.raises(UserError, match=next(iter(changes))):
        build.transformer_config(published(name, **changes), PolicyConfig(), alone)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GLM-4.5-Air", "a model with experts"),
        ("DeepSeek-V3", "experts"),
        ("Qwen3.5-0.8B", "gated delta nets"),
    ],
)
def test_models_without_shareable_prompts_are_refused(
    name: str, words: str, alone: Topology
) -> None:
    with pytest.raises(UserError, match=rf"shared_prompts=true does not work with .*{words}"):
        build.transformer_config(published(name), PolicyConfig(shared_prompts=True), alone)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_model_parallel_size": 2}, "gated delta nets needs policy.sequence_parallel=true"),
        ({"context_parallel_size": 32}, "= 32 does not divide linear_num_key_heads=16"),
    ],
)
def test_layouts_that_delta_nets_do_not_have_are_refused(
    settings: dict[str, Any], words: str, alone: Topology
) -> None:
    with pytest.raises(UserError, match=words):
        build.transformer_config(published("Qwen3.5-0.8B"), PolicyConfig(**settings), alone)


def test_what_does_not_know_delta_nets_refuses_them() -> None:
    """Adapters, and weights in FP8."""
    hf = published("Qwen3.5-0.8B")
    with pytest.raises(UserError, match=r"adapters\.rank=4 is not supported for qwen3_5_text"):
        check_adapters(hf, AdaptersConfig(rank=4), PolicyConfig())
    with pytest.raises(UserError, match="--format fp8 does not cover the gated delta nets"):
        check_family(hf, "--format fp8")
    with pytest.raises(UserError, match="does not cover the gated delta nets"):
        check_server(hf, (), 1, 1, "sglang.weights=fp8")


def test_states_of_delta_nets_take_the_place_of_keys_and_values() -> None:
    """On a server: of all heads in fp32, and the last three positions before the convolution."""
    delta, config = shape_of(published("Qwen3.5-0.8B")).delta, Config()
    assert delta.state_bytes == 18 * (4 * 16 * 128 * 128 + 2 * 3 * 3 * 16 * 128)
    sparse, dense = (
        shape_of(published("Qwen3.5-0.8B", **changes)) for changes in ({}, {"layer_types": FULL})
    )
    assert cache_bytes_per_token(dense, config) == 4 * cache_bytes_per_token(sparse, config)
    assert state_bytes(sparse, config) == delta.state_bytes and not state_bytes(dense, config)


def test_operations_of_delta_nets_are_counted() -> None:
    """Attention grows with the square of a length, and only in the layers that have it."""
    hf = published("Qwen3.5-0.8B")
    shape, dense = shape_of(hf), shape_of(published("Qwen3.5-0.8B", layer_types=FULL))
    assert (shape.attention_layers, dense.attention_layers) == (6, 24)
    assert shape.delta.work == 18 * 16 * (6 * 128 * 128 + 64 * 8 * 128) and not dense.delta.work
    short, long = (sum(forward_operations(shape, [(0, length)])) for length in (1000, 2000))
    squares = 2 * 8 * 256 * 6 * (2000**2 - 2 * 1000**2)
    assert long - 2 * short == pytest.approx(squares)


FULL = ["full_attention"] * 24


def test_half_precision_keeps_the_routers_bias_in_fp32(tmp_path: Path, alone: Topology) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config("glm4_moe"))
    model = PolicyModel(str(directory), PolicyConfig(dtype="bf16"), alone, 1.0)
    stored = load_file(directory / "model.safetensors")
    before, sent = model.fingerprint(), dict(model.weights())
    biases = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for name in biases:
        assert sent[name].dtype == torch.float32 and torch.equal(sent[name], stored[name])
        assert not torch.equal(stored[name], stored[name].bfloat16().float())
    bias = named_parameters(model.chunks)["decoder.layers.1.mlp.router.expert_bias"]
    bias += 1e-6
    assert model.fingerprint() != before


def test_layers_for_further_tokens_are_not_trained(tmp_path: Path, alone: Topology) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("glm4_moe", num_mtp_layers=1))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model = PolicyModel(str(directory), PolicyConfig(), alone, 1.0)
    assert dict(model.weights()).keys() == tensors.keys() - {"model.layers.4.eh_proj.weight"}
    tensors["model.layers.5.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="num_hidden_layers"):
        PolicyModel(str(directory), PolicyConfig(), alone, 1.0)


def test_a_bias_balances_in_place_of_a_loss(alone: Topology) -> None:
    with pytest.raises(UserError, match=r"moe_aux_loss_coeff=0\.01 needs a softmax router"):
        build.transformer_config(
            published("GLM-4.5-Air"), PolicyConfig(moe_aux_loss_coeff=0.01), alone
        )


@pytest.mark.parametrize(
    ("name", "rope", "named"),
    [
        ("Qwen3-8B", {"rope_type": "yarn", "factor": 4.0}, "rope_type='yarn'"),
        ("Qwen3-8B", {"rope_type": "linear", "factor": 4.0}, "rope_type='linear'"),
        ("Qwen3-8B", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary"),
        ("Llama-3.1-8B", LLAMA3_ROPE | {"high_freq_factor": 2.0}, "high_freq_factor=2"),
        ("GLM-4.5-Air", {"rope_type": "yarn", "factor": 4.0}, "rope_type='yarn'"),
        ("DeepSeek-V3", {"rope_type": "llama3"}, "rope_type='llama3'"),
        ("DeepSeek-V3", YARN | {"truncate": False}, "rope truncate=False"),
        ("DeepSeek-V3", YARN | {"attention_factor": 0.5}, "rope attention_factor=0.5"),
    ],
)
def test_unsupported_rotary_embeddings_are_refused(
    name: str, rope: dict[str, Any], named: str, alone: Topology
) -> None:
    hf = published(name)
    hf.rope_parameters = {"rope_theta": 1e6} | rope
    with pytest.raises(UserError, match=named):
        build.transformer_config(hf, PolicyConfig(), alone)
