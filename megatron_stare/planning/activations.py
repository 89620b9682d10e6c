"""Bytes that autograd keeps from a forward pass to its backward, per token, by what keeps them.

After Korthikanti et al. (arXiv 2205.05198, section 4), for the layers of this project: RMSNorm,
attention that keeps a log-sum-exp instead of scores, a gated MLP that no kernel fuses. H hidden
width, Q and K widths of queries and of keys, A heads, D head width, F width of the MLP, e bytes of
an element, t tensor-parallel size, s = t under sequence parallelism and else 1:

    norms       2 (6 H + 4) / s   e = 2: fp32 copy, normalised copy, 1 / rms
                2 (8 H + 4) / s   e = 4
                2 (e H + 4) / s   TransformerEngine's
    inputs      2 e H / s         of the products behind them
    attention   (e (2 Q + 2 K) + 4 A) / t       q, k, v, out, log-sum-exp
                + e (Q + K) / t   TransformerEngine's value keeps the fused projection alive
    rotation    4 e D             cosines and sines of queries and keys
    q, k norms  each as a norm of its width, divided by t (Qwen3)
    MLP         5 e F / t         both halves, silu, its operand, the product
    experts     see `_experts`

Full recomputation keeps e H / s per layer, and one layer's bytes at a time beside them. Measured
against the real model in benchmarks/planner.py, but for TransformerEngine's: that needs a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.config import PolicyConfig
from megatron_stare.planning.ranks import RankCounts, Sizes
from megatron_stare.planning.shapes import Shape

ELEMENT = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Layer:
    """What one layer keeps on one rank [bytes per token held]."""

    attention: float
    mlp: float
    experts: float
    boundary: float  # its input, which recomputation starts from


def layer_bytes(
    shape: Shape, policy: PolicyConfig, sizes: Sizes, transformer_engine: bool
) -> Layer:
    """The module's formulas. Attention includes both norms and the inputs of the products."""
    size, tensor = ELEMENT[policy.dtype], sizes.tensor
    share = tensor if policy.sequence_parallel else 1
    norms = 2 * (_norm(shape.hidden, 1, size, transformer_engine) + size * shape.hidden) / share
    query, key = shape.query / tensor, shape.key / tensor
    heads, key_heads = shape.heads / tensor, shape.key_heads / tensor
    attention = size * (2 * query + 2 * key + 4 * shape.head_width) + 4 * heads
    if shape.normalised_queries:
        attention += _norm(query, heads, size, transformer_engine)
        attention += _norm(key, key_heads, size, transformer_engine)
    if transformer_engine or (shape.normalised_queries and size == 4):
        attention += size * (query + key)  # a view keeps the fused projection alive
    return Layer(
        attention=norms + attention,
        mlp=5 * size * shape.intermediate / tensor,
        experts=_experts(shape, policy, sizes, size),
        boundary=size * shape.hidden / share,
    )


def _norm(width: float, rows: float, size: int, transformer_engine: bool) -> float:
    """Of one RMSNorm of `rows` rows of `width` elements together."""
    kept = size if transformer_engine else (4 + size if size == 2 else 2 * size)
    return kept * width + 4 * rows


def _experts(shape: Shape, policy: PolicyConfig, sizes: Sizes, size: int) -> float:
    """Of E routed experts of width F', k of them to a token, in even shares: k e (H + 6 F') for
    inputs, both halves, silu, its operand, the product before and after the router's weight, and
    8 E + 28 k for the router's choice.

    Under sequence parallelism a tensor rank routes its own tokens alone; an expert that is split
    sees the tokens of all ranks that split it.
    """
    if not shape.experts:
        return 0.0
    held = sizes.tensor if policy.sequence_parallel else 1
    chosen, split = shape.experts_per_token, sizes.expert_tensor
    routed = chosen * size * (shape.hidden * split + 6 * shape.expert_width)
    return (routed + 8 * shape.experts + 28 * chosen) / held


def stage_bytes(
    counts: RankCounts,
    shape: Shape,
    policy: PolicyConfig,
    sizes: Sizes,
    *,
    transformer_engine: bool,
    tokens: float | None = None,
) -> float:
    """The most that a rank keeps at a time, with micro-batches of `tokens` tokens on it, by default
    policy.max_tokens_per_gpu: context parallelism is in that already.
    """
    held = policy.max_tokens_per_gpu if tokens is None else tokens
    layer = layer_bytes(shape, policy, sizes, transformer_engine)
    sparse, dense = layer.attention + layer.experts, layer.attention + layer.mlp
    whole = counts.dense_layers * dense + counts.sparse_layers * sparse
    size = ELEMENT[policy.dtype]
    share = sizes.tensor if policy.sequence_parallel else 1
    last = _norm(shape.hidden, 1, size, transformer_engine) / share if counts.is_last else 0.0
    ids = 8.0 if counts.is_first else 0.0
    if policy.recompute_granularity == "full":
        one = max(sparse if counts.sparse_layers else 0.0, dense if counts.dense_layers else 0.0)
        # the last norm's are gone when the first layer is computed again
        return held * (counts.layers * layer.boundary * counts.in_flight + max(one, last) + ids)
    return held * (whole * counts.in_flight + last + ids)
