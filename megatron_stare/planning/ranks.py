"""The parameters of each rank, counted from the real model, which is built without storage in one
process.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig, PretrainedConfig

from megatron_stare.config import AdaptersConfig, PolicyConfig
from megatron_stare.policy import build
from megatron_stare.policy.adapters.peft_files import Projection, projections
from megatron_stare.policy.topology import expert_tensor_size, imagined


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
    is_first: bool
    is_last: bool
    projections: tuple[Projection, ...]  # that can have adapters
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
    stages, adaptable = policy.pipeline_model_parallel_size, projections(hf, AdaptersConfig())
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
                is_first=stage == 0,
                is_last=stage == stages - 1,
                projections=tuple(each for each in adaptable if each.layer in numbers),
                in_flight=_in_flight(stage, stages, policy.virtual_pipeline_model_parallel_size),
            )
        )
    return tuple(found)


def trained_counts(counts: RankCounts, adapters: AdaptersConfig, tensor: int) -> RankCounts:
    """The same with the parameters that a rank trains: all, or A [R, I] and B [O, R] of its
    adapters. Tensor parallelism divides the O of a column-parallel layer, and the I of a
    row-parallel one.
    """
    if not adapters.rank:
        return counts
    total = 0
    for each in counts.projections:
        if each.target in adapters.target_names:
            outputs, inputs = each.shape
            layout = each.entry.layout
            total += inputs // tensor if layout == "columns" else inputs
            total += outputs if layout in ("columns", "replicated") else outputs // tensor
    return dataclasses.replace(counts, dense_parameters=total * adapters.rank, expert_parameters=0)


def _in_flight(stage: int, stages: int, chunks: int) -> float:
    """Micro-batches under way in the 1F1B schedule, in units of the whole stage: P - s; interleaved
    over v chunks, 2 (P - s - 1) + (v - 1) P + 1 chunks of them (arXiv 2104.04473, section 2.2).
    """
    if chunks == 1:
        return stages - stage
    return (2 * (stages - stage - 1) + (chunks - 1) * stages + 1) / chunks
