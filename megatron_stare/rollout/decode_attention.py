"""Attention of one new token per sequence on a CPU, and the key-value cache that it reads.

torch's kernels are made for many queries: with a mask they copy every key head once per query head,
and in bf16 they take one query at a time. Here the query heads of one key head are the rows of one
product. Keys and values are kept in fp32, so that scores and their softmax are not rounded to bf16.

Shape legend: B sequences, Q query heads, K key heads, G = Q / K, S new positions, L positions in
the cache, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "megatron_stare_decode"
GROWTH = 64  # positions that a full cache is enlarged by


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


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
