"""The cheapest layout of a run that fits, found by planning every one that divides the model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from megatron_stare.config import Config, PolicyConfig, UserError, differences
from megatron_stare.config.rules import check
from megatron_stare.config.section import written
from megatron_stare.planning.machine import H100, Machine
from megatron_stare.planning.plan import RunPlan, make_plan, placements
from megatron_stare.planning.shapes import RankCounts, model_shape, stage_counts
from megatron_stare.policy.huggingface.fp8_weights import check_trainer, encoded_matrices
from megatron_stare.policy.huggingface.shape import Shape, shape_of
from megatron_stare.recipes import Cluster

MOST_PIPELINE, MOST_CONTEXT = 8, 16
SMALLEST_EXPERT_GROUP = 4  # below it most of a GPU would be experts


def suggest(
    config: Config, cluster: Cluster, machine: Machine = H100, response_tokens: float = 0.0
) -> RunPlan:
    """The plan with the fewest GPU-hours for 1,000 steps, on at most the cluster's trainer GPUs and
    with its servers. UserError: none fits.

    Tried: servers as they are, on the trainer's GPUs, and one step off on as many GPUs of their
    own; tensor sizes up to a node that divide the heads, pipeline sizes that divide the layers,
    context and expert sizes in powers of two, no recomputation, that of MLPs and experts, and that
    of everything, and budgets of one and of two of the longest sequences.
    """
    if config.rollout.engine == "sglang":  # the same for every layout
        encoded_matrices(config, model_shape(config.policy.hf_checkpoint))
    best: RunPlan | None = None
    for policy, gpus in _layouts(config, cluster.trainer_gpus, machine):
        if config.sglang.colocated and gpus < config.sglang.gpus_per_server:
            continue
        at = dataclasses.replace(cluster, trainer_gpus=gpus)
        tried = dataclasses.replace(config, policy=policy)
        counts = stage_counts_alike(config, policy)
        for changed, placed in ((tried, at), *placements(tried, at)):
            plan = make_plan(changed, placed, machine, response_tokens, counts)
            cheaper = best is None or plan.gpu_hours < best.gpu_hours
            if cheaper and not plan.faults and _is_allowed(changed):
                best = plan
    if best is None:
        raise UserError(
            f"no layout of {config.policy.hf_checkpoint} fits {cluster.trainer_gpus} GPUs of "
            f"{machine.memory_bytes / 1e9:g} GB; give more with --gpus"
        )
    if best.starts_other_servers:
        servers = dataclasses.replace(best.config.sglang, num_servers=best.servers_a_node)
        best = dataclasses.replace(best, config=dataclasses.replace(best.config, sglang=servers))
    return best


def _is_allowed(config: Config) -> bool:
    """Whether the run's other settings go with a layout."""
    try:
        check(config)
        check_trainer(model_shape(config.policy.hf_checkpoint), config.policy)
    except UserError:
        return False
    return True


def changes(config: Config, plan: RunPlan) -> list[str]:
    """The overrides that make `config` the plan's."""
    return [f"{key}={written(value)}" for key, _, value in differences(config, plan.config)]


def _layouts(config: Config, most: int, machine: Machine) -> Iterator[tuple[PolicyConfig, int]]:
    """Every layout that divides the model, and its number of GPUs."""
    shape = shape_of(model_shape(config.policy.hf_checkpoint))
    divided = (shape.heads, shape.key_heads, shape.intermediate)
    delta = (shape.delta.heads, shape.delta.keys // max(1, shape.delta.key))
    dense = shape.layers > shape.sparse_layers
    modules = ",".join(["mlp"] * dense + ["moe"] * (shape.sparse_layers > 0))
    for tensor, pipeline, context, expert, gpus in itertools.product(
        _powers(machine.gpus_per_node),
        _powers(min(MOST_PIPELINE, shape.layers)),
        _powers(MOST_CONTEXT),
        _expert_sizes(shape),
        _powers(most),
    ):
        if any(size % tensor for size in divided) or shape.layers % pipeline:
            continue
        if any(size % (tensor * context) for size in delta):
            continue
        if gpus % (tensor * pipeline * context) or gpus % (expert * pipeline):
            continue
        policy = dataclasses.replace(
            config.policy,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=1,
            num_layers_in_first_pipeline_stage=0,
            num_layers_in_last_pipeline_stage=0,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1 if expert > 1 else 0,
            sequence_parallel=tensor > 1,
            use_distributed_optimizer=True,
        )
        whole = math.lcm(2 * context, tensor * context)
        for granularity in ("none", "selective", "full"):
            again = modules if granularity == "selective" else "core_attn"
            for sequences in (1, 2):
                budget = -(-sequences * config.longest_sequence // whole) * whole // context
                tried = dataclasses.replace(
                    policy,
                    recompute_granularity=granularity,
                    recompute_modules=again,
                    max_tokens_per_gpu=budget,
                )
                yield tried, gpus


def _expert_sizes(shape: Shape) -> list[int]:
    if not shape.experts:
        return [1]
    return [size for size in _powers(min(16, shape.experts)) if size >= SMALLEST_EXPERT_GROUP]


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def stage_counts_alike(config: Config, policy: PolicyConfig) -> tuple[RankCounts, ...]:
    """Counts of the smallest world with these shards: more data or context ranks hold the same."""
    alike = PolicyConfig(
        tensor_model_parallel_size=policy.tensor_model_parallel_size,
        pipeline_model_parallel_size=policy.pipeline_model_parallel_size,
        expert_model_parallel_size=policy.expert_model_parallel_size,
        expert_tensor_parallel_size=policy.expert_tensor_parallel_size,
        sequence_parallel=policy.sequence_parallel,
    )
    stages = policy.pipeline_model_parallel_size
    experts = policy.expert_model_parallel_size * (policy.expert_tensor_parallel_size or 1)
    world = stages * math.lcm(policy.tensor_model_parallel_size, experts)
    return tuple(stage_counts(model_shape(config.policy.hf_checkpoint), alike, world))
