"""Core attention for machines without TransformerEngine,
put into Megatron's SelfAttention by ModuleSpec.

Megatron's local DotProductAttention builds a [B, heads, S, S] score tensor and refuses packed
sequences and context parallelism. This one keeps q, k, v, out and one log-sum-exp per query and
head, so memory is linear in tokens; it takes padded batches and packed sequences, whole or split
over a context-parallel group.

Context parallelism: the positions of every sequence are cut into 2 * cp chunks of equal length and
rank r holds chunks r and 2 * cp - 1 - r, so that all ranks have equal work under the causal mask
(Megatron's and TransformerEngine's zigzag order). Keys and values are gathered over the group in
the forward and again in the backward, not kept; each local chunk attends to its whole prefix; the
gradients of keys and values go back to their owners by one all-to-all and are added up in rank
order, in fp32 at least, so the result is deterministic. (Llama 3, arXiv 2407.21783, section 3.3.2;
ring attention, arXiv 2310.01889, for blockwise exactness.)

Shape legend: S positions on this rank, B sequences, T packed tokens on this rank, H query heads, G
key-value heads, D head width; N query rows, U key rows of all context ranks, of the flattened [S,
B] or of [T].
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_stare.numerics.exchange import to_device
from megatron_stare.numerics.vocab_shard import compute_dtype
from megatron_stare.policy.cpu_layers.flash import attend, attend_backward
from megatron_stare.policy.cpu_layers.spans import Span, Spans

_HALF = (torch.bfloat16, torch.float16)


class CoreAttention(nn.Module):
    """softmax(scale q k^T) v under a causal mask, scale = 1 / sqrt(D) unless given.

    Constructor arguments are those Megatron's SelfAttention passes to any core attention;
    `pg_collection.cp` is read where config.context_parallel_size > 1, and `cp_comm_type` is not
    (the scheme above is the only one). ValueError: a field asks for something that this attention
    does not compute; the message names the field.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _require("attention_dropout", dropout, 0)
        _require("attention_type", attention_type, "self")
        mask = getattr(attn_mask_type, "name", attn_mask_type)
        _require("attn_mask_type", mask, "causal", "padding_causal")
        _require("window_size", getattr(config, "window_size", None), None)
        _require("softmax_type", getattr(config, "softmax_type", "vanilla"), "vanilla")
        self.softmax_scale = (
            1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        )
        self.context_size, self.context_rank = config.context_parallel_size, 0
        self.context_group: Any = None
        if self.context_size > 1:
            self.context_group, self.context_rank = pg_collection.cp, pg_collection.cp.rank()
            _require("ranks of pg_collection.cp", self.context_group.size(), self.context_size)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Padded: query_SBHD, key_SBGD, value_SBGD -> [S, B, H * D]; padding stands on the right.

        Packed (`packed_seq_params`, format thd): query_THD, key_TGD, value_TGD -> [T, H * D]; with
        a batch axis of one after T, the result has it too. Sequences lie at cu_seqlens_q_padded, or
        at cu_seqlens_q without it: offsets in the whole batch, not in this rank's share. A sequence
        with a pair in `packed_seq_params.prefixes` (policy/model.py) sees that many further rows.
        ValueError: a mask or bias, an unknown format, offsets that do not cover the tokens, lengths
        that context parallelism cannot cut into chunks.
        """
        for name, given in {
            "attention_mask": attention_mask,
            "attention_bias": attention_bias,
        }.items():
            if given is not None:
                raise ValueError(f"{name}: CoreAttention is causal and takes none; pass None")
        if packed_seq_params is None:
            sequences, batch = query.shape[:2]
            layout = _padded(sequences, batch, self.context_size, self.context_rank, query.device)
        else:
            layout = self._packed(packed_seq_params, query)
        rows = query.dim() - 2
        q_NHD, k_NGD, v_NGD = (x.reshape(-1, *x.shape[rows:]) for x in (query, key, value))
        # Megatron's value is a view into the fused projection; saved as such it would keep all of
        # that alive. Latent attention's may be narrower; packed ones come padded.
        width = v_NGD.shape[-1]
        v_NGD = nn.functional.pad(v_NGD, (0, q_NHD.shape[-1] - width)).contiguous()
        out_NHD = _Attention.apply(
            q_NHD, k_NGD, v_NGD, layout, self.softmax_scale, self.context_group
        )[..., :width]
        return out_NHD.reshape(*query.shape[:rows], -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Nothing to save: there are no parameters."""
        return {}

    def _packed(self, params: Any, query: Tensor) -> _Layout:
        _require("packed_seq_params.qkv_format", params.qkv_format, "thd")
        size, local_size = self.context_size, params.local_cp_size
        _require("packed_seq_params.local_cp_size", local_size, size, None)
        if query.dim() == 4:
            _require("batch axis of a packed query", query.shape[1], 1)
        starts, key_starts = params.cu_seqlens_q, params.cu_seqlens_kv
        if params.cu_seqlens_q_padded is not None:
            starts, key_starts = params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded
        if key_starts is not starts and not torch.equal(key_starts, starts):
            raise ValueError("packed_seq_params: cu_seqlens_kv must be equal to cu_seqlens_q")
        prefixes = tuple(getattr(params, "prefixes", ()))
        place = (query.shape[0], size, self.context_rank, query.device)
        return _packed(tuple(starts.tolist()), *place, prefixes)


