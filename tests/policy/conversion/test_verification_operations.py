"""Megatron's operations compared with transformers': equal if nothing is wrong, and an operation
that is changed on one side is the first one named.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import build
from megatron_stare.policy.conversion import verification
from megatron_stare.policy.conversion.verification import TOLERANCES, first_beyond, first_unequal
from megatron_stare.policy.huggingface import weights as hf_weights
from tests.policy.conversion.conftest import FAMILIES

IDS = torch.randint(1, 257, (24,), generator=torch.Generator().manual_seed(4)).tolist()
TOLERANCE = TOLERANCES[torch.float32]


def both(directory, topology, dtype: str = "fp32"):
    """Megatron's chunk, transformers' model, and their config."""
    hf = build.read_hf_config(str(directory))
    (ours,) = build.build_model(hf, PolicyConfig(dtype=dtype), topology)
    hf_weights.load_hf([ours], str(directory), hf, topology)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=build.DTYPES[dtype])
    return ours, theirs, hf


def compared(ours, theirs, hf):
    return verification.compare_operations(ours, theirs, hf, IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_tensors_are_within_rounding(family, sources, alone):
    ours, theirs, hf = both(sources[family], alone)
    found = compared(ours, theirs, hf)
    assert first_beyond(found, TOLERANCE) is None
    assert [each.name for each in found] == [each.name for each in verification.operations(hf)]
    assert found[0].equal == 1 and found[-1].scale > 0.1
    assert not any(module._forward_hooks for module in [*ours.modules(), *theirs.modules()])


def test_bf16_is_within_its_tolerance(sources, alone):
    ours, theirs, hf = both(sources["qwen3"], alone, "bf16")
    assert first_beyond(compared(ours, theirs, hf), TOLERANCES[torch.bfloat16]) is None
    more("model.layers.1.mlp.up_proj.weight", 1.02)(theirs)
    found = first_unequal(compared(ours, theirs, hf))
    assert found is not None and found.equal < 1 and found.difference > 0


def more(path: str, factor: float = 1.05, count: int | None = 4) -> Callable[[nn.Module], None]:
    """Multiply the first `count` weights of a parameter, or all of them."""

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(path).view(-1)[:count] *= factor

    return change


def wider_eps(path: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.get_submodule(path).variance_epsilon = 0.1

    return change


def other_rope(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq *= 0.9


def other_choice(model: nn.Module) -> None:
    model.model.layers[1].mlp.gate.top_k = 2


CHANGES = {
    "embedding": ("qwen2", more("model.embed_tokens.weight", count=None)),
    "layer 0: input norm": ("qwen2", wider_eps("model.layers.0.input_layernorm")),
    "layer 1: query": ("qwen2", more("model.layers.1.self_attn.q_proj.bias", 3.0)),
    "layer 1: value": ("llama", more("model.layers.1.self_attn.v_proj.weight", 3.0)),
    "layer 1: key norm": ("qwen3", wider_eps("model.layers.1.self_attn.k_norm")),
    "layer 0: key with rope": ("qwen3", other_rope),
    "layer 0: attention output": ("qwen2", more("model.layers.0.self_attn.o_proj.weight", 3.0)),
    "layer 1: norm after attention": (
        "qwen3",
        more("model.layers.1.post_attention_layernorm.weight"),
    ),
    "layer 0: up": ("qwen3", more("model.layers.0.mlp.up_proj.weight", 3.0)),
    "layer 1: down": ("qwen2", more("model.layers.1.mlp.down_proj.weight", 3.0)),
    "layer 1: choice of experts": ("qwen3_moe", other_choice),
    "layer 2: experts": ("qwen3_moe", more("model.layers.2.mlp.experts.down_proj", 100.0)),
    "final norm": ("qwen3_moe", more("model.norm.weight")),
    "logits": ("qwen2", more("lm_head.weight", 3.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_most_changed_tensor_is_named_first(name, sources, alone):
    family, change = CHANGES[name]
    ours, theirs, hf = both(sources[family], alone)
    change(theirs)
    first = first_beyond(compared(ours, theirs, hf), TOLERANCE)
    assert first is not None and first.name == name


def test_nan_is_beyond_any_tolerance(sources, alone):
    ours, theirs, hf = both(sources["qwen2"], alone)
    more("model.layers.1.mlp.gate_proj.weight", float("nan"))(theirs)
    first = first_beyond(compared(ours, theirs, hf), 1e9)
    assert first is not None and first.name == "layer 1: gate"
