"""From a Hugging Face config to a Megatron GPTModel: the one place that knows the model class.

The families are tables (huggingface/families.py). A field of a config that this model would not
reproduce is refused by name, never ignored.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from megatron_stare.config import PolicyConfig, TuningConfig, UserError, from_hub
from megatron_stare.policy import runtime
from megatron_stare.policy.cpu_layers.attention import CoreAttention, RMSNorm
from megatron_stare.policy.huggingface.families import (
    FAMILIES,
    check_supported,
    has_delta_nets,
    megatron_fields,
    sparse_layers,
    text_config,
)
from megatron_stare.policy.topology import Topology, expert_tensor_size
from megatron_stare.policy.tuning import (
    Situation,
    batch_invariance,
    fusions,
    hardware,
    on_paper,
    recomputation,
    resolved_switches,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_hf_config(directory: str, setting: str = "policy.hf_checkpoint") -> PretrainedConfig:
    """The HF config of a checkpoint directory, which `setting` names. UserError:
    no directory, no config.json, or a foreign architecture.
    """
    if not directory:
        raise UserError(f"{setting} is empty; give a directory with config.json and *.safetensors")
    if not (Path(directory) / "config.json").is_file():
        remedy = from_hub(directory) or "; give a Hugging Face model directory"
        raise UserError(f"{setting}={directory}: no config.json there{remedy}")
    alone = {"local_files_only": True, "trust_remote_code": False}  # None: it asks at the terminal
    try:
        config = AutoConfig.from_pretrained(directory, **alone)
    except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "only Python code next to it knows its model_type, and no such code runs here"
        raise UserError(f"{directory}/config.json is refused by transformers: {reason}") from None
    config = text_config(config)
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{directory}/config.json: model_type={config.model_type!r} is not supported; use "
            f"one of {', '.join(FAMILIES)}"
        )
    return config


def build_model(
    hf: PretrainedConfig,
    policy: PolicyConfig,
    topology: Topology,
    device: torch.device | None = None,
) -> list[Any]:
    """This rank's GPTModel chunks (one, or one per virtual stage); their weights are not yet loaded
    (policy/huggingface/weights.py, load_hf).

    On the meta device it takes no memory and says where a checkpoint holds what
    (policy/conversion/megatron_files.py).
    """
    runtime.prepare()
    from megatron.core.models.gpt import GPTModel

    config = transformer_config(hf, policy if device is None else on_paper(policy), topology)
    if device is not None:
        config.use_cpu_initialization = True  # else Megatron takes the GPU, whatever `device` is
    if config.batch_invariant_mode:
        from megatron.core.transformer.custom_layers import batch_invariant_kernels

        batch_invariant_kernels.enable_batch_invariant_mode()  # of this process, to its end
    chunks: list[nn.Module] = []
    for virtual_stage in range(topology.virtual_size):
        first = topology.pipeline_rank == 0 and virtual_stage == 0
        last = topology.is_last_stage and virtual_stage == topology.virtual_size - 1
        numbered = virtual_stage if topology.virtual_size > 1 else None
        block = _layer_specs(config, policy, topology, numbered, local=device is not None)
        with device or contextlib.nullcontext():
            chunk = GPTModel(
                config=config,
                transformer_layer_spec=_with_delta_nets(block, config, policy, topology, numbered),
                vocab_size=padded_vocab_size(hf, topology.tensor_size),
                max_sequence_length=hf.max_position_embeddings,
                pre_process=first,
                post_process=last,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=hf.tie_word_embeddings,
                pg_collection=topology.groups,
                vp_stage=numbered,
                **megatron_fields(hf)["rope"],
            )
        if policy.shared_prompts:
            _rotate_by_positions(chunk)
        chunks.append(chunk if device else chunk.to(runtime.device()))
    return chunks


def _rotate_by_positions(chunk: Any) -> None:
    """Let a chunk's rotary embedding follow the positions that it is called with: a row of a packed
    micro-batch then has its own angle, where Megatron counts from 0 in every sequence.
    """
    positions: dict[str, torch.Tensor] = {}

    def note(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        positions["BS"] = arguments[1]

    def at_positions(_: nn.Module, arguments: tuple[Any, ...], angles: torch.Tensor) -> Any:
        return angles[positions["BS"].flatten()]

    chunk.register_forward_pre_hook(note)
    chunk.rotary_pos_emb.register_forward_hook(at_positions)


def keep_precise(chunks: list[Any]) -> None:
    """Give what has fp32 in a model of any dtype back to it."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in (m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)):
        router._maintain_float32_expert_bias()


