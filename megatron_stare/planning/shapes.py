"""The models that are planned, from their config.json without a download, and the parameters of
each rank, counted from the real model, which is built without storage in one process.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from megatron_stare.config import AdaptersConfig, PolicyConfig, UserError, nearest
from megatron_stare.policy import build
from megatron_stare.policy.huggingface.families import megatron_fields
from megatron_stare.policy.huggingface.names import is_delta_net
from megatron_stare.policy.huggingface.peft_files import Projection, projections
from megatron_stare.policy.topology import expert_tensor_size, imagined

_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}

_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _qwen2(hidden: int, intermediate: int, layers: int, heads: int, groups: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": False,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, **rest: Any) -> dict[str, Any]:
    return (
        _qwen2(hidden, intermediate, layers, heads, 8)
        | _QWEN3
        | {"model_type": "qwen3", "max_position_embeddings": 40960}
        | rest
    )


MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Math-1.5B": _qwen2(1536, 8960, 28, 12, 2)
    | {"vocab_size": 151936, "max_position_embeddings": 4096, "tie_word_embeddings": True},
    "Qwen2.5-Math-7B": _qwen2(3584, 18944, 28, 28, 4) | {"max_position_embeddings": 4096},
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4),
    "Qwen2.5-14B-Instruct": _qwen2(5120, 13824, 48, 40, 8) | {"max_position_embeddings": 32768},
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8),
    "DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 8960, 28, 12, 2) | {"vocab_size": 151936},
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tie_word_embeddings=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _qwen3(2048, 6144, 48, 32, moe_intermediate_size=768, **_EXPERTS),
    "Qwen3-235B-A22B": _qwen3(4096, 12288, 94, 64, moe_intermediate_size=1536, **_EXPERTS),
    "Llama-3.1-8B": _qwen2(4096, 14336, 32, 32, 8) | {"model_type": "llama", "vocab_size": 128256},
}

MODELS |= {  # of latent attention: what differs from the defaults of transformers
    "GLM-4.7-Flash": {"model_type": "glm4_moe_lite", "rope_parameters": _ROPE},
    "Moonlight-16B-A3B-Instruct": {
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "routed_scaling_factor": 2.446,
        "vocab_size": 163840,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE | {"rope_theta": 5e4},
    },
}


def model_shape(hf_checkpoint: str) -> PretrainedConfig:
    """The config of a checkpoint directory or, if it is missing, of the model of that name.
    UserError: neither.
    """
    if (Path(hf_checkpoint) / "config.json").is_file():
        return build.read_hf_config(hf_checkpoint)
    name = Path(hf_checkpoint).name
    if name not in MODELS:
        raise UserError(
            f"policy.hf_checkpoint={hf_checkpoint!r} has no config.json and is the name of no "
            f"model whose shape is known{nearest(name, MODELS)}; give a model directory"
        )
    fields = dict(MODELS[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


@dataclass(frozen=True)
class Adaptable:
    """Projections of a stage that differ in nothing that matters to the size of an adapter."""

    target: str  # in adapters.targets
    layout: str  # how tensor parallelism divides the weight, as in ParameterMapping
    of_experts: bool
    shape: tuple[int, ...]  # [O, I]
    layers: int
    count: int  # in these layers together

    def size(self, tensor: int) -> int:
        """I + O on one of `tensor` ranks: numbers of A and B for a rank of 1. Tensor parallelism
        divides the O of a column-parallel layer, and the I of a row-parallel one.
        """
        outputs, inputs = self.shape
        if self.layout == "replicated" or self.of_experts:
            return inputs + outputs
        if self.layout == "columns":
            return inputs // tensor + outputs
        return inputs + outputs // tensor


@dataclass(frozen=True)
class RankCounts:
    """Parameters and layers of every rank of one pipeline stage.

    Ranks of a stage differ in their data and their shards, not in sizes: tensor parallelism divides
    every matrix evenly (the vocabulary is padded until it does), expert parallelism the experts.
    """

    stage: int
    dense_parameters: int
    expert_parameters: int  # reduced over other ranks than the dense ones
    dense_layers: int
    sparse_layers: int
    delta_layers: int  # of these, with a gated delta net in place of attention
    is_first: bool
    is_last: bool
    adaptable: tuple[Adaptable, ...]
    in_flight: float  # most micro-batches whose activations wait for their backward pass

    @property
    def layers(self) -> int:
        return self.dense_layers + self.sparse_layers

    @property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters


@dataclass(frozen=True)
class Sizes:
    """Number of ranks in each kind of group."""

    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int

    @property
    def data(self) -> int:
        """Ranks with other sequences."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same dense parameters, over which their optimizer is shared out."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same expert parameters."""
        return self.world // (self.expert * self.expert_tensor * self.pipeline)


def sizes(policy: PolicyConfig, world: int) -> Sizes:
    """The group sizes of `world` ranks."""
    return Sizes(
        world=world,
        tensor=policy.tensor_model_parallel_size,
        pipeline=policy.pipeline_model_parallel_size,
        context=policy.context_parallel_size,
        expert=policy.expert_model_parallel_size,
        expert_tensor=expert_tensor_size(policy),
    )


def stage_counts(hf: PretrainedConfig, policy: PolicyConfig, world: int) -> Sequence[RankCounts]:
    """One entry per pipeline stage. UserError: sizes that cannot be laid out on this world, or this
    model.
    """
    return _counted(json.dumps(hf.to_dict(), sort_keys=True, default=str), policy, world)


@functools.lru_cache(maxsize=64)
def _counted(shape: str, policy: PolicyConfig, world: int) -> tuple[RankCounts, ...]:
    fields = json.loads(shape)
    hf = AutoConfig.for_model(fields.pop("model_type"), **fields)
    stages, every = policy.pipeline_model_parallel_size, projections(hf, AdaptersConfig())
    described = megatron_fields(hf)
    found: list[RankCounts] = []
    for stage in range(stages):
        with imagined(policy, stage * world // stages, world) as topology:
            assert topology.pipeline_rank == stage, "pipeline ranks are the outermost"
            chunks = build.build_model(hf, policy, topology, torch.device("meta"))
            dense = expert = sparse = 0
            numbers = {layer.layer_number - 1 for c in chunks for layer in c.decoder.layers}
            for chunk in chunks:
                for name, parameter in chunk.named_parameters():
                    if ".experts." in name:
                        expert += parameter.numel()
                    else:
                        dense += parameter.numel()
                sparse += sum(hasattr(layer.mlp, "experts") for layer in chunk.decoder.layers)
        found.append(
            RankCounts(
                stage=stage,
                dense_parameters=dense,
                expert_parameters=expert,
                dense_layers=len(numbers) - sparse,
                sparse_layers=sparse,
                delta_layers=sum(is_delta_net(described, number) for number in numbers),
                is_first=stage == 0,
                is_last=stage == stages - 1,
                adaptable=_adaptable([each for each in every if each.layer in numbers]),
                in_flight=_in_flight(stage, stages, policy.virtual_pipeline_model_parallel_size),
            )
        )
    return tuple(found)


def _adaptable(found: Sequence[Projection]) -> tuple[Adaptable, ...]:
    def kind(each: Projection) -> tuple[str, str, bool, tuple[int, ...]]:
        return each.target, each.entry.layout, each.entry.expert is not None, each.shape

    groups = {key: list(own) for key, own in groupby(sorted(found, key=kind), kind)}
    return tuple(
        Adaptable(*key, layers=len({each.layer for each in own}), count=len(own))
        for key, own in groups.items()
    )


def trained_counts(counts: RankCounts, adapters: AdaptersConfig, sizes: Sizes) -> RankCounts:
    """The same with the parameters that a rank trains: all, or A [R, I] and B [O, R] of its
    adapters.
    """
    if not adapters.rank:
        return counts
    dense = expert = 0
    for each in counts.adaptable:
        if each.target in adapters.target_names:
            size = adapters.rank * each.size(sizes.tensor)
            if not each.of_experts:
                dense += each.count * size
            elif adapters.experts == "shared":
                dense += each.layers * size
            elif adapters.experts == "each":
                expert += each.count * size // sizes.expert
    return dataclasses.replace(counts, dense_parameters=dense, expert_parameters=expert)


def adapter_work(counts: RankCounts, adapters: AdaptersConfig, experts_per_token: int) -> int:
    """The numbers of the stage's adapters that a token is multiplied with."""
    return adapters.rank * sum(
        each.size(1) * (each.layers * experts_per_token if each.of_experts else each.count)
        for each in counts.adaptable
        if each.target in adapters.target_names
        and not (each.of_experts and adapters.experts == "none")
    )


def _in_flight(stage: int, stages: int, chunks: int) -> float:
    """Micro-batches under way in the 1F1B schedule, in units of the whole stage: P - s; interleaved
    over v chunks, 2 (P - s - 1) + (v - 1) P + 1 chunks of them (arXiv 2104.04473, section 2.2).
    """
    if chunks == 1:
        return stages - stage
    return (2 * (stages - stage - 1) + (chunks - 1) * stages + 1) / chunks
