"""The parameters of each rank, counted from the real model, which is built without storage in one
process.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from transformers import AutoConfig, PretrainedConfig

from megatron_stare.config import AdaptersConfig, PolicyConfig
from megatron_stare.policy import build
from megatron_stare.policy.huggingface.families import megatron_fields
from megatron_stare.policy.huggingface.names import is_delta_net
from megatron_stare.policy.huggingface.peft_files import Projection, projections
from megatron_stare.policy.topology import expert_tensor_size, imagined


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
