"""The work of one training step on the trainer's GPUs: operations, bytes over each group, seconds.

N tokens of all ranks, of which R are loss tokens, W weights that a token meets in the layers, Q
width of the queries, L layers with attention, V vocabulary, S the length that a token's attention
sees on average, D operations of a token in gated delta nets (huggingface/shape.py):

    one forward pass   2 N W + 2 N Q S L + N D + 2 R H V
    update             three of them, and another without the head under full recomputation
    score              one: the statistics that the loss's plan needs

With adapters an update has two of a frozen weight's products, and three of an adapter's.

(arXiv 2104.04473, appendix; causal attention halves its products.) A model's own operations leave
recomputation out: MFU counts them (arXiv 2204.02311, B). Seconds are operations and bytes over
machine.py's ceilings for the rank with most sequences. They add up: overlap (docs/tuning.md) is
not counted. Products of experts reach less than others: their share is that of matrices times
F / (F + expert_saturation) for experts of width F. A rank's part of an update is a whole number of
sequences: half a sequence of waiting is added. A pipeline of p stages and m micro-batches idles for
(p - 1) / m of its work, divided by its chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_stare.config import Config, PolicyConfig
from megatron_stare.planning.machine import Machine
from megatron_stare.planning.memory import ELEMENT, recomputed
from megatron_stare.planning.shapes import RankCounts, Sizes, adapter_work, trained_counts
from megatron_stare.policy.huggingface.shape import Shape

FILLED = 0.9  # fraction of a micro-batch's budget that packing fills with short sequences


@dataclass(frozen=True)
class Tokens:
    """The tokens of one training batch."""

    sequences: int
    prompt: float  # mean
    response: float  # mean
    equal: bool = False  # all lengths are the mean; else they are spread evenly from 0 to twice it

    @property
    def total(self) -> float:
        return self.sequences * (self.prompt + self.response)

    @property
    def seen(self) -> float:
        """Mean over tokens of half the length of their sequence: E[S^2] / E[S] / 2."""
        return (self.prompt + self.response) * (1 / 2 if self.equal else 2 / 3)


@dataclass(frozen=True)
class Training:
    """One step. Operations are of all GPUs; bytes are what one rank sends; seconds add up."""

    model_operations: float
    operations: float
    micro_batches: int
    group_bytes: dict[str, float]
    compute_seconds: float
    bubble_seconds: float
    group_seconds: dict[str, float]
    optimizer_seconds: float

    @property
    def seconds(self) -> float:
        return (
            self.compute_seconds
            + self.bubble_seconds
            + sum(self.group_seconds.values())
            + self.optimizer_seconds
        )


@dataclass(frozen=True)
class Recomputed:
    """The additional work of recomputation in an update."""

    matrices: float = 0.0  # weights that a token is multiplied by a second time
    # Fractions that are computed or sent a second time:
    attention: float = 0.0  # of the attention
    tensor: float = 0.0  # of a forward pass's tensor-parallel traffic
    experts: float = 0.0  # of the traffic to experts and back


def recomputed_work(policy: PolicyConfig, shape: Shape) -> Recomputed:
    """The sum over the recomputed modules; norms and activations of experts cost almost nothing."""
    if policy.recompute_granularity == "full":
        return Recomputed(shape.active_matrices, 1.0, 1.0, 1.0)
    modules = recomputed(policy)
    dense, sparse = shape.layers - shape.sparse_layers, shape.sparse_layers
    matrices = 0.0
    if "mlp" in modules:
        matrices += 3 * shape.hidden * shape.intermediate * dense
    if "moe" in modules:
        each = 3 * shape.expert_width * shape.experts_per_token + shape.experts
        matrices += shape.hidden * each * sparse
    halves = dense * ("mlp" in modules) + sparse * ("moe" in modules)
    return Recomputed(
        matrices=matrices,
        attention=float("core_attn" in modules),
        tensor=halves / (2 * shape.layers),  # the MLP's half of what a layer sends
        experts=float("moe" in modules),
    )


def training(
    config: Config,
    shape: Shape,
    counts: tuple[RankCounts, ...],
    sizes: Sizes,
    tokens: Tokens,
    machine: Machine,
    scoring_passes: float = 1.0,
) -> Training:
    """The work of one step with these tokens. `scoring_passes` are forward passes before the
    update: one for the statistics of the loss, another one for a reference model.
    """
    updates = config.train.epochs
    repeated = recomputed_work(config.policy, shape)
    layers = 2 * tokens.total * shape.active_matrices
    attention = 4 * tokens.total * shape.query * tokens.seen * shape.attention_layers
    attention += tokens.total * shape.delta.work
    head = 2 * tokens.sequences * tokens.response * shape.head
    passes = 3 * updates + scoring_passes
    products = passes - updates if config.adapters.rank else passes
    matrices = products * (layers + head)
    added = sum(adapter_work(one, config.adapters, shape.experts_per_token) for one in counts)
    matrices += passes * 2 * tokens.total * added
    model = matrices + passes * attention
    extra_layers = 2 * tokens.total * repeated.matrices * updates
    extra_attention = repeated.attention * attention * updates
    experts = 6.0 * products * tokens.total * shape.hidden * shape.expert_width
    experts *= shape.experts_per_token * shape.sparse_layers
    slower = machine.expert_saturation / shape.expert_width if shape.experts else 0.0
    compute = matrices + experts * slower + extra_layers * (1 + slower)
    compute /= machine.matrix_share
    compute += (passes * attention + extra_attention) / machine.attention_share
    steps = config.train.num_steps_per_rollout
    compute *= largest_share(tokens, sizes, steps) / (machine.operations * sizes.world)
    budget = float(config.policy.sequence_budget)
    mean = tokens.prompt + tokens.response
    budget *= FILLED if 2 * mean <= budget else min(1.0, max(mean / budget, 0.5))
    micro = max(1, math.ceil(tokens.total / sizes.data / steps / budget))
    again = updates * (config.policy.recompute_granularity == "full")
    launches = (passes + again) * micro * steps * max(one.layers for one in counts)
    compute = max(compute, launches * machine.layer_launch)
    chunks = config.policy.virtual_pipeline_model_parallel_size
    sent = group_bytes(config, shape, counts, sizes, tokens)
    spread = _heaviest(config, counts, sizes)
    traffic = 28 * (
        spread.dense_parameters / sizes.replicas + spread.expert_parameters / sizes.expert_replicas
    )
    return Training(
        model_operations=model,
        operations=model + extra_layers + extra_attention,
        micro_batches=micro * steps,
        group_bytes=sent,
        compute_seconds=compute,
        bubble_seconds=compute * (sizes.pipeline - 1) / (micro * chunks),
        group_seconds={
            name: size / machine.link_rate(_span(name, sizes)) for name, size in sent.items()
        },
        optimizer_seconds=steps * updates * traffic / machine.memory_rate,
    )


def largest_share(tokens: Tokens, sizes: Sizes, steps: int) -> float:
    """Sequences are assigned whole: the work of the rank with most of them, for which all others
    wait, in means over all ranks.
    """
    most = math.ceil(tokens.sequences / sizes.data) * sizes.data / tokens.sequences
    return most * (1 + sizes.data * steps / (2 * tokens.sequences))


def _heaviest(config: Config, counts: tuple[RankCounts, ...], sizes: Sizes) -> RankCounts:
    """The counts of the stage whose ranks train most parameters."""
    trained = (trained_counts(one, config.adapters, sizes) for one in counts)
    return max(trained, key=lambda one: one.parameters)


def group_bytes(
    config: Config, shape: Shape, counts: tuple[RankCounts, ...], sizes: Sizes, tokens: Tokens
) -> dict[str, float]:
    """Bytes that one rank sends in a step, by group; groups of one rank send nothing.

    tensor    per layer, pass and token two all-reduces, or as many bytes in gathers and scatters:
              4 e H (t - 1) / t; the backward sends as much, and under sequence parallelism half as
              much again for the inputs of weight gradients
    context   keys and values 2 e K / t (c - 1) of a rank's tokens, again in the backward with their
              gradients; of a gated delta net its inputs and outputs, e (Z + 2 Y) / t (c - 1) / c
    expert    dispatch and combine 2 k e H (n - 1) / n per token and pass
    pipeline  e H per token at a stage's border, back and forth
    data      fp32 gradients scattered, weights gathered: 4 + e bytes (d - 1) / d a parameter, or
              8 for an all-reduce
    """
    policy, size = config.policy, ELEMENT[config.policy.dtype]
    repeated = recomputed_work(policy, shape)
    updates = config.train.epochs
    steps = config.train.num_steps_per_rollout * updates
    passes = 2 * updates + 1  # forward and backward of an update, score
    held = tokens.total / (sizes.data * sizes.context)  # of one tensor group
    local = held / (sizes.tensor if policy.sequence_parallel else 1)
    layers = max(one.layers for one in counts)
    heaviest = _heaviest(config, counts, sizes)
    extra = 0.5 * updates if policy.sequence_parallel else 0.0
    each = 4 * size * shape.hidden * held * layers
    reduced = 4 + size if policy.use_distributed_optimizer else 8
    exchanged = (shape.delta.channels + 2 * shape.delta.values) / sizes.context
    in_context = max(
        2 * shape.key * (one.layers - one.delta_layers) + exchanged * one.delta_layers
        for one in counts
    )
    sent = {
        "tensor": each * (passes + extra + repeated.tensor * updates) * _others(sizes.tensor),
        "context": size * held / sizes.tensor * (sizes.context - 1)
        * in_context * (passes + updates * (1 + repeated.attention)),
        "pipeline": size * shape.hidden * local * passes if sizes.pipeline > 1 else 0.0,
        "data": steps * heaviest.dense_parameters * reduced * _others(sizes.replicas),
    }  # fmt: skip
    if shape.experts:
        sparse = max(one.sparse_layers for one in counts)
        routed = 2 * shape.experts_per_token * size * shape.hidden * local
        routed *= passes + updates * repeated.experts
        sent["expert"] = routed * sparse * _others(sizes.expert)
        sent["expert data"] = steps * (
            heaviest.expert_parameters * reduced * _others(sizes.expert_replicas)
        )
    return {name: value for name, value in sent.items() if value}


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _span(group: str, sizes: Sizes) -> float:
    """Consecutive ranks over which a group is spread: tensor innermost, then context, data, and
    pipeline outermost (Megatron's order); experts among the ranks of a stage.
    """
    stage = sizes.world / sizes.pipeline
    return {
        "tensor": sizes.tensor,
        "context": sizes.tensor * sizes.context,
        "expert": sizes.expert * sizes.expert_tensor,
        "pipeline": sizes.world if sizes.pipeline > 1 else 1,
    }.get(group, stage)
