"""Qwen3-MoE, GLM-4.5 and latent attention: logits, gradients and bits under every way to lay
experts out over ranks, and what is refused by name.

One rank and TP=2 are in tests/policy/huggingface/test_weights.py, whole training steps in
tests/loop/test_trainer_layouts.py. The spawned part runs all layouts of four ranks in one world.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.policy import build, topology
from megatron_stare.policy.huggingface import weights as hf_weights
from megatron_stare.policy.huggingface.families import sparse_layers
from megatron_stare.policy.huggingface.names import from_shards, name_table
from megatron_stare.policy.topology import Topology
from tests.distributed import run_distributed
from tests.tiny_models import reference_logits, tiny_config, write_checkpoint

FAMILIES = ("qwen3_moe", "qwen3_moe_stepped", "glm4_moe", "deepseek_v3", "glm4_moe_lite")
TP2 = PolicyConfig(tensor_model_parallel_size=2, sequence_parallel=True)
LAYOUTS = {
    "EP2 DP2": PolicyConfig(expert_model_parallel_size=2),
    "EP4": PolicyConfig(expert_model_parallel_size=4),
    "PP2 EP2": PolicyConfig(pipeline_model_parallel_size=2, expert_model_parallel_size=2),
    "TP2 EP2": dataclasses.replace(TP2, expert_model_parallel_size=2),
    "TP2 EP4 whole experts": dataclasses.replace(
        TP2, expert_model_parallel_size=4, expert_tensor_parallel_size=1
    ),
    "TP2 PP2": dataclasses.replace(TP2, pipeline_model_parallel_size=2),
}


def token_ids() -> Tensor:
    return torch.randint(71, (3, 24), generator=torch.Generator().manual_seed(7))


def loaded(directory: Path, place: Topology, policy: PolicyConfig) -> tuple[Any, list[Any]]:
    hf = build.read_hf_config(str(directory))
    chunks = [chunk.eval() for chunk in build.build_model(hf, policy, place)]
    hf_weights.load_hf(chunks, str(directory), hf, place)
    return hf, chunks


def logits_of(model: Any, ids_BS: Tensor, place: Topology) -> Tensor | None:
    """The whole vocabulary's logits on the last pipeline stage, None on the others."""
    if place.pipeline_rank > 0:
        hidden = torch.empty(
            ids_BS.shape[1] // place.tensor_size, ids_BS.shape[0], model.config.hidden_size
        )
        dist.recv(hidden, group=place.pipeline, group_src=place.pipeline_rank - 1)
        model.set_input_tensor(hidden)
    with torch.no_grad():
        output = model(ids_BS, torch.arange(ids_BS.shape[1]).expand_as(ids_BS), None)
    if not place.is_last_stage:
        dist.send(output.contiguous(), group=place.pipeline, group_dst=place.pipeline_rank + 1)
        return None
    shards = [torch.empty_like(output) for _ in range(place.tensor_size)]
    dist.all_gather(shards, output.contiguous(), group=place.tensor)
    return torch.cat(shards, dim=-1)[..., :71]


def under_each_layout(rank: int, world_size: int, directories: dict[str, Path]) -> dict[Any, Any]:
    """Per layout and family: the logits, every tensor of HFWeights, the experts this rank holds,
    and what arrives where rank 0 alone is given the tensors.
    """
    found: dict[Any, Any] = {}
    for layout, policy in LAYOUTS.items():
        place = topology.start(policy)
        for family, directory in directories.items():
            hf, chunks = loaded(directory, place, policy)
            tensors = {
                name: tensor.clone() for name, tensor in hf_weights.HFWeights(chunks, hf, place)
            }
            held = {name for name in hf_weights.named_parameters(chunks) if ".experts." in name}
            found[layout, family] = (logits_of(chunks[0], token_ids(), place), tensors, held)
            found[layout, family, "onto first"] = dict(
                hf_weights.HFWeights(chunks, hf, place, onto_first=True)
            )
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    return {
        family: write_checkpoint(root / family, tiny_config(family), seed)
        for seed, family in enumerate(FAMILIES)
    }