def _require(name: str, value: Any, *known: Any) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}: CoreAttention knows {known[0]!r} alone")


@dataclass(frozen=True)
class _Layout:
    """The key rows that each query row sees, and the places of key rows of natural order once
    gathered.

    natural_U: row of [rank, key or value, local row], flattened, that holds key row u (its value
    stands `local` rows on); None without context parallelism.
    """

    spans: Spans
    natural_U: Tensor | None = None


# All layers of a micro-batch have the same layout, and so have those of some other micro-batches.
@functools.lru_cache(maxsize=64)
def _padded(length: int, batch: int, size: int, rank: int, device: torch.device) -> _Layout:
    """Sequence b of a flattened [S, B] tensor is the rows b, b + B, b + 2 B, ..."""
    spans = [span for b in range(batch) for span in _zigzag(0, length * size, size, rank, b, batch)]
    return _layout(spans, (0, length * size * batch), size, device)


@functools.lru_cache(maxsize=8)
def _packed(
    starts: tuple[int, ...],
    tokens: int,
    size: int,
    rank: int,
    device: torch.device,
    prefixes: tuple[tuple[int, int], ...],
) -> _Layout:
    """Sequences one after the other; `starts` are offsets in the batch of all context ranks.
    `prefixes`: first row and number of the rows that each sequence sees before its own; empty:
    none does. There are none under context parallelism.
    """
    if starts[0] != 0 or starts[-1] != tokens * size or sorted(starts) != list(starts):
        raise ValueError(
            f"packed_seq_params: cu_seqlens run from {starts[0]} to {starts[-1]}; they must rise "
            f"from 0 to {tokens} tokens on this rank times context_parallel_size={size}"
        )
    spans = [
        span
        for start, stop in itertools.pairwise(starts)
        for span in _zigzag(start, stop - start, size, rank)
    ]
    if prefixes:
        spans = [
            dataclasses.replace(span, prefix_start=start, prefix=count)
            for span, (start, count) in zip(spans, prefixes, strict=True)
        ]
    return _layout(spans, starts, size, device)


def _layout(spans: list[Span], starts: Sequence[int], size: int, device: torch.device) -> _Layout:
    natural = to_device(_natural_rows(starts, size), device) if size > 1 else None
    return _Layout(Spans(spans, device), natural)


def _zigzag(
    start: int, length: int, size: int, rank: int, offset: int = 0, stride: int = 1
) -> list[Span]:
    """The spans of one sequence on one rank:
    all of it, or chunks `rank` and 2 * size - 1 - rank with their prefixes.

    Position p of the sequence is key row start + p * stride + offset.
    """
    first = start + offset
    if size == 1:
        return [Span(first, first, length, stride)]
    if length % (2 * size):
        raise ValueError(
            f"a sequence of {length} tokens is not a multiple of 2 * context_parallel_size = "
            f"2 * {size}; pad it"
        )
    chunk, local = length // (2 * size), start // size + offset
    return [
        Span(
            q_start=local + half * chunk * stride,
            k_start=first + number * chunk * stride,
            length=chunk,
            stride=stride,
            prefix_start=first,
            prefix=number * chunk,
        )
        for half, number in enumerate((rank, 2 * size - 1 - rank))
    ]


