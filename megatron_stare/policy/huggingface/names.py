"""Hugging Face tensor names <-> Megatron parameter names: one table, read in both directions.

Each ParameterMapping says which HF tensors make up one Megatron parameter and how that parameter is
laid out over tensor-parallel ranks. `to_shard` goes HF -> Megatron, `from_shards` back; they are
exact inverses.

Shape legend: D head width, Q query heads times D, K key-value heads times D, F intermediate size, V
vocabulary, H hidden size, E experts, M width of an expert, S of the shared experts together. Of
latent attention: A width of the queries' latent vector, C of the keys' and values', J = C plus the
rotary width, U keys and values of all heads without it, O values of all heads. Of a gated delta
net: N value heads, P width of one, Y = N P, X keys of all heads, Z = 2 X + Y, T taps of the
convolution; G = 2 Q queries and their gates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_stare.policy.huggingface.families import megatron_fields, sparse_layers

Layout = Literal["replicated", "columns", "rows", "vocab", "qkv", "gated_qkv"]


@dataclass(frozen=True)
class ParameterMapping:
    """One Megatron parameter and the HF tensors it holds, in this order.

    layout: replicated on all ranks; columns split along dim 1; rows split along dim 0, several
    tensors (gate and up) stacked on every rank; vocab the same, padded; qkv = query, key and value
    interleaved by query group, split by groups; gated_qkv the same with a gate after every query
    head in HF, and after the queries of a group in Megatron.
    sections: of rows, the parts of the first tensor that are split each for itself; empty: one.
    expert: the number of the routed expert it belongs to, counted over all expert-parallel ranks;
    such a parameter lives on one of them and is split over the expert-tensor-parallel ranks instead
    of the tensor-parallel ones.
    dtype: that which it has in a model of any dtype, if there is one.
    groups: the number of query groups of the whole model, by which qkv is interleaved.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[tuple[int, ...], ...]
    expert: int | None = None
    dtype: torch.dtype | None = None
    sections: tuple[int, ...] = ()
    groups: int = 1

    @property
    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of each HF tensor."""
        return zip(self.hf, self.shapes, strict=True)

    def parts(self) -> list[tuple[int, ...]]:
        """Of rows: the heights of the parts of every HF tensor."""
        first, *rest = ((shape[0],) for shape in self.shapes)
        return [self.sections or first, *rest]


@dataclass(frozen=True)
class NameRow:
    """A ParameterMapping of every layer that has it. `hf`: its HF tensors; `shapes`: a word of
    sizes for each; `when`: it exists where this TransformerConfig field is on; `sections`: a word.
    """

    megatron: str
    hf: str
    layout: Layout
    shapes: str
    when: str = ""
    dtype: torch.dtype | None = None
    sections: str = ""


_BEFORE = (NameRow("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocab", "VH"),)
_AFTER = (NameRow("decoder.final_layernorm.weight", "model.norm.weight", "replicated", "H"),)
_OUTPUT = (NameRow("output_layer.weight", "lm_head.weight", "vocab", "VH"),)
_FIRST_NORM = (NameRow("input_layernorm.weight", "input_layernorm.weight", "replicated", "H"),)
_SECOND_NORM = (
    NameRow("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "replicated", "H"),
)
_QKV = "self_attn.q_proj.{0} self_attn.k_proj.{0} self_attn.v_proj.{0}"


def _attention(ours: str, theirs: str, layout: Layout, shape: str, when: str = "") -> NameRow:
    names = f"self_attention.{ours}.weight", f"self_attn.{theirs}.weight"
    return NameRow(*names, layout, shape, when)


_AFTER_QKV = (
    _attention("q_layernorm", "q_norm", "replicated", "D", "qk_layernorm"),
    _attention("k_layernorm", "k_norm", "replicated", "D", "qk_layernorm"),
    _attention("linear_proj", "o_proj", "columns", "HQ"),
)
_GROUPED = (
    NameRow("self_attention.linear_qkv.weight", _QKV.format("weight"), "qkv", "QH KH KH"),
    NameRow("self_attention.linear_qkv.bias", _QKV.format("bias"), "qkv", "Q K K", "add_qkv_bias"),
    *_AFTER_QKV,
)
_GATED = (
    NameRow("self_attention.linear_qkv.weight", _QKV.format("weight"), "gated_qkv", "GH KH KH"),
    *_AFTER_QKV,
)


def _delta(ours: str, theirs: str, layout: Layout, shapes: str, sections: str = "") -> NameRow:
    names = " ".join(f"linear_attn.{name}" for name in theirs.split())
    return NameRow(f"self_attention.{ours}", names, layout, shapes, sections=sections)


_GATED_DELTA = (
    _delta(
        "in_proj.weight",
        "in_proj_qkv.weight in_proj_z.weight in_proj_b.weight in_proj_a.weight",
        "rows",
        "ZH YH NH NH",
        "XXY",
    ),
    _delta("conv1d.weight", "conv1d.weight", "rows", "Z1T", "XXY"),
    _delta("dt_bias", "dt_bias", "rows", "N"),
    _delta("A_log", "A_log", "rows", "N"),
    _delta("out_norm.weight", "norm.weight", "replicated", "P"),
    _delta("out_proj.weight", "out_proj.weight", "columns", "HY"),
)


# Of multi-head latent attention, with a latent vector of the queries or without one.
_QUERY_LATENT = (
    _attention("linear_q_down_proj", "q_a_proj", "replicated", "AH"),
    _attention("q_layernorm", "q_a_layernorm", "replicated", "A"),
    _attention("linear_q_up_proj", "q_b_proj", "rows", "QA"),
)
_QUERY = (_attention("linear_q_proj", "q_proj", "rows", "QH"),)
_LATENT = (
    _attention("linear_kv_down_proj", "kv_a_proj_with_mqa", "replicated", "JH"),
    _attention("kv_layernorm", "kv_a_layernorm", "replicated", "C"),
    _attention("linear_kv_up_proj", "kv_b_proj", "rows", "UC"),
    _attention("linear_proj", "o_proj", "columns", "HO"),
)
_ROUTER = (
    NameRow("mlp.router.weight", "mlp.gate.weight", "replicated", "EH"),
    NameRow(
        "mlp.router.expert_bias",
        "mlp.gate.e_score_correction_bias",
        "replicated",
        "E",
        "moe_router_enable_expert_bias",
        torch.float32,
    ),
)


def _mlp(ours: str, theirs: str, width: str, when: str = "") -> tuple[NameRow, ...]:
    gated, down = f"{theirs}.gate_proj.weight {theirs}.up_proj.weight", f"{theirs}.down_proj.weight"
    return (
        NameRow(f"{ours}.linear_fc1.weight", gated, "rows", f"{width}H {width}H", when),
        NameRow(f"{ours}.linear_fc2.weight", down, "columns", f"H{width}", when),
    )


def _shared_rows(fields: dict[str, Any]) -> tuple[NameRow, ...]:
    """Rows of the experts that every token meets; where they have a gate, HF calls them one."""
    ours = "mlp.shared_experts"
    if not fields.get("moe_shared_expert_gate"):
        return _mlp(ours, "mlp.shared_experts", "S", "moe_shared_expert_intermediate_size")
    gate = NameRow(f"{ours}.gate_weight", "mlp.shared_expert_gate.weight", "replicated", "1H")
    return (*_mlp(ours, "mlp.shared_expert", "S"), gate)


def is_delta_net(fields: dict[str, Any], layer: int) -> bool:
    """Whether a layer has a gated delta net in place of attention."""
    return "linear_attention_freq" in fields and bool(fields["linear_attention_freq"][layer])


def attention_rows(fields: dict[str, Any], layer: int) -> tuple[NameRow, ...]:
    """Rows of the name table for a layer's attention, with these fields of TransformerConfig."""
    if is_delta_net(fields, layer):
        return _GATED_DELTA
    if not fields.get("multi_latent_attention"):
        return _GATED if fields.get("attention_output_gate") else _GROUPED
    return (_QUERY if fields["q_lora_rank"] is None else _QUERY_LATENT) + _LATENT


