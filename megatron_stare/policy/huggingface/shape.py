"""The dimensions of a model that memory and work depend on, and the work of a forward pass.

N tokens in sequences of lengths S, of which R are loss tokens, W weights that a token meets in the
layers, Q width of the queries, L layers, H hidden width, V vocabulary:

    one forward pass   2 N W + 2 Q L sum S^2 + 2 R H V      [operations]

(arXiv 2104.04473, appendix; causal attention halves its products.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PretrainedConfig

from megatron_stare.policy.huggingface.families import megatron_fields
from megatron_stare.policy.huggingface.names import attention_rows, sizes_of


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
    attention_matrices: int  # weights of one layer's projections
    latent: int  # width of a token's latent vector and rotary key; 0 without latent attention
    tied: bool  # one matrix for embedding and head
    normalised_queries: bool  # Qwen3's norms of queries and keys

    @property
    def active_matrices(self) -> int:
        """Weights of all layers that one token is multiplied by; without embedding and head."""
        dense = self.layers - self.sparse_layers
        met = self.expert_width * self.experts_per_token + self.shared_width
        routed = 3 * met + self.experts
        return self.hidden * (3 * self.intermediate * dense + routed * self.sparse_layers) + (
            self.attention_matrices * self.layers
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
    words = " ".join(row.shapes for row in attention_rows(fields) if "weight" in row.megatron)
    return Shape(
        hidden=hf.hidden_size,
        query=hf.num_attention_heads * width,
        key=hf.num_key_value_heads * width,
        head_width=width,
        heads=hf.num_attention_heads,
        key_heads=hf.num_key_value_heads,
        intermediate=hf.intermediate_size,
        vocabulary=hf.vocab_size,
        layers=hf.num_hidden_layers,
        sparse_layers=sum(fields.get("moe_layer_freq", [])),
        experts=fields.get("num_moe_experts", 0),
        experts_per_token=fields.get("moe_router_topk", 0),
        expert_width=sizes["M"],
        shared_width=sizes["S"],
        attention_matrices=sum(math.prod(sizes[x] for x in w) for w in words.split() if w[1:]),
        latent=sizes["J"],
        tied=bool(hf.tie_word_embeddings),
        normalised_queries=bool(fields.get("qk_layernorm")),
    )


def forward_operations(shape: Shape, lengths: Iterable[tuple[int, int]]) -> float:
    """Operations of one forward pass over sequences of (prompt, response) tokens each."""
    total = 0.0
    for prompt, response in lengths:
        length = prompt + response
        total += 2.0 * length * shape.active_matrices + 2.0 * response * shape.head
        total += 2.0 * shape.query * shape.layers * length**2
    return total
