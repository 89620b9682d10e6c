"""Switches follow the hardware unless the config says otherwise, and what cannot be is an error."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_stare.config import Config, PolicyConfig, TuningConfig, UserError, override
from megatron_stare.policy.tuning import (
    Hardware,
    Situation,
    batch_invariance,
    hardware,
    recompute_modules,
    resolved_switches,
    switches,
    workspace_bytes,
)
from tests.paths import ROOT

BARE = Hardware(cuda=True, capability=(9, 0), memory_bytes=80 << 30)  # no TransformerEngine
H100 = dataclasses.replace(BARE, transformer_engine=(2, 20, 2))
APEX = dataclasses.replace(BARE, weight_gradients=True)
LARGE = ("policy.dtype=bf16", "policy.use_distributed_optimizer=true")
PARALLEL = ("policy.tensor_model_parallel_size=8", "policy.sequence_parallel=true")
ENGINE = {"gradient_accumulation_fusion", "apply_rope_fusion"}
COMPILED = {"bias_activation_fusion", "bias_dropout_fusion"}
EXPERTS = {"moe_permute_fusion", "moe_router_fusion"}
NAMES = list(switches(Situation(PolicyConfig(), Hardware())))


def policy(*overrides: str) -> PolicyConfig:
    return override(Config(), [*LARGE, *overrides]).policy


def on(tuning: TuningConfig) -> set[str]:
    return {name for name in NAMES if getattr(tuning, name)}


@pytest.mark.parametrize(
    ("machine", "replicas", "experts", "expected"),
    [
        (Hardware(), 8, True, set()),
        (BARE, 1, False, COMPILED),
        (BARE, 8, True, COMPILED | {"overlap_grad_reduce"}),
        (APEX, 1, False, COMPILED | {"gradient_accumulation_fusion"}),
        (H100, 1, False, COMPILED | ENGINE),
        (H100, 8, True, COMPILED | ENGINE | EXPERTS | {"overlap_grad_reduce"}),
        (
            dataclasses.replace(H100, transformer_engine=(2, 6)),
            *(1, True, COMPILED | ENGINE | {"moe_permute_fusion"}),
        ),
    ],
)
def test_unset_switches_follow_the_hardware(
    machine: Hardware, replicas: int, experts: bool, expected: set[str]
) -> None:
    assert (
        on(resolved_switches(Situation(policy(*PARALLEL), machine, replicas, experts))) == expected
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_switch_that_is_set_stays(name: str) -> None:
    everything = Situation(policy(*PARALLEL), H100, 8, experts=True)
    for value in (True, False):
        asked = dataclasses.replace(
            everything, policy=policy(*PARALLEL, f"policy.tuning.{name}={str(value).lower()}")
        )
        assert getattr(resolved_switches(asked), name) is value


@pytest.mark.parametrize(
    ("overrides", "machine", "message"),
    [
        (("tuning.apply_rope_fusion=true",), BARE, "needs TransformerEngine 2 and a GPU"),
        (
            ("tuning.apply_rope_fusion=true", "shared_prompts=true"),
            *(H100, "needs policy.shared_prompts=false"),
        ),
        (("tuning.gradient_accumulation_fusion=true",), BARE, "NVIDIA's apex"),
        (("tuning.moe_router_fusion=true",), H100, "needs a model with experts"),
        (("fp8=hybrid", "tuning.fp8_recipe=mxfp8"), H100, "compute capability 10.0"),
        (("fp8=hybrid",), BARE, "TransformerEngine 2.2"),
        (
            ("recompute_granularity=selective", "recompute_modules=moe"),
            *(H100, "recompute_modules has moe, which needs experts"),
        ),
        (
            ("recompute_granularity=selective", "recompute_modules=layernorm"),
            *(BARE, "has layernorm, which needs TransformerEngine"),
        ),
        (
            (
                *("recompute_granularity=selective", "recompute_modules=mlp,layernorm"),
                *("fp8=e4m3", "tuning.fp8_recipe=delayed"),
            ),
            *(H100, "has layernorm, which policy.tuning.fp8_recipe=delayed"),
        ),
    ],
)
def test_impossible_switches_are_refused(
    overrides: tuple[str, ...], machine: Hardware, message: str
) -> None:
    chosen = policy(*(f"policy.{one}" for one in overrides))
    with pytest.raises(UserError, match=message):
        resolved_switches(Situation(chosen, machine))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("recompute_granularity=selective", "recompute_modules=mlp,attn"), "none of core_attn"),
        (("recompute_modules=mlp",), "no effect without policy.recompute_granularity=selective"),
        (("tuning.fp8_recipe=exact",), "tensorwise"),
        (("tuning.rope=true",), "tuning.apply_rope_fusion"),
    ],
)
def test_values_unknown_to_any_hardware_are_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        override(Config(), [f"policy.{one}" for one in overrides])


def test_recomputed_modules_are_separated_by_commas() -> None:
    chosen = policy("policy.recompute_granularity=selective", "policy.recompute_modules=mlp, moe")
    assert recompute_modules(chosen) == ["mlp", "moe"]


def test_the_heads_workspace_is_chosen_by_the_device() -> None:
    assert workspace_bytes(policy(), 0) == 64 << 20
    assert workspace_bytes(policy(), 80 << 30) == 1 << 30
    assert workspace_bytes(policy("policy.head_workspace_mib=5"), 80 << 30) == 5 << 20


def test_every_field_has_a_row_in_the_documentation() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    fields = {f"policy.tuning.{field.name}" for field in dataclasses.fields(TuningConfig)}
    assert fields | {"policy.recompute_modules", "policy.head_workspace_mib"} <= rows


@pytest.mark.gpu
def test_the_gpu_of_this_machine_is_found() -> None:
    assert hardware().cuda and hardware().memory_bytes > 1 << 30 and hardware().capability >= (7, 0)


FULL = dataclasses.replace(H100, flash_attention_3=True)


def test_batch_invariance_is_what_megatron_asks_for() -> None:
    """Its own configuration takes the fields; without the setting there are none."""
    from megatron.core.transformer import TransformerConfig

    fields = batch_invariance(policy("policy.batch_invariant=true"), FULL)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, attention_dropout=0.0, **fields
    )
    assert config.batch_invariant_mode
    assert batch_invariance(policy(), Hardware()) == {}


@pytest.mark.parametrize(
    ("machine", "more", "words"),
    [
        (Hardware(), (), "a GPU and TransformerEngine"),
        (BARE, (), "a GPU and TransformerEngine"),
        (H100, (), "FlashAttention 3"),
        (FULL, ("policy.context_parallel_size=2",), "context_parallel_size=1"),
        (FULL, ("policy.fp8=hybrid",), "policy.fp8=none"),
    ],
)
def test_batch_invariance_says_what_it_needs(
    machine: Hardware, more: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        batch_invariance(policy("policy.batch_invariant=true", *more), machine)
