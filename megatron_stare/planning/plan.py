"""The plan of a run: memory of every distinct rank, work and seconds of one step, a verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_stare.config import Config, PolicyConfig, UserError, override
from megatron_stare.config.rollout import MEMORY_SHARE, SHARE_VARIABLE
from megatron_stare.planning.machine import H100, Machine
from megatron_stare.planning.memory import ELEMENT, RankMemory, rank_memory, served_bytes
from megatron_stare.planning.serving import NO_DRAFTS, Drafts, Serving, serving, static_share
from megatron_stare.planning.shapes import (
    RankCounts,
    Sizes,
    adapter_work,
    model_shape,
    sizes,
    stage_counts,
)
from megatron_stare.planning.work import Tokens, Training, training
from megatron_stare.policy.adapters import check as check_adapters
from megatron_stare.policy.huggingface.fp8_weights import check_trainer, encoded_matrices
from megatron_stare.policy.huggingface.shape import Shape, shape_of
from megatron_stare.policy.topology import expert_tensor_size
from megatron_stare.recipes import Cluster

GIB = 2.0**30
HOST_PROCESS_BYTES = 5 * GIB  # a rank's process with torch and its libraries
HOST_BYTES_PER_TOKEN = 13  # ids, log-probs, mask and version


@dataclass(frozen=True)
class RunPlan:
    """Memory and time of a run, computed before its launch."""

    config: Config
    cluster: Cluster
    machine: Machine
    shape: Shape
    sizes: Sizes
    tokens: Tokens
    ranks: tuple[RankMemory, ...]  # one entry stands for all ranks of a pipeline stage
    training: Training
    serving: Serving | None  # None: rollouts in the trainer's process

    @property
    def worst(self) -> RankMemory:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def overlapped(self) -> bool:
        """Whether sampling and training run at the same time."""
        return self.config.rollout.asynchrony != "on_policy"

    @property
    def seconds(self) -> float:
        """One step: rollouts plus training, or the longer of them if they overlap; then the weight
        sync.
        """
        if self.serving is None:
            return self.training.seconds + self.host_seconds
        both = (self.training.seconds, self.serving.seconds)
        rest = self.serving.sync_seconds + self.host_seconds
        return (max(both) if self.overlapped else sum(both)) + rest

    @property
    def host_seconds(self) -> float:
        """Seconds of a step in which no GPU computes: the host's own work, and where the GPU is
        freed for servers the optimizer state's way to the host and back.
        """
        sampled = self.tokens.sequences
        if self.serving is not None:
            sampled = self.serving.rollouts
        moved = 0.0
        if self.config.policy.offload_while_generating:
            moved = 2 * self.worst.optimizer / self.machine.host_rate
        return self.machine.host_seconds + sampled * self.machine.sequence_seconds + moved

    @property
    def mfu(self) -> float:
        """The model's own operations of the update and score, over what the trainer's GPUs could
        do in the seconds of training.
        """
        able = self.training.seconds * self.machine.operations * self.cluster.trainer_gpus
        return self.training.model_operations / able

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of 1,000 steps, trainers and servers together."""
        return 1000 * self.seconds * self.cluster.gpus / 3600

    @property
    def host_bytes(self) -> float:
        """Upper bound of the first node's host memory. A colocated run that frees the GPU keeps the
        optimizer state there, and an asynchronous checkpoint keeps weights and optimizer state. The
        first rank also holds the finished rollouts of a step, and for sync_method=delta the weights
        that the servers have.
        """
        config, rank = self.config, self.worst
        ranks = min(self.machine.gpus_per_node, self.cluster.trainer_gpus)
        each = HOST_PROCESS_BYTES
        if config.policy.offload_while_generating:
            each += rank.optimizer
        if config.run.async_save:
            each += rank.parameters + rank.optimizer
        batch = config.rollout.over_sampling_batch_size or config.rollout.rollout_batch_size
        sampled = batch * config.rollout.n_samples_per_prompt
        tokens = sampled * (self.tokens.prompt + self.tokens.response)
        sent = 0.0
        if config.rollout.engine == "sglang" and config.sglang.sync_method == "delta":
            sent = served_bytes(self.shape, config) * ELEMENT[config.policy.dtype] / 2
        return ranks * each + HOST_BYTES_PER_TOKEN * tokens + sent

    @property
    def servers_a_node(self) -> int:
        """Servers that a node has to start (sglang.num_servers) to be those of the plan."""
        assert self.serving is not None
        return min(
            self.serving.servers,
            max(1, self.machine.gpus_per_node // self.config.sglang.gpus_per_server),
        )

    @property
    def starts_other_servers(self) -> bool:
        """Whether the run itself starts servers, and not as many as planned."""
        servers = self.config.sglang
        if self.serving is None or servers.urls or servers.router_url:
            return False
        return servers.num_servers != self.servers_a_node

    @property
    def faults(self) -> list[str]:
        """Reasons why the run does not fit, with a remedy each; empty if it fits."""
        found = [_rank_fault(rank, self) for rank in self.ranks if not rank.fits]
        if fault := _share_fault(self):
            found.append(fault)
        if self.serving and not self.serving.fits:
            found.append(_server_fault(self))
        policy, longest = self.config.policy, self.config.longest_sequence
        if policy.on_long_sequence == "error" and longest > policy.sequence_budget:
            found.append(_length_fault(policy, longest))
        return found


def make_plan(
    config: Config,
    cluster: Cluster,
    machine: Machine = H100,
    response_tokens: float = 0.0,
    counts: Sequence[RankCounts] = (),
    drafts: Drafts = NO_DRAFTS,
) -> RunPlan:
    """The plan of a config on a cluster.

    `response_tokens` is the mean length of responses; 0 means half the limit. The mean prompt is
    taken as a quarter of its limit. `counts` are the stages' counts if the caller has them;
    `drafts` are those of the servers.
    UserError: sizes that do not divide, a model whose shape is not known, adapters or FP8 blocks
    that it cannot have.
    """
    hf = model_shape(config.policy.hf_checkpoint)
    check_adapters(hf, dataclasses.replace(config.adapters, start=""), config.policy)
    if not counts:
        check_trainer(hf, config.policy)
        if config.rollout.engine == "sglang":
            encoded_matrices(config, hf)
    shape, group = shape_of(hf), sizes(config.policy, cluster.trainer_gpus)
    stages = tuple(counts or stage_counts(hf, config.policy, cluster.trainer_gpus))
    rollout = config.rollout
    tokens = Tokens(
        sequences=rollout.rollout_batch_size * rollout.n_samples_per_prompt,
        prompt=config.data.rollout_max_prompt_len / 4,
        response=response_tokens or rollout.rollout_max_response_len / 2,
    )
    more, reference = _reference(config, shape, stages, cluster.trainer_gpus)
    served = rollout.engine == "sglang"
    if served and config.sglang.colocated:
        cluster = dataclasses.replace(cluster, rollout_gpus=0)  # the servers are on the trainer's
    servers_on = cluster.rollout_gpus or cluster.trainer_gpus * config.sglang.colocated
    if served and servers_on < config.sglang.gpus_per_server:
        raise UserError(
            f"sglang.gpus_per_server={config.sglang.gpus_per_server} is more than the {servers_on} "
            "GPUs of the servers; give --rollout-gpus, or set sglang.colocated=true"
        )
    held = _with_longest(config)
    ranks = tuple(
        rank_memory(one, shape, held, group, machine, reference=count)
        for one, count in zip(stages, reference, strict=True)
    )
    occupied = config.sglang.colocated * max(rank.generating for rank in ranks)
    adapters = _served_adapters(config, stages)
    return RunPlan(
        config=config,
        cluster=cluster,
        machine=machine,
        shape=shape,
        sizes=group,
        tokens=tokens,
        ranks=ranks,
        training=training(config, shape, stages, group, tokens, machine, 1 + more),
        serving=serving(config, shape, servers_on, tokens, machine, occupied, drafts, adapters)
        if served
        else None,
    )


def _served_adapters(config: Config, stages: Sequence[RankCounts]) -> float:
    """Bytes of the adapters that engines apply; 0 where they get merged weights."""
    if not config.adapters.apart:
        return 0.0
    numbers = sum(adapter_work(one, config.adapters, 0) for one in stages)
    return float(numbers * ELEMENT[config.policy.dtype])


def _reference(
    config: Config, shape: Shape, stages: Sequence[RankCounts], gpus: int
) -> tuple[float, list[int]]:
    """A scoring pass of the reference model, in passes of the policy, and its parameters on a rank
    of each stage; none where servers have it.
    """
    if not config.loss.reads_reference or config.sglang.reference_urls:
        return 0.0, [0] * len(stages)
    if not config.reference:  # the policy as it was, or without its adapters
        return 1.0, [0 if config.adapters.rank else one.parameters for one in stages]
    hf = model_shape(config.reference)
    found = stage_counts(hf, config.policy, gpus)
    passes = shape_of(hf).active_matrices / shape.active_matrices
    return passes, [one.parameters for one in found]


def _with_longest(config: Config) -> Config:
    """The config with micro-batches as large as the longest sequence, which is never cut."""
    policy = config.policy
    tokens = -(-config.longest_sequence // policy.context_parallel_size)
    if policy.on_long_sequence == "error" or tokens <= policy.max_tokens_per_gpu:
        return config
    return dataclasses.replace(
        config, policy=dataclasses.replace(policy, max_tokens_per_gpu=tokens)
    )


def _length_fault(policy: PolicyConfig, longest: int) -> str:
    return (
        f"a sequence of {longest:,} tokens is longer than policy.max_tokens_per_gpu="
        f"{policy.max_tokens_per_gpu} x policy.context_parallel_size="
        f"{policy.context_parallel_size}; raise either, or set "
        "policy.on_long_sequence=own_micro_batch"
    )


def _rank_fault(rank: RankMemory, plan: RunPlan) -> str:
    parts = {
        "parameters": (rank.parameters, "raise policy.tensor_model_parallel_size or more stages"),
        "gradients": (rank.gradients, "raise policy.tensor_model_parallel_size or more stages"),
        "optimizer state": (
            rank.optimizer,
            "train on more GPUs"
            if plan.config.policy.use_distributed_optimizer
            else "set policy.use_distributed_optimizer=true",
        ),
        "activations": (
            rank.activations,
            "compute more again (policy.recompute_granularity=selective with "
            "policy.recompute_modules=mlp or moe, or full), or raise policy.context_parallel_size",
        ),
        "head": (rank.head, "lower policy.head_workspace_mib or policy.max_tokens_per_gpu"),
    }
    if rank.engine > rank.capacity / 4:
        return (
            f"stage {rank.counts.stage}: {rank.peak / GIB:.1f} GiB with the embedded engine's own "
            f"model ({rank.engine / GIB:.1f} GiB), over {rank.capacity / GIB:.1f} GiB; set "
            "rollout.engine=sglang"
        )
    if rank.peak > rank.training:
        return (
            f"stage {rank.counts.stage}: {rank.peak / GIB:.1f} GiB while the same GPU samples, "
            f"over {rank.capacity / GIB:.1f} GiB; set policy.offload_while_generating=true, or "
            "raise sglang.gpus_per_server"
        )
    name = max(parts, key=lambda part: parts[part][0])
    return (
        f"stage {rank.counts.stage}: {rank.training / GIB:.1f} GiB while training, over "
        f"{rank.capacity / GIB:.1f} GiB; most of it is {name} ({parts[name][0] / GIB:.1f} GiB): "
        f"{parts[name][1]}"
    )


def _share_fault(plan: RunPlan) -> str:
    """A colocated server that holds a part of the GPU which the trainer does not leave free."""
    servers, machine = plan.config.sglang, plan.machine
    if not (plan.serving and servers.colocated and MEMORY_SHARE in servers.server_args):
        return ""
    occupied = max(rank.generating for rank in plan.ranks)
    held = machine.memory_bytes * static_share(plan.config, machine, occupied)
    if held + occupied <= machine.usable_bytes:
        return ""
    return (
        f"sglang.server_args has {MEMORY_SHARE}, by which a colocated server holds "
        f"{held / GIB:.1f} GiB, and the trainer keeps {occupied / GIB:.1f} GiB of "
        f"{machine.usable_bytes / GIB:.1f} GiB while it samples; leave {MEMORY_SHARE} out: the "
        "run then gives servers what is left"
    )


def _server_fault(plan: RunPlan) -> str:
    assert plan.serving is not None
    return (
        f"a server of {plan.config.sglang.gpus_per_server} GPUs has "
        f"{plan.serving.weights / GIB:.1f} GiB of weights on each and "
        f"{plan.serving.cache / GIB:.1f} GiB left, too little for one of the longest sequences; "
        "raise sglang.gpus_per_server"
    )


def placements(config: Config, cluster: Cluster) -> list[tuple[Config, Cluster]]:
    """The run with its servers elsewhere: on the trainer's GPUs if they have their own, else on as
    many of their own, one step off. Empty without servers, or where a setting forbids it.
    """
    gpus, servers = cluster.trainer_gpus, config.sglang
    if config.rollout.engine != "sglang" or gpus < servers.gpus_per_server:
        return []
    found = []
    if not servers.colocated:
        words = "sglang.colocated=true sglang.sync_method=null rollout.asynchrony=on_policy"
        found.append((f"{words} policy.offload_while_generating=true", Cluster(gpus, 0)))
    if servers.colocated or config.rollout.asynchrony == "on_policy":
        words = "sglang.colocated=false sglang.sync_method=null"
        words += " policy.offload_while_generating=false rollout.asynchrony=one_step_off"
        found.append((words, Cluster(gpus, cluster.rollout_gpus or gpus)))
    allowed = []
    for words, placed in found:
        with contextlib.suppress(UserError):  # a setting forbids it
            allowed.append((override(config, words.split()), placed))
    return allowed


def fewest_ranks(policy: PolicyConfig) -> int:
    """The ranks of one copy of the model."""
    stage = policy.pipeline_model_parallel_size
    dense = stage * policy.tensor_model_parallel_size * policy.context_parallel_size
    experts = stage * policy.expert_model_parallel_size * expert_tensor_size(policy)
    return math.lcm(dense, experts)


def share_memory(config: Config) -> None:
    """On GPUs: have started colocated servers take the part of a GPU's memory that the plan leaves
    them, where sglang.server_args gives none. A server by itself would take what is free at its
    start, before the trainer is loaded.
    """
    os.environ.pop(SHARE_VARIABLE, None)
    servers = config.sglang
    started = config.rollout.engine == "sglang" and servers.colocated and not servers.urls
    started = started and bool(config.policy.hf_checkpoint)  # else of runs that plan for themselves
    if torch.distributed.is_initialized():
        return  # the caller's world, in which no other can be planned
    if started and MEMORY_SHARE not in servers.server_args and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        share = colocated_share(config, int(os.environ.get("WORLD_SIZE", "0")), memory)
        os.environ[SHARE_VARIABLE] = f"{share:.2f}"


def colocated_share(config: Config, ranks: int, memory_bytes: float) -> float:
    """The fraction of a GPU's memory for weights and cache of a colocated server. 0 ranks: the
    fewest that the layout allows, which hold the most each.
    """
    machine = dataclasses.replace(H100, memory_bytes=memory_bytes)
    plan = make_plan(config, Cluster(ranks or fewest_ranks(config.policy), 0), machine)
    return max(0.1, static_share(config, machine, max(rank.generating for rank in plan.ranks)))
