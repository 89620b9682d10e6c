"""The switches of `policy.tuning` that a run has on: those of the config, else those that gain
here.

A switch that is set to true where it cannot be on is an error. On a CPU all are off by default.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from megatron_stare.config import PolicyConfig, TuningConfig, UserError
from megatron_stare.policy import runtime

CPU_WORKSPACE_BYTES = 64 << 20
# Of a GPU's memory for the logits of one chunk: 1 GB of 80, thousands of rows in one product.
WORKSPACE_SHARE = 1 / 80


@dataclass(frozen=True)
class Hardware:
    """A GPU and the installed libraries for it; on a CPU everything is absent.

    `transformer_engine` is its version, empty where there is none. `weight_gradients`: NVIDIA's
    apex, built with its CUDA extensions, is recognised by the one that Megatron uses; the package
    of that name on PyPI is another project and has none.
    """

    cuda: bool = False
    transformer_engine: tuple[int, ...] = ()
    weight_gradients: bool = False
    flash_attention_3: bool = False
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0

    @property
    def has_transformer_engine(self) -> bool:
        return bool(self.transformer_engine)


@functools.cache
def hardware() -> Hardware:
    """The hardware of this process, looked at once."""
    if not torch.cuda.is_available():
        return Hardware()
    runtime.prepare()
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.utils import get_te_version

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Hardware(
        cuda=True,
        transformer_engine=tuple(get_te_version().release) if HAVE_TE else (),
        weight_gradients=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        flash_attention_3=importlib.util.find_spec("flash_attn_3") is not None,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
    )


@dataclass(frozen=True)
class Situation:
    """The facts that a switch depends on. `replicas`: ranks that sum up the gradient of one
    parameter; `experts`, `dense`: whether there are layers with and without experts.
    """

    policy: PolicyConfig
    hardware: Hardware
    replicas: int = 1
    experts: bool = False
    dense: bool = True


def switches(at: Situation) -> dict[str, tuple[str, bool]]:
    """For every switch: what a run lacks for it (empty if nothing), and whether it then gains."""
    policy, hardware = at.policy, at.hardware

    def engine(*version: int) -> str:
        if hardware.transformer_engine >= version:
            return ""
        return f"TransformerEngine {'.'.join(map(str, version))} and a GPU"

    experts = "" if at.experts else "a model with experts"
    # TransformerEngine's kernel counts positions from 0 in every sequence of a micro-batch.
    own_prompts = "policy.shared_prompts=false" if policy.shared_prompts else ""
    # Megatron's fused router has no hook for the routers of policy/experts.py.
    free_routers = ""
    if policy.routing_replay != "none" or policy.moe_aux_loss_coeff:
        free_routers = "policy.routing_replay=none and policy.moe_aux_loss_coeff=0"
    weight_gradients = ""
    if not (hardware.has_transformer_engine or hardware.weight_gradients):
        weight_gradients = (
            "a GPU and TransformerEngine, or NVIDIA's apex built with its CUDA extensions (never "
            "the package of that name on PyPI)"
        )
    return {
        "gradient_accumulation_fusion": (weight_gradients, True),
        "bias_activation_fusion": ("", hardware.cuda),
        "bias_dropout_fusion": ("", hardware.cuda),
        "apply_rope_fusion": (own_prompts or engine(2), True),
        "moe_permute_fusion": (engine(2, 1) or experts, True),
        "moe_router_fusion": (free_routers or engine(2, 7) or experts, True),
        "overlap_grad_reduce": ("", hardware.cuda and at.replicas > 1),
        "batch_p2p_sync": ("", False),
    }


def resolved_switches(situation: Situation) -> TuningConfig:
    """policy.tuning with every switch decided. UserError: a switch is set that is impossible
    here, or policy.recompute_modules names a module that the model does not have.
    """
    _check_recomputation(situation)
    asked = situation.policy.tuning
    chosen: dict[str, Any] = {}
    for name, (missing, gains) in switches(situation).items():
        wish = getattr(asked, name)
        if wish and missing:
            raise UserError(f"policy.tuning.{name}=true needs {missing}; leave it unset")
        chosen[name] = wish if wish is not None else not missing and gains
    chosen["fp8_recipe"] = fp8_recipe(situation)
    return dataclasses.replace(asked, **chosen)


def on_paper(policy: PolicyConfig) -> PolicyConfig:
    """Of a policy, what decides the shapes of its weights: the rest is for the machine that trains,
    which is another one.
    """
    plain = PolicyConfig()
    names = ("fp8", "recompute_granularity", "recompute_modules", "batch_invariant", "tuning")
    return dataclasses.replace(policy, **{name: getattr(plain, name) for name in names})


def fusions(tuning: TuningConfig, hardware: Hardware) -> dict[str, Any]:
    """TransformerConfig's fields for kernels that do the work of several."""
    return {
        # Of Megatron's own layers; TransformerEngine's are switched in optimizer.py, once they
        # have their gradient buffers: one flag is for both, and without apex the former refuse it.
        "gradient_accumulation_fusion": bool(
            tuning.gradient_accumulation_fusion and hardware.weight_gradients
        ),
        "bias_activation_fusion": tuning.bias_activation_fusion,
        "bias_dropout_fusion": tuning.bias_dropout_fusion,
        "apply_rope_fusion": tuning.apply_rope_fusion,
        # No attention here makes a score matrix, and no norm is apex's.
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def batch_invariance(policy: PolicyConfig, hardware: Hardware) -> dict[str, Any]:
    """TransformerConfig's fields for policy.batch_invariant. UserError: what Megatron's
    batch-invariant kernels need is not here, or is set otherwise.
    """
    if not policy.batch_invariant:
        return {}
    needs = {
        "a GPU and TransformerEngine: Megatron's kernels for it are Triton's": (
            hardware.has_transformer_engine
        ),
        "FlashAttention 3 (the package flash_attn_3)": hardware.flash_attention_3,
        "policy.context_parallel_size=1": policy.context_parallel_size == 1,
        "policy.fp8=none": policy.fp8 == "none",
    }
    missing = next((need for need, is_met in needs.items() if not is_met), "")
    if missing:
        raise UserError(
            f"policy.batch_invariant=true needs {missing}; leave it out, and see what `parity` says"
        )
    from megatron.core.transformer.enums import AttnBackend

    return {
        "batch_invariant_mode": True,
        "attention_backend": AttnBackend.flash,
        "flash_attention_version": 3,
    }


def recomputation(policy: PolicyConfig) -> dict[str, Any]:
    """TransformerConfig's fields for what the backward pass computes again."""
    if policy.recompute_granularity == "none":
        return {}
    chosen: dict[str, Any] = {"recompute_granularity": policy.recompute_granularity}
    if policy.recompute_granularity == "full":
        return chosen | {"recompute_method": "uniform", "recompute_num_layers": 1}
    return chosen | {"recompute_modules": recompute_modules(policy)}


def fp8_recipe(situation: Situation) -> str:
    """The scales of policy.fp8. UserError: the GPU or TransformerEngine lacks them."""
    chosen = situation.policy.tuning.fp8_recipe or "tensorwise"
    hardware = situation.hardware
    needs = {
        "delayed": ((8, 9), (1,)),
        "tensorwise": ((8, 9), (2, 2)),
        "blockwise": ((9, 0), (2, 3)),
        "mxfp8": ((10, 0), (2, 1)),
    }
    capability, version = needs[chosen]
    if situation.policy.fp8 == "none":
        return chosen
    if hardware.capability < capability or hardware.transformer_engine < version:
        raise UserError(
            f"policy.fp8={situation.policy.fp8} with policy.tuning.fp8_recipe={chosen} needs "
            f"compute capability {capability[0]}.{capability[1]} and TransformerEngine "
            f"{'.'.join(map(str, version))}; here are {hardware.capability} and "
            f"{'.'.join(map(str, hardware.transformer_engine)) or 'none'}: choose another recipe, "
            "or fp8=none"
        )
    return chosen


def workspace_bytes(policy: PolicyConfig, memory_bytes: float) -> int:
    """Bytes for the logits of one chunk of the head: policy.head_workspace_mib, or by the memory of
    the GPU, 0 for a CPU.
    """
    if policy.head_workspace_mib is not None:
        return policy.head_workspace_mib << 20
    return int(memory_bytes * WORKSPACE_SHARE) or CPU_WORKSPACE_BYTES


def recompute_modules(policy: PolicyConfig) -> list[str]:
    """policy.recompute_modules as Megatron takes them."""
    return [name.strip() for name in policy.recompute_modules.split(",")]


def _check_recomputation(situation: Situation) -> None:
    policy = situation.policy
    if policy.recompute_granularity != "selective":
        return
    engine = situation.hardware.has_transformer_engine
    lacking = {
        "layernorm": "" if engine else "TransformerEngine, for Megatron-Core calls on it there",
        "mlp": "" if situation.dense else "layers without experts",
        "moe": "" if situation.experts else "experts",
        "moe_act": "" if engine and situation.experts else "experts of TransformerEngine",
    }
    for name in recompute_modules(policy):
        if lacking.get(name):
            raise UserError(
                f"policy.recompute_modules has {name}, which needs {lacking[name]}; leave it out"
            )
        if (
            name in ("layernorm", "moe_act")
            and policy.fp8 != "none"
            and fp8_recipe(situation) == "delayed"
        ):
            raise UserError(
                f"policy.recompute_modules has {name}, which policy.tuning.fp8_recipe=delayed "
                "cannot compute again; take tensorwise"
            )
