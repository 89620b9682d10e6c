"""The parts of a GPU's memory while it trains, and while servers on the same GPU sample.

Per parameter [bytes]: e of the weight, and where it trains 4 of the fp32 gradient buffer and of the
optimizer 8 for Adam's moments and 4 for the fp32 copy of a half-precision weight; the distributed
optimizer divides them over the ranks that hold the same parameters (arXiv 1910.02054, section 5;
Megatron-Core). With adapters only their parameters train.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.config import Config, PolicyConfig
from megatron_stare.losses import find_objective
from megatron_stare.planning.activations import ELEMENT, stage_bytes
from megatron_stare.planning.machine import Machine
from megatron_stare.planning.ranks import RankCounts, Sizes, trained_counts
from megatron_stare.policy.huggingface.shape import Shape
from megatron_stare.policy.tuning import workspace_bytes

# Bytes of a logit that a loss reads, at the peak of its backward pass: 2 in bf16 and 4 in fp32, as
# many of their gradients, and two parts of the fp32 gradient. Counted for exact distillation
# (tests/policy/test_head_gpu.py); an objective that makes further copies takes more.
WHOLE_LOGIT = 20


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by part."""

    counts: RankCounts
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    communication: float
    engine: float  # the embedded engine: a whole model in the trainer's process
    server_weights: float  # of a colocated server on this GPU
    server_cache: float  # of that server, or of the embedded engine
    generating: float  # of the trainer while servers on its GPU sample
    capacity: float

    @property
    def training(self) -> float:
        """Bytes while the rank trains; colocated servers have released their memory."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.head
            + self.communication
            + self.engine
        )

    @property
    def peak(self) -> float:
        """The larger of training and generating."""
        return max(self.training, self.generating + self.server_weights + self.server_cache)

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity


def optimizer_bytes(counts: RankCounts, policy: PolicyConfig, sizes: Sizes) -> float:
    """Moments and fp32 copies on one rank."""
    each = 8 if policy.dtype == "fp32" else 12
    if not policy.use_distributed_optimizer:
        return float(each * counts.parameters)
    dense = counts.dense_parameters / sizes.replicas
    return each * (dense + counts.expert_parameters / sizes.expert_replicas)


def head_bytes(
    shape: Shape,
    policy: PolicyConfig,
    sizes: Sizes,
    tokens: float,
    machine: Machine,
    whole_logits: bool = False,
) -> float:
    """The head's bytes on the last stage: hidden states, which sequence parallelism gathers, and
    their gradient, the loss rows and theirs (4 e H per token at most), the logits of one chunk or,
    for head=logits, of all rows, with their gradient where fp32 logits need one of another dtype,
    and one product of the output weight's size. `whole_logits`: a loss that reads them, on every
    tensor rank.
    """
    size = ELEMENT[policy.dtype]
    columns = shape.vocabulary / sizes.tensor
    logits = (4 if policy.fp32_logits else size) * tokens * columns
    if policy.head != "logits":
        logits = min(logits, workspace_bytes(policy, machine.memory_bytes))
    if policy.fp32_logits and size < 4:
        logits *= 1 + size / 4
    if whole_logits:
        logits = WHOLE_LOGIT * tokens * shape.vocabulary
    return 4 * size * shape.hidden * tokens + logits + size * shape.hidden * columns


def rank_memory(
    counts: RankCounts,
    shape: Shape,
    config: Config,
    sizes: Sizes,
    machine: Machine,
    reference: int = 0,
) -> RankMemory:
    """One rank of a stage, at policy.max_tokens_per_gpu tokens in every micro-batch. `reference`:
    parameters of the reference model.
    """
    policy, size = config.policy, ELEMENT[config.policy.dtype]
    trained = trained_counts(counts, config.adapters, sizes)
    added = trained.parameters if config.adapters.rank else 0
    weights, gradients = size * (counts.parameters + added), 4 * trained.parameters
    scoring = size * reference
    optimizer = optimizer_bytes(trained, policy, sizes)
    activations = stage_bytes(counts, shape, policy, sizes, transformer_engine=True)
    head = 0.0
    if counts.is_last:
        head = head_bytes(
            *(shape, policy, sizes, policy.max_tokens_per_gpu, machine),
            whole_logits=find_objective(config.loss.name).reads_logits(config.loss),
        )
    with_server = config.rollout.engine == "sglang" and config.sglang.colocated
    holds_buckets = counts.is_first or with_server  # those ranks send weights
    buckets = 2.0 * (config.sglang.sync_bucket_mib << 20) if holds_buckets else 0.0
    communication = machine.process_bytes + buckets
    residue = weights + communication
    if not policy.offload_while_generating:
        residue += scoring + optimizer + (0 if with_server else gradients)
    engine, server, cache = _sampling_bytes(shape, config)
    return RankMemory(
        counts=counts,
        parameters=weights + scoring,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        head=head,
        communication=communication,
        server_weights=server,
        server_cache=cache,
        engine=engine,
        generating=residue + engine,
        capacity=machine.usable_bytes,
    )


def _sampling_bytes(shape: Shape, config: Config) -> tuple[float, float, float]:
    """Bytes for sampling on a trainer's GPU: weights of the embedded engine or of a colocated
    server, and its cache; a server's cache holds at least eight of the longest sequences.
    """
    longest = config.longest_sequence
    if config.rollout.engine == "embedded":
        size = ELEMENT[config.policy.dtype]
        each = longest * 2 * size * shape.attention_layers * shape.key + shape.delta.state_bytes
        whole = model_bytes(shape) * size / 2
        return whole, 0.0, config.rollout.engine_batch_size * each
    if not config.sglang.colocated:
        return 0.0, 0.0, 0.0
    cache = 8 * (longest * cache_bytes_per_token(shape, config) + state_bytes(shape, config))
    return 0.0, served_bytes(shape, config) / config.sglang.gpus_per_server, cache


def model_bytes(shape: Shape) -> float:
    """Bytes of a whole model in bf16 on a server; norms and biases are left out."""
    dense = shape.attention_matrices + (1 if shape.tied else 2) * shape.head
    dense += 3 * shape.hidden * shape.intermediate * (shape.layers - shape.sparse_layers)
    return 2.0 * (dense + shape.expert_matrices)


def served_bytes(shape: Shape, config: Config) -> float:
    """Bytes of the same on this run's servers: with sglang.weights=fp8 one byte and a 128 x 128th
    of a scale for each weight that is encoded.
    """
    whole = model_bytes(shape)
    if config.sglang.weights == "policy":
        return whole
    encoded = shape.expert_matrices
    if config.policy.weight_quantization == "fp8_experts":
        encoded -= 3 * shape.hidden * shape.shared_width * shape.sparse_layers
    else:
        encoded += shape.attention_matrices
        encoded += 3 * shape.hidden * shape.intermediate * (shape.layers - shape.sparse_layers)
    return whole - encoded * (1 - 4 / 128**2)


def cache_bytes_per_token(shape: Shape, config: Config) -> float:
    """Keys and values of one token on one GPU of a server; one byte each in an FP8 cache. All heads
    read one latent vector, which every GPU of a server keeps whole.
    """
    size = 1 if "fp8" in config.sglang.server_args else 2
    if shape.latent:
        return size * shape.layers * shape.latent
    return 2 * size * shape.attention_layers * shape.key / config.sglang.gpus_per_server


def state_bytes(shape: Shape, config: Config) -> float:
    """States of the gated delta nets of one sequence on one GPU of a server."""
    return shape.delta.state_bytes / config.sglang.gpus_per_server