def name_table(hf: PretrainedConfig) -> list[ParameterMapping]:
    """The table in the order of the layers. Megatron names are those of an unwrapped GPTModel."""
    fields = megatron_fields(hf)
    sizes = sizes_of(hf, fields)

    def entries(
        rows: Sequence[NameRow], ours: str = "", theirs: str = "", expert: int | None = None
    ) -> Iterator[ParameterMapping]:
        for row in rows:
            if not row.when or fields.get(row.when):
                names = tuple(f"{theirs}{name}" for name in row.hf.split())
                shapes = tuple(tuple(map(sizes.__getitem__, word)) for word in row.shapes.split())
                sections = tuple(map(sizes.__getitem__, row.sections))
                yield ParameterMapping(
                    *(f"{ours}{row.megatron}", names, row.layout, shapes, expert, row.dtype),
                    sections,
                    groups=fields["num_query_groups"],
                )

    table = list(entries(_BEFORE))
    for layer, is_sparse in enumerate(sparse_layers(hf)):
        places = (f"decoder.layers.{layer}.", f"model.layers.{layer}.")
        table += entries(_FIRST_NORM + attention_rows(fields, layer) + _SECOND_NORM, *places)
        if not is_sparse:
            table += entries(_mlp("mlp", "mlp", "F"), *places)
            continue
        table += entries(_ROUTER + _shared_rows(fields), *places)
        for expert in range(sizes["E"]):
            names = (f"mlp.experts.local_experts.{expert}", f"mlp.experts.{expert}")
            table += entries(_mlp(*names, "M"), *places, expert)
    table += entries(_AFTER if hf.tie_word_embeddings else _AFTER + _OUTPUT)
    return table