def _natural_rows(starts: Sequence[int], size: int) -> Tensor:
    """_Layout.natural_U of sequences that lie at `starts`."""
    local = starts[-1] // size
    parts = [torch.empty(0, dtype=torch.long)]
    for start, stop in itertools.pairwise(starts):
        chunk = (stop - start) // (2 * size)
        place_c = torch.arange(chunk)
        for number in range(2 * size):
            owner, half = (number, 0) if number < size else (2 * size - 1 - number, 1)
            parts.append(owner * 2 * local + start // size + half * chunk + place_c)
    return torch.cat(parts)


class _Attention(torch.autograd.Function):
    """out_NHD of the layout's spans. Saves its local inputs, its output and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        layout: _Layout,
        scale: float,
        group: Any,
    ) -> Tensor:
        ctx.layout, ctx.scale, ctx.group = layout, scale, group
        qkv = (q_NHD, *_gather(k_NGD, v_NGD, layout, group))
        out_NHD, *state = attend(qkv, layout.spans, scale)
        ctx.save_for_backward(q_NHD, k_NGD, v_NGD, out_NHD, *state)
        return out_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        q_NHD, k_NGD, v_NGD, out_NHD, *state = ctx.saved_tensors
        qkv = (q_NHD, *_gather(k_NGD, v_NGD, ctx.layout, ctx.group))
        dq_NHD, dk_UGD, dv_UGD = attend_backward(
            grad_NHD, qkv, out_NHD, state, ctx.layout.spans, ctx.scale
        )
        dk_NGD, dv_NGD = _send_back(dk_UGD, dv_UGD, ctx.layout, ctx.group)
        return dq_NHD, dk_NGD, dv_NGD, None, None, None


def _gather(k_NGD: Tensor, v_NGD: Tensor, layout: _Layout, group: Any) -> tuple[Tensor, Tensor]:
    """The keys and values of all context ranks, every sequence in its natural order."""
    if layout.natural_U is None:
        return k_NGD, v_NGD
    local = torch.cat((k_NGD, v_NGD))
    everything = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(everything, local, group=group)
    return (
        everything.index_select(0, layout.natural_U),
        everything.index_select(0, layout.natural_U + k_NGD.shape[0]),
    )


def _send_back(
    dk_UGD: Tensor, dv_UGD: Tensor, layout: _Layout, group: Any
) -> tuple[Tensor, Tensor]:
    """The sum over ranks of the gradients of this rank's own keys and values.

    An all-to-all and a sum instead of a reduce-scatter: the same bytes on the wire, any dtype over
    gloo and NCCL alike, a fixed order of addition, and sums of half-precision gradients in fp32.
    """
    if layout.natural_U is None:
        return dk_UGD, dv_UGD
    local = dk_UGD.shape[0] // group.size()
    outgoing = dk_UGD.new_empty(2 * dk_UGD.shape[0], *dk_UGD.shape[1:])
    outgoing.index_copy_(0, layout.natural_U, dk_UGD)
    outgoing.index_copy_(0, layout.natural_U + local, dv_UGD)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    wide = compute_dtype(incoming)
    total = incoming.unflatten(0, (group.size(), 2, local)).sum(0, dtype=wide).to(incoming.dtype)
    return total[0], total[1]


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, with 1 + weight in its place under
    config.layernorm_zero_centered_gamma; x [..., hidden_size] -> the same shape and dtype.

    In half precision the statistics are fp32 and the quotient is rounded before the weight
    multiplies it, as Hugging Face's Qwen2, Qwen3 and Llama do; 1 + weight multiplies it in fp32, as
    in Qwen3.5. Constructor arguments are those Megatron passes to any norm. Source: Zhang and
    Sennrich, arXiv 1910.07467.

    Under sequence parallelism every tensor-parallel rank normalises other tokens, so the weight's
    gradient is a partial sum on each. Megatron's finalize_model_grads adds it up over the tensor
    group for parameters whose `sequence_parallel` is true (and, with config.qk_layernorm, for
    everything named q_layernorm or k_layernorm: other heads on each rank).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = getattr(config, "layernorm_zero_centered_gamma", False)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centered:
            wide = x.to(compute_dtype(x))
            weight = 1 + self.weight.to(wide.dtype)
            return nn.functional.rms_norm(wide, weight.shape, weight, self.eps).to(x.dtype)
        if x.dtype not in _HALF:
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return (
            nn.functional.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype)
            * self.weight
        )
