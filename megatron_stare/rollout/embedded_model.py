"""The model of the embedded engine: a transformers model, and what decoding adds to it. On a CPU
attention of one new token with a key-value cache of its own, and packed weights; everywhere
adapters, fp32 logits, the routers' choices, and the tensors by the names of checkpoints.

torch's attention is made for many queries: with a mask it copies every key head once per query
head, and in bf16 it takes one query at a time. Here the query heads of one key head are the rows of
one product. Keys and values are kept in fp32, so that scores and their softmax are not rounded to
bf16.

torch.nn.functional.linear brings a bf16 weight into oneDNN's block format in every call. With few
rows, as in decoding, this takes a quarter to a half of the time. Here a layer packs its weight at
the first product after each change, and gives the same bits. The packed copies take as much memory
as the weights.

Shape legend: B sequences, Q query heads, K key heads, G = Q / K, S new positions, L positions in
the cache, D head width, H hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_stare.numerics.token_stats import tile_of
from megatron_stare.records import RoutingShape

ATTENTION = "megatron_stare_decode"
GROWTH = 64  # positions that a full cache is enlarged by
ADAPTER_PREFIX = "base_model.model."  # begins the names of adapters, which are PEFT's
_PACKED_ROWS = 64  # of the inputs that the block format is chosen for; any number is correct
_ROUTER_BIAS = "mlp.gate.e_score_correction_bias"


def build_model(
    hf_checkpoint: str, dtype: torch.dtype, device: torch.device, fp32_logits: bool
) -> Any:
    """The checkpoint's model on this device, with random weights."""
    whole = AutoConfig.from_pretrained(hf_checkpoint, local_files_only=True)
    config = whole.get_text_config()  # of a vision-language model
    config.tie_word_embeddings = config.tie_word_embeddings or whole.tie_word_embeddings
    if device.type == "cpu":
        config._attn_implementation = ATTENTION
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    if device.type == "cpu":
        pack_linear_layers(model)
    if fp32_logits:
        head = model.get_output_embeddings()
        head.forward = functools.partial(_fp32_logits, head)
    return model


def places_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each checkpoint tensor's destination: its parameter, or its slice of one.

    transformers holds a layer's experts as gate_up_proj [E, 2F, H] and down_proj [E, H, F], which
    its checkpoints name expert by expert.
    """
    yield from (each for each in model.named_buffers() if each[0].endswith(_ROUTER_BIAS))
    for name, parameter in model.named_parameters():
        prefix, marker, matrix = name.partition(".mlp.experts.")
        if not marker:
            yield name, parameter
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[matrix]
        for expert, weight in enumerate(parameter):
            for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                yield f"{prefix}{marker}{expert}.{part}.weight", rows


@contextlib.contextmanager
def noted_choices(model: nn.Module, shape: RoutingShape | None) -> Iterator[list[Tensor]]:
    """The experts that each router chooses while the model runs once, [positions, K], by layer."""
    found: list[Tensor] = []
    handles = []
    for layer in shape.layers if shape else ():
        router = model.get_submodule(f"model.layers.{layer}.mlp.gate")
        # (logits, weights, numbers) of the chosen
        handles.append(router.register_forward_hook(lambda *call: found.append(call[-1][2])))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _fp32_logits(head: Any, hidden_BSH: Tensor) -> Tensor:
    """[B, S, V], the logits of an output layer without bias, as fp32 sums."""
    hidden_NH = hidden_BSH.flatten(0, 1)
    workspace = hidden_NH.new_empty(len(hidden_NH) * len(head.weight), dtype=torch.float32)
    return tile_of(workspace, hidden_NH, head.weight).view(*hidden_BSH.shape[:2], -1)


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer, at the start of buffers with room for further positions."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append [B, K, S, D]; returns all keys and values. Those of the first call are returned as
        they came, for a kernel that wants one dtype.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = self.key_room = key_states.float()
            self.values = self.value_room = value_states.float()
            return key_states, value_states
        start, end = self.keys.shape[2], self.keys.shape[2] + key_states.shape[2]
        if end > self.key_room.shape[2]:
            self.key_room = _enlarged(self.keys, end + GROWTH)
            self.value_room = _enlarged(self.values, end + GROWTH)
        self.key_room[:, :, start:end] = key_states
        self.value_room[:, :, start:end] = value_states
        self.keys, self.values = self.key_room[:, :, :end], self.value_room[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order; one may be named several times. Only rows that move
        are copied.
        """
        length, rows = self.keys.shape[2], len(indices)
        if rows > len(self.key_room):
            self.key_room, self.value_room = self.key_room[indices], self.value_room[indices]
        else:
            place = torch.arange(rows, device=indices.device)
            target = place[indices != place]
            source = indices[target]
            for room in (self.key_room, self.value_room):
                room[target] = room[source]
            self.key_room, self.value_room = self.key_room[:rows], self.value_room[:rows]
        self.keys, self.values = self.key_room[:, :, :length], self.value_room[:, :, :length]


