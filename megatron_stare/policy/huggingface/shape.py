"""The dimensions of a model that memory and work depend on, and the work of a forward pass.

N tokens in sequences of lengths S, of which R are loss tokens, W weights that a token meets in the
layers, Q width of the queries, L layers with attention, H hidden width, V vocabulary, D operations
of a token in gated delta nets:

    one forward pass   2 N W + 2 Q L sum S^2 + N D + 2 R H V      [operations]

(arXiv 2104.04473, appendix; causal attention halves its products.) A head of a gated delta net with
keys and values of widths K and P, in chunks of C tokens, takes 6 K P + C (5 K + 3 P) for a token:
three products with its state and five with the other tokens of a chunk (cpu_layers/delta_rule.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PretrainedConfig

from megatron_stare.policy.cpu_layers.delta_rule import CHUNK
from megatron_stare.policy.huggingface.families import megatron_fields
from megatron_stare.policy.huggingface.names import attention_rows, sizes_of


@dataclass(frozen=True)
class DeltaShape:
    """The gated delta nets of a model; all 0 without any."""

    layers: int
    heads: int  # of values
    key: int  # width of a head's keys
    value: int  # width of a head's values
    keys: int  # width of the keys of all heads
    taps: int  # of the convolution

    @property
    def values(self) -> int:
        """Width of the values of all heads."""
        return self.heads * self.value

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.keys + self.values

    @property
    def work(self) -> int:
        """Operations of a token in all layers, without the projections."""
        of_head = 6 * self.key * self.value + CHUNK * (5 * self.key + 3 * self.value)
        return self.layers * self.heads * of_head

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states in all layers of a server: of the heads in fp32, of the
        convolution in bf16.
        """
        heads = 4 * self.heads * self.key * self.value
        return self.layers * (heads + 2 * (self.taps - 1) * self.channels)


@dataclass(frozen=True)
class Shape:
    """Widths in elements. Those of experts are 0 without experts. Latent attention has as many
    keys as queries while it trains; servers keep its latent vectors alone.
    """

    hidden: int
    query: int  # heads times head width
    key: int  # key-value heads times head width
    head_width: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    layers: int
    sparse_layers: int
    experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int  # of the experts that every token meets, together
    attention_matrices: int  # weights of the projections of attention and delta nets, all layers
    delta: DeltaShape
    latent: int  # width of a token's latent vector and rotary key; 0 without latent attention
    tied: bool  # one matrix for embedding and head
    normalised_queries: bool  # Qwen3's norms of queries and keys
    gated: bool  # the output of attention has a gate, as wide as the queries

    @property
    def attention_layers(self) -> int:
        """Layers with attention; the others have a gated delta net."""
        return self.layers - self.delta.layers

    @property
    def active_matrices(self) -> int:
        """Weights of all layers that one token is multiplied by; without embedding and head."""
        dense = self.layers - self.sparse_layers
        met = self.expert_width * self.experts_per_token + self.shared_width
        routed = 3 * met + self.experts
        return self.attention_matrices + self.hidden * (
            3 * self.intermediate * dense + routed * self.sparse_layers
        )

    @property
    def expert_matrices(self) -> int:
        """Weights of all experts of all layers, shared ones included."""
        width = self.expert_width * self.experts + self.shared_width
        return 3 * self.hidden * width * self.sparse_layers

    @property
    def head(self) -> int:
        return self.hidden * self.vocabulary


def shape_of(hf: PretrainedConfig) -> Shape:
    """The shape of a config.json."""
    fields = megatron_fields(hf)
    width, sizes = fields["kv_channels"], sizes_of(hf, fields)
    matrices = [
        math.prod(sizes[letter] for letter in word)
        for layer in range(hf.num_hidden_layers)
        for row in attention_rows(fields, layer)
        for word in row.shapes.split()
        if "weight" in row.megatron and word[1:]
    ]
    return Shape(
        hidden=hf.hidden_size,
        query=hf.num_attention_heads * width,
        key=hf.num_key_value_heads * width,
        head_width=width,
        heads=hf.num_attention_heads,
        key_heads=hf.num_key_value_heads,
        intermediate=fields["ffn_hidden_size"],
        vocabulary=hf.vocab_size,
        layers=hf.num_hidden_layers,
        sparse_layers=sum(fields.get("moe_layer_freq", [])),
        experts=fields.get("num_moe_experts", 0),
        experts_per_token=fields.get("moe_router_topk", 0),
        expert_width=sizes["M"],
        shared_width=sizes["S"],
        attention_matrices=sum(matrices),
        delta=DeltaShape(
            layers=sum(fields.get("linear_attention_freq", ())),
            heads=sizes["N"],
            key=fields.get("linear_key_head_dim", 0),
            value=sizes["P"],
            keys=sizes["X"],
            taps=sizes["T"],
        ),
        latent=sizes["J"],
        tied=bool(hf.tie_word_embeddings),
        normalised_queries=bool(fields.get("qk_layernorm")),
        gated=bool(fields.get("attention_output_gate")),
    )


def forward_operations(shape: Shape, lengths: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """Operations of one forward pass over sequences of (other, loss) tokens each: products with
    weights, and the others.
    """
    products = others = 0.0
    for other, loss in lengths:
        length = other + loss
        products += 2.0 * length * shape.active_matrices + 2.0 * loss * shape.head
        others += 2.0 * shape.query * shape.attention_layers * length**2
        others += float(length) * shape.delta.work
    return products, others
