"""Hugging Face tensor names <-> Megatron parameter names: one table, read in both directions.

Each ParameterMapping says which HF tensors make up one Megatron parameter and how that parameter is
laid out over tensor-parallel ranks. `to_shard` goes HF -> Megatron, `from_shards` back; they are
exact inverses.

Shape legend: G query groups, Q query heads, D head width, F intermediate size, V vocabulary, H
hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

Layout = Literal["replicated", "columns", "vocab", "qkv", "gated"]


@dataclass(frozen=True)
class ParameterMapping:
    """One Megatron parameter and the HF tensors it holds, in this order.

    layout: replicated on all ranks; columns split along dim 1; vocab split along dim 0, padded; qkv
    = query, key and value interleaved by query group, split by groups; gated = gate and up stacked
    on every rank.
    expert: the number of the routed expert it belongs to, counted over all expert-parallel ranks;
    such a parameter lives on one of them and is split over the expert-tensor-parallel ranks instead
    of the tensor-parallel ones.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[tuple[int, ...], ...]
    expert: int | None = None


def sparse_layers(hf: PretrainedConfig) -> list[bool]:
    """Which layers route their tokens to experts;
    the others, and all layers of a dense family, have one MLP.
    """
    if hf.model_type != "qwen3_moe" or not hf.num_experts:
        return [False] * hf.num_hidden_layers
    return [
        layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
        for layer in range(hf.num_hidden_layers)
    ]


def name_table(hf: PretrainedConfig) -> list[ParameterMapping]:
    """The table of a model, in the order of its layers.
    Megatron names are those of an unwrapped GPTModel.
    """
    hidden, vocabulary = hf.hidden_size, hf.vocab_size
    head = getattr(hf, "head_dim", None) or hidden // hf.num_attention_heads
    entries = [
        ParameterMapping(
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            "vocab",
            ((vocabulary, hidden),),
        )
    ]
    for layer, is_sparse in enumerate(sparse_layers(hf)):
        entries += _layer(hf, layer, hidden, head)
        ours, theirs = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
        entries += (
            _experts(hf, ours, theirs)
            if is_sparse
            else _mlp(ours, theirs, hf.intermediate_size, hidden)
        )
    entries.append(
        ParameterMapping(
            "decoder.final_layernorm.weight", ("model.norm.weight",), "replicated", ((hidden,),)
        )
    )
    if not hf.tie_word_embeddings:
        entries.append(
            ParameterMapping(
                "output_layer.weight", ("lm_head.weight",), "vocab", ((vocabulary, hidden),)
            )
        )
    return entries


def _layer(hf: PretrainedConfig, layer: int, hidden: int, head: int) -> Iterator[ParameterMapping]:
    """Attention and both norms."""
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    query, key = hf.num_attention_heads * head, hf.num_key_value_heads * head
    qkv = tuple(f"{theirs}self_attn.{name}_proj." for name in "qkv")

    def norm(mine: str, other: str, width: int) -> ParameterMapping:
        return ParameterMapping(
            f"{ours}{mine}.weight", (f"{theirs}{other}.weight",), "replicated", ((width,),)
        )

    yield norm("input_layernorm", "input_layernorm", hidden)
    weights = tuple(f"{name}weight" for name in qkv)
    yield ParameterMapping(
        f"{ours}self_attention.linear_qkv.weight",
        weights,
        "qkv",
        ((query, hidden), (key, hidden), (key, hidden)),
    )
    if hf.model_type == "qwen2":
        biases = tuple(f"{name}bias" for name in qkv)
        yield ParameterMapping(
            f"{ours}self_attention.linear_qkv.bias", biases, "qkv", ((query,), (key,), (key,))
        )
    if hf.model_type in ("qwen3", "qwen3_moe"):
        yield norm("self_attention.q_layernorm", "self_attn.q_norm", head)
        yield norm("self_attention.k_layernorm", "self_attn.k_norm", head)
    out = (f"{theirs}self_attn.o_proj.weight",)
    yield ParameterMapping(
        f"{ours}self_attention.linear_proj.weight", out, "columns", ((hidden, query),)
    )
    yield norm("pre_mlp_layernorm", "post_attention_layernorm", hidden)


def _mlp(
    ours: str, theirs: str, width: int, hidden: int, expert: int | None = None
) -> Iterator[ParameterMapping]:
    gated = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    yield ParameterMapping(
        f"{ours}linear_fc1.weight", gated, "gated", ((width, hidden), (width, hidden)), expert
    )
    yield ParameterMapping(
        f"{ours}linear_fc2.weight",
        (f"{theirs}down_proj.weight",),
        "columns",
        ((hidden, width),),
        expert,
    )


def _experts(hf: PretrainedConfig, ours: str, theirs: str) -> Iterator[ParameterMapping]:
    """The router [E, H] and every expert, one HF tensor per expert and matrix."""
    shape = (hf.num_experts, hf.hidden_size)
    yield ParameterMapping(
        f"{ours}router.weight", (f"{theirs}gate.weight",), "replicated", (shape,)
    )
    for expert in range(hf.num_experts):
        mine, other = f"{ours}experts.local_experts.{expert}.", f"{theirs}experts.{expert}."
        yield from _mlp(mine, other, hf.moe_intermediate_size, hf.hidden_size, expert)


class Rows(Protocol):
    """A whole HF tensor of which slices can be had: a tensor, or one in a file of which only these
    are read.
    """

    def __getitem__(self, index: Any, /) -> Tensor: ...


def to_shard(
    entry: ParameterMapping,
    sources: Sequence[Rows],
    hf: PretrainedConfig,
    tensor_size: int,
    rank: int,
) -> Tensor:
    """Megatron's shard of this parameter on tensor-parallel rank `rank`, from slices of its whole
    HF tensors: no more of them than the shard holds. May be a view.
    """

    def rows(source: Rows, shape: tuple[int, ...]) -> Tensor:
        count = -(-shape[0] // tensor_size)
        return source[min(rank * count, shape[0]) : min((rank + 1) * count, shape[0])]

    if entry.layout == "replicated":
        return sources[0][:]
    if entry.layout == "columns":
        width = entry.shapes[0][1] // tensor_size
        return sources[0][:, rank * width : (rank + 1) * width]
    parts = [rows(source, shape) for source, shape in zip(sources, entry.shapes, strict=True)]
    if entry.layout == "vocab":
        part = parts[0]
        missing = -(-entry.shapes[0][0] // tensor_size) - part.shape[0]
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
    if entry.layout == "gated":
        return torch.cat(parts)
    groups = hf.num_key_value_heads // tensor_size
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def from_shards(
    entry: ParameterMapping, shards: list[Tensor], hf: PretrainedConfig
) -> list[Tensor]:
    """The whole HF tensors of this parameter, from Megatron's shards:
    the inverse of `to_shard`. May be views.
    """
    if entry.layout == "replicated":
        return [shards[0]]
    if entry.layout == "vocab":
        return [_joined(shards, dim=0)[: entry.shapes[0][0]]]
    if entry.layout == "columns":
        return [_joined(shards, dim=1)]
    if entry.layout == "gated":
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [_joined(list(parts), dim=0) for parts in zip(*halves, strict=True)]
    groups = hf.num_key_value_heads
    by_group = torch.cat([shard.unflatten(0, (groups // len(shards), -1)) for shard in shards])
    widths = [shape[0] // groups for shape in entry.shapes]
    return [part.flatten(0, 1) for part in by_group.split(widths, dim=1)]


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts as one tensor; a single part is not copied,
    for it may be the largest tensor there is.
    """
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