def padded_vocab_size(hf: PretrainedConfig, tensor_size: int) -> int:
    """The vocabulary rounded up so that every tensor-parallel rank holds equally many rows."""
    return -(-hf.vocab_size // tensor_size) * tensor_size


def transformer_config(hf: PretrainedConfig, policy: PolicyConfig, topology: Topology) -> Any:
    """Megatron's TransformerConfig of an HF config. UserError: a field that cannot be honoured."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    check_supported(hf)
    _check_divisible(hf, policy)
    _check_experts(hf, policy)
    _check_stages(hf, policy)
    _check_fp8(hf, policy)
    _check_special_layers(hf, policy)
    _check_delta_nets(hf, policy)
    tuning = tuned(hf, policy, topology)
    dtype = DTYPES[policy.dtype]
    virtual = topology.virtual_size if topology.virtual_size > 1 else None
    fields = {name: value for name, value in megatron_fields(hf).items() if name != "rope"}
    latent = fields.get("multi_latent_attention", False)
    switches = fusions(tuning, hardware())
    if latent:
        switches["apply_rope_fusion"] = False
    return (MLATransformerConfig if latent else TransformerConfig)(
        **fields,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=policy.dtype == "bf16",
        autocast_dtype=dtype,
        fp8=None if policy.fp8 == "none" else policy.fp8,
        fp8_recipe=tuning.fp8_recipe,
        tensor_model_parallel_size=topology.tensor_size,
        pipeline_model_parallel_size=topology.pipeline_size,
        virtual_pipeline_model_parallel_size=virtual,
        num_layers_in_first_pipeline_stage=policy.num_layers_in_first_pipeline_stage or None,
        num_layers_in_last_pipeline_stage=policy.num_layers_in_last_pipeline_stage or None,
        context_parallel_size=topology.context_size,
        sequence_parallel=policy.sequence_parallel,
        variable_seq_lengths=topology.pipeline_size > 1,  # every micro-batch has its own length
        # Two stages are each other's next and previous: batched sends would confuse directions.
        overlap_p2p_comm=virtual is not None,
        batch_p2p_comm=virtual is None,
        batch_p2p_sync=tuning.batch_p2p_sync,
        moe_token_dispatcher_type="alltoall",  # asked of dense models too where lengths vary
        **recomputation(policy),
        **batch_invariance(policy, hardware()),
        **(_experts(policy, tuning) if any(sparse_layers(hf)) else {}),
        # Megatron's deterministic gated delta net refuses packed sequences; ours takes them.
        deterministic_mode=policy.deterministic and not has_delta_nets(hf),
        calculate_per_token_loss=True,  # our loss already carries its global denominator
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        **switches,
    )


def tuned(hf: PretrainedConfig, policy: PolicyConfig, topology: Topology) -> TuningConfig:
    """The switches of policy.tuning for this model on this rank's hardware, all decided.
    UserError: one is asked for that cannot be.
    """
    replicas = dist.get_world_size(topology.data)
    sparse = sparse_layers(hf)
    return resolved_switches(Situation(policy, hardware(), replicas, any(sparse), not all(sparse)))


def _experts(policy: PolicyConfig, tuning: TuningConfig) -> dict[str, Any]:
    """TransformerConfig's fields for routed experts that the family does not say."""
    return {
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": _has_transformer_engine(),
        "moe_permute_fusion": tuning.moe_permute_fusion,
        "moe_router_fusion": tuning.moe_router_fusion,
        "expert_model_parallel_size": policy.expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_size(policy),
    }


def _has_transformer_engine() -> bool:
    return hardware().has_transformer_engine


def _layer_specs(
    config: Any, policy: PolicyConfig, topology: Topology, stage: int | None, local: bool
) -> Any:
    """TransformerEngine's layers where it and CUDA are there, with its attention or, for shared
    prompts, ours; else Megatron's local ones with our attention.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoELayer

    transformer_engine = _has_transformer_engine() and not local
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization="RMSNorm",
        vp_stage=stage,
        pp_rank=topology.pipeline_rank,
    )
    if config.multi_latent_attention:
        from megatron_stare.policy.cpu_layers.special_layers import LatentAttention

        for spec in block.layer_specs:
            spec.submodules.self_attention.module = LatentAttention
    for spec in block.layer_specs if policy.shared_prompts or not transformer_engine else ():
        spec.submodules.self_attention.submodules.core_attention = CoreAttention
    if transformer_engine:
        return block
    for spec in block.layer_specs:
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        if layer.mlp.func is MoELayer:  # TransformerEngine fuses no norm into experts
            layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        elif config.multi_latent_attention:  # but it does into a dense MLP
            layer.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        if not config.multi_latent_attention:
            attention.q_layernorm = attention.k_layernorm = (
                RMSNorm if config.qk_layernorm else IdentityOp
            )
    block.layer_norm = RMSNorm
    return block


def _with_delta_nets(
    block: Any, config: Any, policy: PolicyConfig, topology: Topology, stage: int | None
) -> Any:
    """The same block with gated delta nets in the layers that have no attention."""
    if config.linear_attention_freq is None:
        return block
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron_stare.policy.cpu_layers.special_layers import delta_net_spec, provide_operations

    # The kernels read lengths on the device, where TransformerEngine's attention has them too, and
    # do not repeat their results bit by bit.
    provide_operations(theirs=_has_transformer_engine() and not policy.deterministic)
    first = get_transformer_layer_offset(config, stage, topology.pipeline_rank)
    for place, spec in enumerate(block.layer_specs):
        if config.linear_attention_freq[first + place]:
            spec = block.layer_specs[place] = copy.deepcopy(spec)
            layer = spec.submodules
            layer.self_attention = delta_net_spec(layer.self_attention)
            if "input_layernorm." in layer.sharded_state_dict_keys_map:
                fused = "self_attention.in_proj.layer_norm_"  # TransformerEngine's name for it
                layer.sharded_state_dict_keys_map["input_layernorm."] = fused
    return block


def _check_divisible(hf: PretrainedConfig, policy: PolicyConfig) -> None:
    tensor_size = policy.tensor_model_parallel_size
    names = ["num_attention_heads", "num_key_value_heads"]
    if not all(sparse_layers(hf)):
        names.append("intermediate_size")
    for name in names:
        if getattr(hf, name) % tensor_size:
            raise UserError(
                f"policy.tensor_model_parallel_size={tensor_size} does not divide "
                f"{name}={getattr(hf, name)}; choose a common divisor of heads, key-value heads "
                "and intermediate size"
            )


def _check_special_layers(hf: PretrainedConfig, policy: PolicyConfig) -> None:
    """The needs of layers other than grouped attention and dense MLPs, and what they exclude."""
    latent = megatron_fields(hf).get("multi_latent_attention", False)
    found = {
        "experts": (any(sparse_layers(hf)), "without which Megatron-Core does not train"),
        "latent attention": (latent, "which adds up the gradients of its replicated matrices"),
        "gated delta nets": (has_delta_nets(hf), "which adds up the gradients of their norms"),
    }
    for name, reason in ((name, reason) for name, (has, reason) in found.items() if has):
        if policy.shared_prompts:
            raise UserError(
                f"policy.shared_prompts=true does not work with a model with {name}; set it false"
            )
        if policy.tensor_model_parallel_size > 1 and not policy.sequence_parallel:
            raise UserError(
                f"policy.tensor_model_parallel_size={policy.tensor_model_parallel_size} with "
                f"{name} needs policy.sequence_parallel=true, {reason}; set it"
            )
    if latent and policy.tuning.apply_rope_fusion:
        raise UserError(
            "policy.tuning.apply_rope_fusion=true: Megatron-Core's kernel does not turn latent "
            "attention without YaRN; leave it out"
        )


def _check_delta_nets(hf: PretrainedConfig, policy: PolicyConfig) -> None:
    if not has_delta_nets(hf):
        return
    if policy.fp8 != "none":
        raise UserError(
            f"policy.fp8={policy.fp8!r} is not supported for {hf.model_type}; set it to none"
        )
    split = policy.tensor_model_parallel_size * policy.context_parallel_size
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if getattr(hf, name) % split:
            raise UserError(
                f"policy.tensor_model_parallel_size * policy.context_parallel_size = {split} does "
                f"not divide {name}={getattr(hf, name)}; choose smaller sizes"
            )


def _check_experts(hf: PretrainedConfig, policy: PolicyConfig) -> None:
    """The expert-parallel sizes divide the experts; only a model with experts has such sizes."""
    size, split = policy.expert_model_parallel_size, expert_tensor_size(policy)
    if not any(sparse_layers(hf)):
        for name, without in (
            ("expert_model_parallel_size", (1,)),
            ("expert_tensor_parallel_size", (0, 1)),
            ("routing_replay", ("none",)),
            ("moe_aux_loss_coeff", (0.0,)),
        ):
            if (value := getattr(policy, name)) not in without:
                raise UserError(
                    f"policy.{name}={value} needs experts; {hf.model_type} has none: set it to "
                    f"{without[0]}"
                )
        return
    fields, names = megatron_fields(hf), FAMILIES[hf.model_type].fields
    experts, top_k = fields["num_moe_experts"], fields["moe_router_topk"]
    total = f"{names['num_moe_experts']}={experts}"
    if experts % size:
        raise UserError(
            f"policy.expert_model_parallel_size={size} does not divide {total}; choose a divisor"
        )
    if hf.moe_intermediate_size % split:
        raise UserError(
            f"policy.expert_tensor_parallel_size={split} (0: tensor_model_parallel_size) does not "
            f"divide moe_intermediate_size={hf.moe_intermediate_size}; choose a divisor"
        )
    shared = fields.get("moe_shared_expert_intermediate_size") or 0
    if shared % policy.tensor_model_parallel_size:
        raise UserError(
            f"policy.tensor_model_parallel_size={policy.tensor_model_parallel_size} does not "
            f"divide the width {shared} of the shared experts; choose a divisor"
        )
    if not 1 <= top_k <= experts:
        raise UserError(
            f"config.json: num_experts_per_tok={top_k} does not lie in [1, {total}]; correct it"
        )
    if policy.moe_aux_loss_coeff and fields.get("moe_router_enable_expert_bias"):
        raise UserError(
            f"policy.moe_aux_loss_coeff={policy.moe_aux_loss_coeff:g} needs a softmax router; "
            f"{hf.model_type} balances its experts by a bias: set it to 0"
        )


def _check_stages(hf: PretrainedConfig, policy: PolicyConfig) -> None:
    """Layers over pipeline stages: equal, or given for the first and the last and equal between."""
    stages = policy.pipeline_model_parallel_size
    chunks = policy.virtual_pipeline_model_parallel_size
    outer = (policy.num_layers_in_first_pipeline_stage, policy.num_layers_in_last_pipeline_stage)
    given = [count for count in outer if count > 0]
    rest, between = hf.num_hidden_layers - sum(given), stages - len(given)
    if stages == 1 and given:
        name = "first" if outer[0] else "last"
        raise UserError(
            f"policy.num_layers_in_{name}_pipeline_stage={given[0]} needs "
            "policy.pipeline_model_parallel_size above 1; set it to 0"
        )
    if rest < between or (rest % between if between else rest):
        raise UserError(
            f"num_hidden_layers={hf.num_hidden_layers} minus {sum(given)} given to the outer "
            f"stages leaves {rest} layers for {between} of "
            f"policy.pipeline_model_parallel_size={stages} stages; choose sizes that divide, or "
            "give policy.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
        )
    for count in [*given, rest // between] if between else given:
        if count % chunks:
            raise UserError(
                f"policy.virtual_pipeline_model_parallel_size={chunks} does not divide the {count} "
                "layers of a stage; choose a divisor"
            )


def _check_fp8(hf: PretrainedConfig, policy: PolicyConfig) -> None:
    if policy.fp8 == "none":
        return
    if not _has_transformer_engine():
        raise UserError(
            f"policy.fp8={policy.fp8!r} needs TransformerEngine and a GPU; install it "
            "with `make gpu`, or set it to none"
        )
    if policy.dtype != "bf16":
        raise UserError(f"policy.fp8={policy.fp8!r} needs policy.dtype=bf16, not {policy.dtype}")
    fields = megatron_fields(hf)
    keys = fields["num_query_groups"] * fields["kv_channels"] // policy.tensor_model_parallel_size
    widths = {"hidden_size": hf.hidden_size, "key width": keys}
    if not all(sparse_layers(hf)):
        widths["intermediate_size"] = hf.intermediate_size // policy.tensor_model_parallel_size
    if any(sparse_layers(hf)):
        widths["moe_intermediate_size"] = hf.moe_intermediate_size // expert_tensor_size(policy)
    for name, size in widths.items():
        if size % 16:
            raise UserError(
                f"policy.fp8={policy.fp8!r} multiplies matrices whose widths 16 divides, "
                f"and {name} is {size} on a rank; lower the tensor-parallel size, or set fp8=none"
            )