class StateLayer(LinearAttentionLayer):
    """The states of the gated delta net of one layer."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order; one may be named several times."""
        self.reorder_cache(indices)


def empty_cache(config: Any, *, growing: bool) -> DynamicCache:
    """An empty cache of a model with this configuration, with growing layers of keys and values or
    transformers'; windowed layers stay transformers'.
    """
    kinds: dict[type, type] = {LinearAttentionLayer: StateLayer}
    if growing:
        kinds[DynamicLayer] = GrowingLayer
    cache = DynamicCache(config=config)
    cache.layers = [
        kinds[type(layer)]() if type(layer) in kinds else layer for layer in cache.layers
    ]
    return cache


def attention(
    module: nn.Module,
    query_BQSD: Tensor,
    key_BKLD: Tensor,
    value_BKLD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(q k^T scaling) v as [B, S, Q, D]; transformers' own kernel for more than one new
    position. `attention_mask` [B, 1, S, L]: true where a key is read.
    """
    count_B, heads, new, width = query_BQSD.shape
    if new > 1:
        states = (query_BQSD, key_BKLD, value_BKLD, attention_mask)
        return sdpa_attention_forward(module, *states, scaling=scaling, **kwargs)
    scaling = width**-0.5 if scaling is None else scaling
    kinds = key_BKLD.shape[1]
    query_BKGD = query_BQSD.float().reshape(count_B, kinds, heads // kinds, width) * scaling
    score_BKGL = query_BKGD @ key_BKLD.float().transpose(2, 3)
    if attention_mask is not None:
        score_BKGL.masked_fill_(~attention_mask, -torch.inf)
    out_BKGD = torch.softmax(score_BKGL, dim=-1) @ value_BKLD.float()
    return out_BKGD.reshape(count_B, 1, heads, -1).to(query_BQSD.dtype), None


def _enlarged(states: Tensor, length: int) -> Tensor:
    room = states.new_empty(*states.shape[:2], length, states.shape[3])
    room[:, :, : states.shape[2]] = states
    return room


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


class PackedLinear:
    """The forward function of a layer, with a packed copy of its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._packed: Tensor | None = None
        self._changes = -1  # torch's count of changes in place of the weight that was packed

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        if weight._version != self._changes:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS)
            self._changes = weight._version
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")


def pack_linear_layers(model: nn.Module) -> None:
    """Let the bf16 linear layers of this model on a CPU use packed weights, for inference. A CPU
    without oneDNN's bf16 keeps torch's product.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16:
            layer.forward = PackedLinear(layer)  # type: ignore[method-assign, assignment]


class AppliedAdapters:
    """Adapters of a model, y + s (x A^T) B^T at the output of each adapted layer, which forward
    hooks add as soon as their tensors have come; `scale` is s.
    """

    def __init__(self, model: nn.Module, scale: float) -> None:
        self._model, self._scale = model, scale
        self._sides: dict[str, dict[str, Tensor]] = {}  # A [R, I] and B [O, R] of a layer

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a new tensor's copy. AttributeError: the model has no such layer."""
        path, _, side = (
            name.removeprefix(ADAPTER_PREFIX).removesuffix(".weight").rpartition(".lora_")
        )
        layer: Any = self._model.get_submodule(path)
        if path not in self._sides:
            self._sides[path] = {}
            layer.register_forward_hook(functools.partial(self._added, path))
        self._sides[path][side] = tensor.detach().to(layer.weight, copy=True)

    def places(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters' tensors by name; those of the next version are copied into them."""
        for path, sides in self._sides.items():
            yield from (
                (f"{ADAPTER_PREFIX}{path}.lora_{side}.weight", each) for side, each in sides.items()
            )

    def _added(
        self, path: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        sides = self._sides[path]
        return output + self._scale * linear(linear(inputs[0], sides["A"]), sides["B"])
