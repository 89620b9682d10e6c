"""Adapters against peft and transformers in float64, and every layout against one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_stare.config import AdaptersConfig, Config, LossConfig, PolicyConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.adapters import adapters_of, attach, merge_metrics
from megatron_stare.policy.huggingface.peft_files import projections
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from tests.distributed import LayoutResults
from tests.policy.huggingface.test_families_float64 import (
    Float64,
    exact_angles,
    log_probs,
    relative,
)
from tests.policy.test_actor_sequences import rounds_of_groups
from tests.policy.test_model_experts import token_ids
from tests.tiny_models import tiny_config, write_checkpoint

TARGETS = ("q,k,v,o,gate,up,down", "q,v", "k,up,o")
LATENT = "q,k,v,o"
CASES = [(family, targets) for family in ("qwen2", "qwen3_tied") for targets in TARGETS]
CASES += [("deepseek_v3", LATENT), ("deepseek_v3", "q"), ("glm4_moe_lite", "k,v")]
LORA = AdaptersConfig(rank=3, alpha=8.0)


@pytest.fixture(scope="module")
def alone() -> Iterator[Topology]:
    yield topologies.start(PolicyConfig())
    topologies.stop()


@pytest.mark.parametrize(("family", "targets"), CASES)
def test_values_and_gradients_are_those_of_peft(
    family: str, targets: str, alone: Topology, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model  # here, because the ranks import this file too

    directory = write_checkpoint(tmp_path / "model", tiny_config(family), seed=3)
    settings = dataclasses.replace(LORA, targets=targets)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **eager)
    adapted = projections(base.config, settings)
    leaves = sorted({each.leaf for each in adapted})
    wanted = LoraConfig(r=3, lora_alpha=8, target_modules=leaves, task_type="CAUSAL_LM")
    model = PolicyModel(str(directory), PolicyConfig(), alone, 1.0, settings, seed=1)
    (ours,) = model.chunks
    from megatron.core.models.common.embeddings import RotaryEmbedding

    ours.double().config.moe_router_dtype = "fp64"
    ids_BS, dice = token_ids(), torch.Generator().manual_seed(5)
    with Float64():
        base.model.rotary_emb = type(base.model.rotary_emb)(base.config)
        for module in ours.modules():
            if isinstance(module, RotaryEmbedding):
                exact_angles(module, model.hf.rope_parameters)
        theirs = get_peft_model(base, wanted)
        pairs: list[tuple[str, Any, Any]] = []
        for name, parameter in theirs.named_parameters():
            if ".lora_" not in name:
                continue
            words = name.split(".")
            layer, leaf, side = words[words.index("layers") + 1], words[-4], words[-3]
            own = ours.adapters[layer]
            (found,) = [p[leaf] for m in own.values() if leaf in (p := getattr(m, side))]
            value = 0.2 * torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
            with torch.no_grad():
                parameter.data = value.clone()
                found.copy_(value)
            pairs.append((name, parameter, found))
        assert len(pairs) == 2 * len(adapted) >= 4 * len(targets.split(","))
        expected = log_probs(theirs(ids_BS).logits, ids_BS)
        found = log_probs(ours(ids_BS, torch.arange(24).expand_as(ids_BS), None), ids_BS)
        for each in (expected, found):
            each.square().sum().backward()
        merged = dict(model.weights())
        whole = theirs.merge_and_unload().state_dict()
    assert relative(found, expected) < 1e-12
    for name, parameter, own_parameter in pairs:
        assert parameter.grad.norm() > 0
        assert relative(own_parameter.grad, parameter.grad) < 1e-10, name
    assert all(parameter.grad is None for parameter in ours.decoder.parameters())
    common = merged.keys() & whole.keys()  # transformers has a layer's experts in one tensor
    assert {each.weight for each in adapted} <= common
    for name in common:
        assert relative(merged[name], whole[name]) < 1e-12, name


TP, PP, CP = (
    f"policy.{name}_parallel_size=2" for name in ("tensor_model", "pipeline_model", "context")
)
VPP, SP = "policy.virtual_pipeline_model_parallel_size=2", "policy.sequence_parallel=true"
FULL, SPREAD = "policy.recompute_granularity=full", "policy.use_distributed_optimizer=true"
SELECTIVE = ("policy.recompute_granularity=selective", "policy.recompute_modules=mlp,core_attn")
FEW = "adapters.targets=gate"
EP, OF_LATENT = "policy.expert_model_parallel_size=2", f"adapters.targets={LATENT}"
# Whole experts on every rank, of which SP divides the tokens.
WHOLE = (TP, SP, "policy.expert_tensor_parallel_size=1")
SHARED = "adapters.experts=shared"
SMALLER = "policy.max_tokens_per_gpu=60"  # several micro-batches for each data rank too
LAYOUTS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "one": (),
        "padded": ("policy.packed_sequences=false",),
        "recompute": (FULL,),
        "selective": SELECTIVE,
        "gate": (FEW,),
        "gate recompute": (FEW, FULL),
        "gate selective": (FEW, *SELECTIVE),
        "bf16": ("policy.dtype=bf16",),
        "latent": (OF_LATENT,),
        "latent recompute": (OF_LATENT, FULL),
        "experts": (),
        "experts recompute": (FULL,),
        "shared": (SHARED,),
    },
    2: {
        "TP2": (TP,),
        "TP2 SP": (TP, SP),
        "TP2 SP recompute": (TP, SP, FULL),
        "PP2": (PP,),
        "PP2 VPP2 recompute": (PP, VPP, FULL),
        "CP2": (CP,),
        "DP2 distributed optimizer": (SPREAD, SMALLER),
        "latent TP2 SP": (OF_LATENT, TP, SP),
        "latent PP2": (OF_LATENT, PP),
        "latent CP2": (OF_LATENT, CP),
        "latent EP2": (OF_LATENT, EP),
        "experts EP2 distributed optimizer": (EP, SPREAD, SMALLER),
        "experts TP2 EP2": (*WHOLE, EP),
        "experts TP2": WHOLE,
        "shared EP2": (SHARED, EP),
        "shared TP2 EP2": (SHARED, *WHOLE, EP),
    },
}
# Ranks share two cores: all but these are run with the slow tests.
QUICK = (
    *("one", "padded", "recompute", "gate", "gate selective"),
    *("bf16", "latent", "experts", "shared"),
    *("TP2 SP recompute", "PP2 VPP2 recompute", "CP2", "DP2 distributed optimizer"),
    *("latent TP2 SP", "experts TP2 EP2", "shared EP2"),
)


def two_updates(directory: str, options: tuple[str, ...]) -> dict[str, Any]:
    """Losses, norms, merged weights and the frozen weights' fingerprints over two updates.

    With an epsilon of 1 Adam's step is g / (|g| + 1): the adapters show the gradient. The first
    update moves B, which is zero before it, and the second one A.
    """
    config = override(
        Config(),
        [
            f"policy.hf_checkpoint={directory}",
            *("policy.max_tokens_per_gpu=100", "optimizer.lr=1", "optimizer.adam_eps=1"),
            *("adapters.rank=3", "adapters.alpha=8", "optimizer.weight_decay=0", *options),
        ],
    )
    topology = topologies.start(config.policy)
    actor = Actor(config, topology, total_steps=10)
    objective, settings = find_objective("grpo"), LossConfig(name="grpo")
    before = actor.base_fingerprint
    start = actor.score(actor.pack(rounds_of_groups(), 0))
    with actor.base():
        base = actor.score(actor.pack(rounds_of_groups(), 0))
    metrics, batch = [], start
    for _ in range(2):
        signals = objective.plan(batch, settings, topology.across, {})
        metrics.append(actor.update(batch, objective.bind(settings), signals)[0])
        batch = actor.score(actor.pack(rounds_of_groups(), 0))
    with actor.base():
        after = actor.score(actor.pack(rounds_of_groups(), 0))
    weights = {name: tensor.clone() for name, tensor in actor.weights()}
    del actor.base_fingerprint
    merge = merge_metrics(actor.chunks, topology)
    with torch.no_grad():  # only one of a layer's matrices differs from its base
        for each in adapters_of(actor.chunks):
            for b in each.lora_B.values() if "o_proj" not in each.lora_A else ():
                b.zero_()
    assert dict(actor.weights())  # an export counts the entries that it merges
    return {
        "metrics": metrics,
        "weights": weights,
        "prints": (before, actor.base_fingerprint),
        "surprisal": [b.surprisal_T for b in (start, base, after, batch)],
        "trainable": sum(
            p.numel() for c in actor.chunks for p in c.parameters() if p.requires_grad
        ),
        "merge": merge,
        "share": merge_metrics(actor.chunks, topology)["adapters/moved_entries"],
    }


def under_each_layout(
    rank: int, world_size: int, directory: str, names: list[str]
) -> dict[str, dict[str, Any]]:
    """The results by layout; names say which of the three models is trained."""
    return {
        name: two_updates(f"{directory}/{model_of(name)}", LAYOUTS[world_size][name])
        for name in names
    }


def model_of(name: str) -> str:
    models = {"latent": "latent", "experts": "experts", "shared": "experts"}
    return models.get(name.split()[0], "grouped")


def compared_with(name: str) -> str:
    """The layout of one rank with the same model and targets."""
    return name.split()[0] if name.startswith(("gate", "latent", "experts", "shared")) else "one"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> LayoutResults:
    directory = tmp_path_factory.mktemp("adapters")
    config = tiny_config("qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    write_checkpoint(directory / "grouped", config)
    write_checkpoint(directory / "latent", tiny_config("deepseek_v3"))
    write_checkpoint(directory / "experts", tiny_config("glm4_moe"))
    return LayoutResults(under_each_layout, directory, LAYOUTS, QUICK)


def parameter(layout: str) -> Any:
    return pytest.param(layout, marks=[] if layout in QUICK else [pytest.mark.slow])


ALL = [parameter(name) for layouts in LAYOUTS.values() for name in layouts]


@pytest.mark.parametrize("name", [each for each in ALL if each.values != ("bf16",)])
def test_every_layout_trains_as_one_rank_does(name: str, runs: LayoutResults) -> None:
    one = runs[compared_with(name)][0]
    for rank in runs[name]:
        for own, expected in zip(rank["metrics"], one["metrics"], strict=True):
            assert own["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
            assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-5)
            assert own["grad_norm"] > 0
        for weight, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, one["weights"][weight], rtol=2e-5, atol=2e-6)
        assert rank["share"] == pytest.approx(one["share"], rel=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_the_frozen_weights_stay_and_are_the_start_and_the_reference(
    name: str, runs: LayoutResults
) -> None:
    """The fingerprint of the frozen weights is the same under every layout."""
    for rank in runs[name]:
        assert len(set(rank["prints"])) == 1 and len(rank["prints"][0]) == 16
        if name != "bf16":
            assert rank["prints"] == runs[compared_with(name)][0]["prints"]
        start, base, after, moved = rank["surprisal"]
        assert torch.equal(start, base) and torch.equal(start, after)
        assert not moved.numel() or not torch.equal(start, moved)


def test_only_adapters_have_gradients(runs: LayoutResults) -> None:
    """3 (in + out) numbers per projection of H=32, Q=48, K=24, F=44, in four layers."""
    sides = ((32, 48), (32, 24), (32, 24), (48, 32), (32, 44), (32, 44), (44, 32))
    assert runs["one"][0]["trainable"] == 4 * 3 * sum(a + b for a, b in sides)


def test_merging_into_bf16_reports_what_rounding_loses(runs: LayoutResults) -> None:
    exact, rounded = runs["one"][0]["merge"], runs["bf16"][0]["merge"]
    assert 0.9 < exact["adapters/moved_entries"] <= 1 and exact["adapters/merge_error"] < 1e-5
    assert 0 < rounded["adapters/moved_entries"] < 1
    assert 1e-4 < rounded["adapters/merge_error"] < 1


def test_a_merged_weight_is_base_plus_scaled_product(alone: Topology, tmp_path: Path) -> None:
    """W + s B A of bf16 weights: one rounding of the exact sum; what it moves is counted."""
    directory = write_checkpoint(tmp_path / "model", tiny_config("qwen2"), seed=3)
    model = PolicyModel(str(directory), PolicyConfig(dtype="bf16"), alone, 1.0)
    before = {name: tensor.clone() for name, tensor in model.weights()}
    attach(model.chunks, model.hf, model.policy, alone, LORA, seed=2)
    for name, tensor in model.weights():
        assert torch.equal(tensor, before[name]), name
    assert merge_metrics(model.chunks, alone)["adapters/moved_entries"] == 0
    low_rank = model.chunks[0].adapters["1"]["linear_proj"]
    low_rank.lora_B["o_proj"].data.normal_(std=0.01)
    name = "model.layers.1.self_attn.o_proj.weight"
    after = dict(model.weights())
    a, b = low_rank.lora_A["o_proj"].double(), low_rank.lora_B["o_proj"].double()
    expected = (before[name].double() + 8 / 3 * b @ a).float().bfloat16()
    assert (after[name] != expected).double().mean() < 0.01  # the sum in fp32 may round elsewhere
    torch.testing.assert_close(after[name], expected)
    adapted = [n for n in before if "proj.weight" in n]
    share = (after[name] != before[name]).sum() / sum(before[n].numel() for n in adapted)
    assert merge_metrics(model.chunks, alone)["adapters/moved_entries"] == pytest.approx(share)
