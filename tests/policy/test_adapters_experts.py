"""Adapters of experts against transformers in float64, with the weights W + s B A as its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from megatron_stare.config import AdaptersConfig, PolicyConfig
from megatron_stare.policy.huggingface.peft_files import SIDES, projections
from megatron_stare.policy.model import PolicyModel
from megatron_stare.policy.topology import Topology
from tests.policy.huggingface.test_families_float64 import (
    Float64,
    exact_angles,
    log_probs,
    relative,
)
from tests.policy.test_model_experts import token_ids
from tests.tiny_models import tiny_config, write_checkpoint

_OF_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight")


def in_one_tensor(weights: dict[str, Tensor], whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of transformers, which has a layer's experts in one tensor."""
    found, parts = {}, dict[str, dict[str, list[Tensor]]]()
    for name, weight in weights.items():
        if match := _OF_EXPERT.fullmatch(name):
            parts.setdefault(match[1], {}).setdefault(match[2], []).append(weight)
        else:
            found[name] = weight
    for place, own in parts.items():
        for name, leaves in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
            if all(leaf in own for leaf in leaves):
                pairs = zip(*(own[leaf] for leaf in leaves), strict=True)
                found[f"{place}.{name}"] = torch.stack([torch.cat(pair) for pair in pairs])
    assert found.keys() <= whole.keys()
    return found


@pytest.mark.parametrize(
    ("family", "targets", "experts"),
    [
        ("qwen3_moe", "gate,up,down", "each"),
        ("qwen3_moe", "q,down", "shared"),
        ("glm4_moe", "q,v,gate,up,down", "each"),
        ("glm4_moe", "gate,up,down", "shared"),
        ("glm4_moe", "gate,up,down", "none"),
        ("deepseek_v3", "q,k,v,o,gate,up,down", "each"),
    ],
)
def test_values_and_gradients_are_those_of_changed_weights(
    family: str,
    targets: str,
    experts: Any,
    topology: Topology,
    tmp_path: Path,
) -> None:
    directory = write_checkpoint(tmp_path / "model", tiny_config(family), seed=3)
    settings = AdaptersConfig(rank=3, alpha=8.0, targets=targets, experts=experts)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **eager)
    model = PolicyModel(str(directory), PolicyConfig(), topology, 1.0, settings, seed=1)
    before = {name: weight.double() for name, weight in model.weights()}
    (ours,) = model.chunks
    from megatron.core.models.common.embeddings import RotaryEmbedding

    ours.double().config.moe_router_dtype = "fp64"
    parameters, dice = dict(ours.named_parameters()), torch.Generator().manual_seed(5)
    twins = {}
    for name in (name for name in parameters if name.startswith("adapters.")):
        value = 0.2 * torch.randn(parameters[name].shape, generator=dice, dtype=torch.float64)
        parameters[name].data.copy_(value)
        twins[name] = value.clone().requires_grad_()
    changed = {}
    for each in projections(model.hf, settings):
        a, b = (twins[each.key(side)] for side in SIDES)
        changed[each.weight] = before[each.weight] + 8.0 / 3 * b @ a
    assert any(map(_OF_EXPERT.fullmatch, changed)) == (experts != "none")
    ids_BS = token_ids()
    with Float64():
        base.model.rotary_emb = type(base.model.rotary_emb)(base.config)
        for module in ours.modules():
            if isinstance(module, RotaryEmbedding):
                exact_angles(module, model.hf.rope_parameters)
        own = ours(ids_BS, torch.arange(24).expand_as(ids_BS), None)
        theirs = functional_call(
            base, in_one_tensor(before | changed, base.state_dict()), (ids_BS,)
        )
        found, expected = log_probs(own, ids_BS), log_probs(theirs.logits, ids_BS)
        for values in (found, expected):
            values.square().sum().backward()
        merged = dict(model.weights())
    assert relative(found, expected) < 1e-12
    for name, twin in twins.items():
        gradient = parameters[name].grad
        assert gradient is not None and twin.grad is not None
        assert relative(gradient, twin.grad) < 1e-10, name
    moved = [name for name, twin in twins.items() if twin.grad is not None and twin.grad.any()]
    assert len(moved) > 0.8 * len(twins)  # an expert may see no token
    assert not [
        name
        for name, parameter in parameters.items()
        if name not in twins and parameter.grad is not None
    ]
    for name, weight in merged.items():
        torch.testing.assert_close(
            weight, changed.get(name, before[name]).detach(), rtol=1e-12, atol=1e-14
        )
