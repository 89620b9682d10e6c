"""The parts of a GPU's memory while it trains, and while servers on the same GPU sample.

Per parameter [bytes]: e of the weight, and where it trains 4 of the fp32 gradient buffer and of the
optimizer 8 for Adam's moments and 4 for the fp32 copy of a half-precision weight; the distributed
optimizer divides them over the ranks that hold the same parameters (arXiv 1910.02054, section 5;
Megatron-Core). With adapters only their parameters train.

Activations are the bytes that autograd keeps from a forward pass to its backward, per token. After
Korthikanti et al. (arXiv 2205.05198, section 4), for the layers of this project: RMSNorm, attention
that keeps a log-sum-exp instead of scores, a gated MLP that no kernel fuses. H hidden width, Q and
K widths of queries and of keys, A heads, D head width, F width of the MLP, e bytes of an element, t
tensor-parallel size, s = t under sequence parallelism and else 1:

    norms       2 (6 H + 4) / s   e = 2: fp32 copy, normalised copy, 1 / rms
                2 (8 H + 4) / s   e = 4
                2 (e H + 4) / s   TransformerEngine's
    inputs      2 e H / s         of the products after them
    attention   (e (2 Q + 2 K) + 4 A) / t       q, k, v, out, log-sum-exp
                + e (Q + K) / t   TransformerEngine's value keeps the fused projection alive,
                                  which with q, k norms is their input
    gate        (4 Q + e Q) / t   its sigmoid in fp32 and the product (Qwen3.5)
    delta net   see `_delta_net`  in place of attention
    rotation    4 e D             cosines and sines of queries and keys; 0 in a fused kernel
    q, k norms  each as a norm of its width, divided by t (Qwen3)
    MLP         5 e F / t         both halves, silu, its operand, the product
                3 e F / t         both halves and the product, where one kernel is both (a GPU's)
    experts     see `_experts`, and of shared ones as of an MLP

Full recomputation keeps e H / s per layer, plus the bytes of one layer at a time. Selective
recomputation keeps only the inputs of its modules, plus the contents of one module at a time:
    layernorm   the norm before experts with e H / s alone; those that TransformerEngine runs inside
                a product stay
    mlp, moe    without MLP or experts, and without the norm where it is a part of them
    moe_act     without the products of the experts
    core_attn   without the log-sum-exp; values, now read later, keep the fused projection alive
Measured against the real model: benchmarks/planner.py without TransformerEngine, and with it
docs/null_ranks.json, ranks of the recipes on a device that computes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_stare.config import Config, PolicyConfig
from megatron_stare.losses import find_objective
from megatron_stare.planning.machine import Machine
from megatron_stare.planning.shapes import RankCounts, Sizes, trained_counts
from megatron_stare.policy.cpu_layers.delta_rule import CHUNK
from megatron_stare.policy.huggingface.shape import DeltaShape, Shape
from megatron_stare.policy.tuning import recompute_modules, workspace_bytes

ELEMENT = {"fp32": 4, "bf16": 2}  # bytes of a number
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
    """Keys and values of one token on one GPU of a server; one byte each in an FP8 cache. A GPU
    keeps whole heads: a server of more GPUs than key-value heads has copies of them. All heads read
    one latent vector, which every GPU of a server keeps whole.
    """
    size = 1 if re.search(r"--kv-cache-dtype[ =]fp8", config.sglang.server_args) else 2
    if shape.latent:
        return size * shape.layers * shape.latent
    width = max(shape.key / config.sglang.gpus_per_server, shape.head_width)
    return 2 * size * shape.attention_layers * width


def state_bytes(shape: Shape, config: Config) -> float:
    """States of the gated delta nets of one sequence on one GPU of a server."""
    return shape.delta.state_bytes / config.sglang.gpus_per_server


@dataclass(frozen=True)
class Layer:
    """Bytes that one layer keeps on one rank, per token held there."""

    dense: float  # of a layer with an MLP
    sparse: float  # of a layer with experts
    dense_again: float  # recomputed by the backward pass of a layer with an MLP
    sparse_again: float  # the same for a layer with experts
    delta: float  # of a gated delta net, less those of the attention in its place
    boundary: float  # the layer's input, from which full recomputation starts


def layer_bytes(
    shape: Shape, policy: PolicyConfig, sizes: Sizes, transformer_engine: bool
) -> Layer:
    """The formulas above, for one layer."""
    size, tensor = ELEMENT[policy.dtype], sizes.tensor
    share = tensor if policy.sequence_parallel else 1
    again = recomputed(policy)
    fused = transformer_engine and policy.tuning.bias_activation_fusion is not False
    boundary = size * shape.hidden / share
    norm = _norm(shape.hidden, 1, size, transformer_engine) / share + boundary
    of_width = (3 if fused else 5) * size / tensor
    mlp = of_width * shape.intermediate
    experts, products = _experts(shape, policy, sizes, size, fused)
    experts += of_width * shape.shared_width
    apart = boundary if "layernorm" in again else norm  # the norm before experts
    dense, dense_again = norm + mlp, 0.0
    sparse, sparse_again = apart + experts, 0.0
    if "mlp" in again:
        dense, dense_again = norm, mlp
        if transformer_engine:  # its norm is inside
            dense, dense_again = boundary, norm + mlp
    if "moe" in again:
        sparse, sparse_again = apart, experts
    elif "moe_act" in again:
        sparse, sparse_again = sparse - products, products
    core = _attention(shape, sizes, size, transformer_engine, "core_attn" in again)
    kernels = transformer_engine and not policy.deterministic
    delta = _delta_net(shape.delta, sizes, size, kernels) - core if shape.delta.layers else 0.0
    attention = norm + core
    return Layer(
        dense=attention + dense,
        sparse=attention + sparse,
        dense_again=dense_again,
        sparse_again=sparse_again,
        delta=delta,
        boundary=boundary,
    )


def recomputed(policy: PolicyConfig) -> frozenset[str]:
    """The modules that every layer computes again."""
    if policy.recompute_granularity != "selective":
        return frozenset()
    return frozenset(recompute_modules(policy))


def _attention(
    shape: Shape, sizes: Sizes, size: int, transformer_engine: bool, again: bool
) -> float:
    """Bytes of attention per token, without the norm before it."""
    tensor = sizes.tensor
    query, key = shape.query / tensor, shape.key / tensor
    heads, key_heads = shape.heads / tensor, shape.key_heads / tensor
    kept = size * (2 * query + 2 * key) + (0 if again else 4 * heads)
    kept += 0 if transformer_engine else size * 4 * shape.head_width
    kept += 2 * size * shape.latent  # before and after its norm
    kept += (4 + size) * query * shape.gated
    if shape.normalised_queries:
        kept += _norm(query, heads, size, transformer_engine)
        kept += _norm(key, key_heads, size, transformer_engine)
    if transformer_engine and shape.normalised_queries:
        return kept  # the fused projection is the input of these norms
    if again or transformer_engine or (shape.normalised_queries and size == 4):
        kept += size * (query + key)  # a view keeps the fused projection alive
    return kept


def _delta_net(delta: DeltaShape, sizes: Sizes, size: int, kernels: bool) -> float:
    """Bytes of a gated delta net per token, without the norm before it. Z channels of the
    convolution, Y = N P values of N heads, X keys of all heads, K keys of a head, C a chunk:

        projection    e (Z + Y + 2 N)      its output, of which the others are views
        convolution   e Z                  a copy of its input; ours (e 4 Z: each tap, the sum)
        l2 norm       2 e X                ours 8 X: in fp32
        delta rule    e (2 N K + Y + C N)  ours 4 N (10 K + 3 P + 6 C + K P / C)
        output        its norm, e Y its result, the gate and its silu in fp32, and e Y the product
        decay, beta   about 20 N

    `kernels`: of flash-linear-attention, as their source saves tensors for the backward pass.
    """
    heads, values, wide = delta.heads, delta.values, delta.heads * delta.key
    kept = float(size * (delta.channels + values + 2 * heads) + 20 * heads)
    kept += _norm(values, heads, size, False) + 2 * size * values
    kept += (8 if size == 2 else 4) * values
    if kernels:
        kept += size * (delta.channels + 2 * delta.keys)
        kept += size * (2 * wide + values + CHUNK * heads)
    else:
        kept += size * 4 * delta.channels + 8 * delta.keys
        each = 10 * delta.key + 3 * delta.value + 6 * CHUNK + delta.key * delta.value / CHUNK
        kept += 4 * heads * each
    return kept / sizes.tensor


def _norm(width: float, rows: float, size: int, transformer_engine: bool) -> float:
    """Bytes of one RMSNorm over `rows` rows with `width` elements in total."""
    kept = size if transformer_engine else (4 + size if size == 2 else 2 * size)
    return kept * width + 4 * rows


def _experts(
    shape: Shape, policy: PolicyConfig, sizes: Sizes, size: int, fused: bool
) -> tuple[float, float]:
    """Of E routed experts of width F', k of them to a token, in even shares: k e (H + 6 F') for
    inputs, both halves, silu, its operand, the product before and after the router's weight (with
    one kernel for all of that H + 3 F'), and 8 E + 28 k for the router's choice; and of these the
    products alone.

    Under sequence parallelism a tensor rank routes its own tokens alone; an expert that is split
    sees the tokens of all ranks that split it.
    """
    if not shape.experts:
        return 0.0, 0.0
    held = sizes.tensor if policy.sequence_parallel else 1
    chosen, split = shape.experts_per_token, sizes.expert_tensor
    widths = 3 if fused else 6
    routed = chosen * size * (shape.hidden * split + widths * shape.expert_width)
    products = chosen * size * shape.expert_width / held
    return (routed + 8 * shape.experts + 28 * chosen) / held, products


def stage_bytes(
    counts: RankCounts,
    shape: Shape,
    policy: PolicyConfig,
    sizes: Sizes,
    *,
    transformer_engine: bool,
) -> float:
    """The most that a rank keeps at a time, with micro-batches of policy.max_tokens_per_gpu tokens
    on it: context parallelism is in that already.
    """
    layer = layer_bytes(shape, policy, sizes, transformer_engine)
    whole = counts.dense_layers * layer.dense + counts.sparse_layers * layer.sparse
    whole += counts.delta_layers * layer.delta
    size = ELEMENT[policy.dtype]
    share = sizes.tensor if policy.sequence_parallel else 1
    last = _norm(shape.hidden, 1, size, transformer_engine) / share if counts.is_last else 0.0
    ids = 8.0 if counts.is_first else 0.0
    # of the layer that is computed again; the last norm's are gone by then
    dense, sparse = layer.dense_again, layer.sparse_again
    if policy.recompute_granularity == "full":
        whole = counts.layers * layer.boundary
        more = max(layer.delta, 0.0) if counts.delta_layers else 0.0
        dense, sparse = layer.dense + more, layer.sparse + more
    again = max(sparse if counts.sparse_layers else 0.0, dense if counts.dense_layers else 0.0)
    return policy.max_tokens_per_gpu * (whole * counts.in_flight + max(again, last) + ids)