@pytest.fixture(scope="module")
def ranks(checkpoints: dict[str, Path]) -> list[dict[Any, Any]]:
    return run_distributed(under_each_layout, 4, checkpoints)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_those_of_transformers(
    layout: str, family: str, ranks: list[dict[Any, Any]], checkpoints: dict[str, Path]
) -> None:
    expected = reference_logits(checkpoints[family], token_ids())
    found = [
        logits for logits, _, _ in (rank[layout, family] for rank in ranks) if logits is not None
    ]
    assert len(found) == 4 // LAYOUTS[layout].pipeline_model_parallel_size
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_comes_back_bit_for_bit_on_every_rank(
    layout: str, family: str, ranks: list[dict[Any, Any]], checkpoints: dict[str, Path]
) -> None:
    stored = load_file(checkpoints[family] / "model.safetensors")
    for rank in ranks:
        _, tensors, _ = rank[layout, family]
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in tensors.items())
    onto_first = [rank[layout, family, "onto first"] for rank in ranks]
    assert list(onto_first[0]) == list(ranks[0][layout, family][1])
    assert all(torch.equal(tensor, stored[name]) for name, tensor in onto_first[0].items())
    assert not any(onto_first[1:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_only_its_own_experts(
    layout: str, family: str, ranks: list[dict[Any, Any]]
) -> None:
    policy, config = LAYOUTS[layout], tiny_config(family)
    everything = {entry.megatron for entry in name_table(config) if entry.expert is not None}
    held = [rank[layout, family][2] for rank in ranks]
    assert set().union(*held) == everything
    assert sum(map(len, held)) == len(everything) * 4 // (
        policy.expert_model_parallel_size * policy.pipeline_model_parallel_size
    )


@pytest.fixture
def alone() -> Any:
    yield topology.start(PolicyConfig())
    topology.stop()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_transformers(
    family: str, checkpoints: dict[str, Path], alone: Topology
) -> None:
    ids_BS = token_ids()
    theirs = AutoModelForCausalLM.from_pretrained(
        checkpoints[family], dtype=torch.float32, attn_implementation="eager"
    )
    hf, (ours,) = loaded(checkpoints[family], alone, PolicyConfig())
    for logits in (theirs(ids_BS).logits, ours(ids_BS, torch.arange(24).expand_as(ids_BS), None)):
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten()
        ).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    parameters = hf_weights.named_parameters([ours])
    for entry in name_table(hf):
        if entry.dtype is not None:  # a router's bias is not trained
            continue
        gradients = from_shards(entry, [parameters[entry.megatron].grad])  # type: ignore[list-item]
        for name, gradient in zip(entry.hf, gradients, strict=True):
            # fp32 rounds by up to 1.1e-6 on some processors; in float64 the bound is 1e-9
            # (tests/policy/huggingface/test_families_layouts.py).
            torch.testing.assert_close(
                gradient, transformers_gradient(expected, name), atol=2e-6, rtol=1e-5, msg=name
            )
            if name.endswith("mlp.gate.weight"):
                assert gradient.abs().max() > 1e-4


def transformers_gradient(gradients: dict[str, Any], name: str) -> Tensor:
    """The gradient of one checkpoint tensor;
    transformers holds experts as [E, 2F, H] and [E, H, F].
    """
    if name in gradients:
        return gradients[name]
    layer, rest = name.split(".mlp.experts.")
    expert, part, _ = rest.split(".")
    if part == "down_proj":
        return gradients[f"{layer}.mlp.experts.down_proj"][int(expert)]
    gate, up = gradients[f"{layer}.mlp.experts.gate_up_proj"][int(expert)].chunk(2)
    return gate if part == "gate_proj" else up


def test_the_families_differ_where_they_should(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    assert sparse_layers(tiny_config("qwen3_moe")) == [False, True, True, True]
    assert sparse_layers(tiny_config("qwen3_moe_stepped")) == [False, True, False, True]
    other = write_checkpoint(tmp_path, tiny_config("qwen3_moe", norm_topk_prob=False), seed=0)
    difference = reference_logits(other, token_ids()) - reference_logits(
        checkpoints["qwen3_moe"], token_ids()
    )
    assert difference.abs().max() > 1e-2, "a model that ignored norm_topk_prob would show"


def refused(directory: Path, place: Topology, *names: str, **policy: Any) -> None:
    with pytest.raises(UserError) as caught:
        loaded(directory, place, PolicyConfig(**policy))
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"output_router_logits": True},
        {"num_experts_per_tok": 9},
        {"num_experts_per_tok": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_field_without_effect_on_the_model_is_refused(
    change: dict[str, Any], tmp_path: Path, alone: Topology
) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("qwen3_moe"))
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(directory, alone, *change)


def test_layouts_that_do_not_divide_are_refused(
    checkpoints: dict[str, Path], tmp_path: Path, alone: Topology
) -> None:
    sparse, dense = checkpoints["qwen3_moe"], write_checkpoint(tmp_path, tiny_config("qwen3"))
    refused(
        sparse, alone, "expert_model_parallel_size=3", "num_experts=8", expert_model_parallel_size=3
    )
    refused(sparse, alone, "expert_tensor_parallel_size=8", "=20", expert_tensor_parallel_size=8)
    refused(sparse, alone, "sequence_parallel", tensor_model_parallel_size=2)
    refused(dense, alone, "expert_model_parallel_size=2", "qwen3", expert_model_parallel_size=2)
    refused(dense, alone, "expert_tensor_parallel_size=2", "qwen3", expert_tensor_parallel_size=2)
    with pytest.raises(
        UserError, match=r"expert_model_parallel_size=2.*= 2 does not divide the 1 process"
    ):
        topology.start(PolicyConfig(expert_model_parallel_size=2))


@pytest.mark.parametrize("matrix", ["gate_up_proj", "down_proj"])
def test_experts_that_are_there_twice_are_refused(
    matrix: str, tmp_path: Path, alone: Topology
) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("qwen3_moe"))
    name = f"model.layers.1.mlp.experts.{matrix}"
    tensors = load_file(directory / "model.safetensors") | {name: torch.zeros(8, 40, 32)}
    save_file(tensors, directory / "model.safetensors")
    refused(directory, alone, name, "mlp.experts.0.", "remove one of them")


def test_a_missing_expert_is_named(tmp_path: Path, alone: Topology) -> None:
    directory = write_checkpoint(tmp_path, tiny_config("qwen3_moe"))
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    refused(directory, alone, "model.layers.2.mlp.experts.5.up_proj.weight")
