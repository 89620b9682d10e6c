"""All linear layers in blocks of E4M3: what the trainer holds, what leaves it, and its gradients,
against transformers in float64 on rounded weights and under every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.collect.rounds import scatter_groups
from megatron_stare.config import Config, PolicyConfig, UserError, override
from megatron_stare.policy import build, topology
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.huggingface import weights as hf_weights
from megatron_stare.policy.huggingface.fp8_weights import (
    DecodedWeights,
    EncodedWeights,
    RoundedWeights,
    block_matrices,
    check_server,
)
from megatron_stare.policy.huggingface.names import from_shards, name_table
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout, Signals
from tests.distributed import run_distributed
from tests.policy.huggingface.test_families_float64 import Float64, log_probs, relative
from tests.policy.test_experts import EP, SP, SURPRISAL, TP, shape_of
from tests.policy.test_experts_rounded import LENGTHS, TOKENS, an_actor, fused, groups_of, held
from tests.policy.test_model_experts import token_ids, transformers_gradient
from tests.reference import e4m3_blocks
from tests.tiny_models import tiny_config, write_checkpoint

E4M3 = torch.float8_e4m3fn
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "half a block a head": ("qwen3", {"head_dim": 64}),  # keys and values lie apart in each group
    "experts": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 256}),
}
ROUNDED = ("policy.weight_quantization=fp8", "policy.dtype=bf16")
DISTRIBUTED = "policy.use_distributed_optimizer=true"
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "TP2 SP": ("dense", (TP, SP)),
    "PP2": ("dense", ("policy.pipeline_model_parallel_size=2",)),
    "DP2, distributed optimizer": ("dense", (DISTRIBUTED,)),
    "EP2": ("experts", (EP, "policy.routing_replay=rollout")),
    "TP2 SP, split experts": ("experts", (TP, SP, "policy.routing_replay=rollout")),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("fp8"), {}
    for name, (family, changes) in MODELS.items():
        directory = write_checkpoint(root / name, tiny_config(family, **(WIDE | changes)), seed=5)
        file = directory / "model.safetensors"
        save_file({n: uneven(t) for n, t in load_file(file).items()}, file, {"format": "pt"})
        found[name] = directory
    return found


def uneven(tensor: Tensor) -> Tensor:
    """Smaller here and there, so that other blocks have other scales, and round otherwise."""
    if tensor.dim() < 2:
        return tensor
    row_R1, column_C = torch.arange(len(tensor))[:, None], torch.arange(tensor.shape[1])
    return tensor * 2.0 ** -((row_R1 // 32 % 5) + (column_C // 48 % 3))


@pytest.fixture(scope="module")
def alone() -> Iterator[Topology]:
    yield topology.start(PolicyConfig())
    topology.stop()


def is_encoded(name: str) -> bool:
    """Stated apart from the code that is tested."""
    return name.endswith("_proj.weight")


@pytest.mark.parametrize("model", MODELS)
def test_only_linear_layers_are_encoded(model: str, checkpoints: dict[str, Path]) -> None:
    stored = load_file(checkpoints[model] / "model.safetensors")
    found = block_matrices(build.read_hf_config(str(checkpoints[model])))
    assert found == {name for name in stored if is_encoded(name)}


@pytest.mark.parametrize("model", MODELS)
def test_rounded_training_is_transformers_with_rounded_weights(
    model: str, checkpoints: dict[str, Path], alone: Topology
) -> None:
    """Log-probs and the gradient by every weight, in float64."""
    directory, ids_BS = checkpoints[model], token_ids()
    hf = build.read_hf_config(str(directory))
    stored = load_file(directory / "model.safetensors")
    weights = {n: e4m3_blocks(t) if is_encoded(n) else t.double() for n, t in stored.items()}
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **eager)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(fused(name, parameter, weights))
    (ours,) = build.build_model(hf, PolicyConfig(), alone)
    hf_weights.load_hf([ours], str(directory), hf, alone)
    RoundedWeights([ours], hf, PolicyConfig(weight_quantization="fp8")).round()
    ours.double().config.moe_router_dtype = "fp64"
    with Float64():
        expected = log_probs(theirs(ids_BS).logits, ids_BS)
        found = log_probs(ours(ids_BS, torch.arange(24).expand_as(ids_BS), None), ids_BS)
        for each in (expected, found):
            each.square().sum().backward()
    # the angles of positions are in fp32 in both
    assert relative(found, expected) < 1e-6
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    parameters = hf_weights.named_parameters([ours])
    for entry in name_table(hf):
        parts = from_shards(entry, [parameters[entry.megatron].grad])  # type: ignore[list-item]
        for name, gradient in zip(entry.hf, parts, strict=True):
            assert relative(gradient, transformers_gradient(gradients, name)) < 1e-6, name


def plain_groups() -> list[Group]:
    dice, groups = numpy.random.default_rng(3), []
    for number, (prompt, response) in enumerate(LENGTHS):
        ids = dice.integers(1, 71, prompt + response)
        logprobs, mask = numpy.full(response, -4.0, numpy.float32), numpy.ones(response, bool)
        rollout = Rollout(
            ids[prompt:],
            logprobs,
            mask,
            status="completed",
            weight_version=0,
            advantage=1.0 - number / 2,
        )
        groups.append(Group(Prompt(number, ids[:prompt], ""), (rollout,)))
    return groups


def updated(directory: Path, *options: str) -> Actor:
    actor = an_actor(directory, *options)
    groups = plain_groups() if actor.routers is None else groups_of(shape_of(directory))
    batch = actor.score(actor.pack(scatter_groups(groups, actor.topology), 0))
    assert batch.surprisal_T is not None
    one_T = torch.ones_like(batch.surprisal_T)
    actor.update(batch, SURPRISAL, Signals(coefficient_T=one_T / TOKENS, weight_T=one_T, state={}))
    return actor


def sent(actor: Actor, onto_first: bool) -> dict[str, Tensor]:
    """As bytes where it is FP8, which cannot be pickled."""
    weights = hf_weights.HFWeights(actor.chunks, actor.hf, actor.topology, onto_first)
    return {
        name: tensor.clone().view(torch.uint8) if tensor.itemsize == 1 else tensor.clone()
        for name, tensor in EncodedWeights(weights, block_matrices(actor.hf))
    }


def under_each_layout(rank: int, size: int, checkpoints: dict[str, Path]) -> dict[str, Any]:
    found = {}
    for name, (model, layout) in LAYOUTS.items():
        actor = updated(checkpoints[model], *ROUNDED, *layout)
        rounded = (held(actor), sent(actor, False), sent(actor, True))
        plain = an_actor(checkpoints[model], *ROUNDED[1:], *layout)  # a trainer that does not round
        found[name] = (*rounded, held(plain), sent(plain, True))
    return found


@pytest.fixture(scope="module")
def ranks(checkpoints: dict[str, Path]) -> list[dict[str, Any]]:
    return run_distributed(under_each_layout, 2, checkpoints)


def decoded(stream: dict[str, Tensor]) -> dict[str, Tensor]:
    codes = ((n, t.view(E4M3) if t.dtype == torch.uint8 else t) for n, t in stream.items())
    return dict(DecodedWeights().decode_part(codes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sent_weights_equal_trained_weights_bit_for_bit(
    layout: str, ranks: list[dict[str, Any]], checkpoints: dict[str, Path]
) -> None:
    stored = load_file(checkpoints[LAYOUTS[layout][0]] / "model.safetensors")
    for rank, found in enumerate(ranks):
        trains, everywhere, first, _, _ = found[layout]
        assert decoded(first) == {} if rank else first.keys() == everywhere.keys()
        again = decoded(everywhere)
        assert again.keys() == trains.keys() == stored.keys()
        for name, tensor in trains.items():
            assert torch.equal(again[name], tensor), name
            assert not torch.equal(tensor, stored[name].bfloat16())
            if not rank:
                assert torch.equal(everywhere[name], first[name])
            if is_encoded(name):
                assert everywhere[name].dtype == torch.uint8
                assert torch.equal(tensor.double(), e4m3_blocks(tensor)), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainer_that_does_not_round_sends_rounded_weights(
    layout: str, ranks: list[dict[str, Any]]
) -> None:
    _, _, _, trains, first = ranks[0][layout]
    for name, tensor in decoded(first).items():
        expected = e4m3_blocks(trains[name]) if is_encoded(name) else trains[name].double()
        assert torch.equal(tensor.double(), expected), name


def test_codes_in_parts_wait_only_for_their_scales() -> None:
    weight = torch.randn(128, 256).bfloat16()
    stream = list(EncodedWeights([("a", weight), ("b", weight[0])], {"a"}))
    assert [name for name, _ in stream] == ["a_scale_inv", "a", "b"]
    holder = DecodedWeights()
    parts = [dict(holder.decode_part([named])) for named in stream]
    assert [sorted(part) for part in parts] == [[], ["a"], ["b"]]
    assert torch.equal(parts[1]["a"].double(), e4m3_blocks(weight))


@pytest.mark.parametrize(
    ("changes", "ways", "experts", "words"),
    [
        (
            {"head_dim": 64, "num_attention_heads": 8},
            4,
            4,
            r"4 GPUs would hold \[64, 128\] of .*k_proj.weight \[128, 128\]",
        ),
        ({"intermediate_size": 128}, 2, 1, r"hold \[64, 128\] of .*gate_proj.weight \[128, 128\]"),
        ({"hidden_size": 192}, 1, 1, r"hold \[512, 192\] of .*q_proj.weight"),
        ({}, 2, 4, r"hold \[64, 128\] of .*experts.0.gate_proj.weight \[256, 128\]"),
        (
            {"intermediate_size": 512},
            4,
            2,
            "",
        ),  # more GPUs than key-value heads: each holds a whole head
    ],
)
def test_servers_that_would_split_blocks_are_refused(
    changes: dict[str, int], ways: int, experts: int, words: str
) -> None:
    hf = tiny_config(
        "qwen3_moe", **(WIDE | MODELS["experts"][1] | {"num_hidden_layers": 4} | changes)
    )
    if words:
        with pytest.raises(UserError, match=f"sglang.weights=fp8 has blocks .*{words}"):
            check_server(hf, block_matrices(hf), ways, experts, "sglang.weights=fp8")
    else:
        check_server(hf, block_matrices(hf), ways, experts, "sglang.weights=fp8")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("sglang.weights=fp8",), "sglang.weights=fp8 needs policy.dtype=bf16"),
        (("sglang.weights=fp8", "policy.dtype=bf16"), "nothing corrects for it"),
        (("policy.weight_quantization=fp8",), "needs policy.dtype=bf16"),
        (("policy.weight_quantization=fp8", "policy.dtype=bf16", "adapters.rank=4"), "adapters"),
    ],
)
def test_contradicting_settings_are_refused(settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        override(Config(), list(settings))


@pytest.mark.parametrize(
    "remedy",
    [
        "mismatch.correction=token_tis",
        "mismatch.old_policy=rollout",
        "policy.weight_quantization=fp8",
        "sglang.weights=fp8_uncorrected",
    ],
)
def test_each_remedy_of_uncorrected_rounding_is_taken(remedy: str) -> None:
    override(Config(), ["sglang.weights=fp8", "policy.dtype=bf16", remedy])


def test_ranks_that_would_split_a_block_are_refused() -> None:
    hf = tiny_config("qwen3", hidden_size=128, intermediate_size=128, head_dim=128)
    policy = PolicyConfig(weight_quantization="fp8", tensor_model_parallel_size=2)
    with pytest.raises(UserError, match=r"tensor_model_parallel_size=2 splits .*gate_proj.weight"):
        RoundedWeights([], hf, policy)