def sizes_of(hf: PretrainedConfig, fields: dict[str, Any]) -> dict[str, int]:
    """The letters of the legend above."""
    head, heads = fields["kv_channels"], fields["num_attention_heads"]
    latent, value = fields.get("kv_lora_rank", 0), fields.get("v_head_dim", 0)
    delta_heads = fields.get("linear_num_value_heads", 0)
    delta_width = fields.get("linear_value_head_dim", 0)
    delta_keys = fields.get("linear_num_key_heads", 0) * fields.get("linear_key_head_dim", 0)
    return {
        "1": 1,
        "N": delta_heads,
        "P": delta_width,
        "X": delta_keys,
        "Y": delta_heads * delta_width,
        "Z": 2 * delta_keys + delta_heads * delta_width,
        "T": fields.get("linear_conv_kernel_dim", 0),
        "G": 2 * heads * head,
        "A": fields.get("q_lora_rank") or 0,
        "C": latent,
        "J": latent + fields.get("qk_pos_emb_head_dim", 0),
        "U": heads * (fields.get("qk_head_dim", 0) + value),
        "O": heads * value,
        "V": hf.vocab_size,
        "H": fields["hidden_size"],
        "F": fields["ffn_hidden_size"],
        "D": head,
        "Q": heads * head,
        "K": fields["num_query_groups"] * head,
        "E": fields.get("num_moe_experts", 0),
        "M": fields.get("moe_ffn_hidden_size", 0),
        "S": fields.get("moe_shared_expert_intermediate_size") or 0,
    }


class Rows(Protocol):
    """A whole HF tensor of which slices can be had: a tensor, or one in a file of which only these
    are read.
    """

    def __getitem__(self, index: Any, /) -> Tensor: ...


def to_shard(
    entry: ParameterMapping, sources: Sequence[Rows], tensor_size: int = 1, rank: int = 0
) -> Tensor:
    """Megatron's shard of this parameter on tensor-parallel rank `rank`, from slices of its whole
    HF tensors: no more of them than the shard holds. May be a view.
    """

    def rows(source: Rows, heights: tuple[int, ...]) -> Iterator[Tensor]:
        start = 0
        for height in heights:
            count = -(-height // tensor_size)
            first, last = (min(place * count, height) for place in (rank, rank + 1))
            yield source[start + first : start + last]
            start += height

    if entry.layout == "replicated":
        return sources[0][:]
    if entry.layout == "columns":
        width = entry.shapes[0][1] // tensor_size
        return sources[0][:, rank * width : (rank + 1) * width]
    parts = [
        part
        for source, heights in zip(sources, entry.parts(), strict=True)
        for part in rows(source, heights)
    ]
    if entry.layout == "vocab":
        part = parts[0]
        missing = -(-entry.shapes[0][0] // tensor_size) - part.shape[0]
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
    if entry.layout == "rows":
        return torch.cat(parts)
    grouped = [part.unflatten(0, (entry.groups // tensor_size, -1)) for part in parts]
    if entry.layout == "gated_qkv":
        grouped[0] = _swapped(grouped[0], _heads_of_group(entry), 2)
    return torch.cat(grouped, dim=1).flatten(0, 1)


def from_shards(entry: ParameterMapping, shards: list[Tensor]) -> list[Tensor]:
    """The whole HF tensors from Megatron's shards: the inverse of `to_shard`. May be views."""
    if entry.layout == "replicated":
        return [shards[0]]
    if entry.layout == "vocab":
        return [joined(shards)[: entry.shapes[0][0]]]
    if entry.layout == "columns":
        return [joined(shards, dim=1)]
    if entry.layout == "rows":
        heights = [height // len(shards) for part in entry.parts() for height in part]
        stacked = [shard.split(heights) for shard in shards]
        parts = iter([joined(list(part)) for part in zip(*stacked, strict=True)])
        return [joined([next(parts) for _ in part]) for part in entry.parts()]
    local = entry.groups // len(shards)
    by_group = torch.cat([shard.unflatten(0, (local, -1)) for shard in shards])
    widths = [shape[0] // entry.groups for shape in entry.shapes]
    found = list(by_group.split(widths, dim=1))
    if entry.layout == "gated_qkv":
        found[0] = _swapped(found[0], 2, _heads_of_group(entry))
    return [part.flatten(0, 1) for part in found]


def _heads_of_group(entry: ParameterMapping) -> int:
    """Query heads of a group, of gated_qkv: queries have gates as wide as they are."""
    return entry.shapes[0][0] // (2 * entry.shapes[1][0])


def _swapped(part: Tensor, outer: int, inner: int) -> Tensor:
    """[groups, outer * inner * D, ...] -> [groups, inner * outer * D, ...]."""
    return part.unflatten(1, (outer, inner, -1)).transpose(1, 2).flatten(1, 3)


def joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    """The parts as one tensor; a single one, perhaps the largest there is, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
