"""The cache of keys and values: rows leave, repeat and stay in place. Packed weights: the bits of
torch's own product, also after a change of the weights.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from megatron_stare.rollout.embedded import _filled
from megatron_stare.rollout.embedded_model import (
    GROWTH,
    GrowingLayer,
    PackedLinear,
    pack_linear_layers,
)

with_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU lacks oneDNN's bf16"
)


def states(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, 2, length, 4)


def test_the_cache_equals_copies_of_whole_rows_while_sequences_end() -> None:
    torch.manual_seed(0)
    rng, layer = random.Random(0), GrowingLayer()
    keys, values = states(3, 5), states(3, 5)
    layer.update(keys, values)
    repeated = torch.tensor([0, 0, 1, 2, 2, 2, 1])
    layer.batch_select_indices(repeated)
    keys, values = keys[repeated], values[repeated]
    for _ in range(GROWTH + 9):
        more = states(len(keys), 1), states(len(keys), 1)
        keys, values = torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2)
        found = layer.update(*more)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
        if rng.random() < 0.1 and len(keys) > 1:
            rows = torch.tensor(_filled([rng.random() < 0.7 for _ in keys]), dtype=torch.long)
            if len(rows):
                layer.batch_select_indices(rows)
                keys, values = keys[rows], values[rows]
    assert 1 <= len(keys) < 7


def test_places_of_ended_rows_are_filled_from_the_end() -> None:
    assert _filled([True, False, True, False, True, True]) == [0, 4, 2, 5]
    assert _filled([True, True, False]) == [0, 1]
    assert _filled([False, False, True]) == [2]
    assert _filled([False]) == []


def layer_of(bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)


@with_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_packed_layer_equals_the_layer_bit_for_bit(bias: bool, rows: int) -> None:
    layer, x = layer_of(bias), torch.randn(2, rows, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(PackedLinear(layer)(x), layer(x))


@with_bf16
def test_a_change_of_the_weights_is_packed_at_the_next_product() -> None:
    layer, x = layer_of(bias=True), torch.randn(3, 96, dtype=torch.bfloat16)
    packed = PackedLinear(layer)
    with torch.inference_mode():
        before = packed(x)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter * 2)
    with torch.inference_mode():
        assert torch.equal(packed(x), layer(x))
        assert not torch.equal(packed(x), before)


@with_bf16
def test_bf16_layers_of_a_model_are_packed_and_its_hooks_run() -> None:
    packed, plain = layer_of(bias=False), nn.Linear(80, 4)
    pack_linear_layers(nn.Sequential(packed, plain))
    assert isinstance(packed.forward, PackedLinear)
    assert not isinstance(plain.forward, PackedLinear)
    packed.register_forward_hook(lambda layer, inputs, output: output + 1)
    x = torch.randn(5, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(packed(x), nn.functional.linear(x, packed.weight) + 1)
