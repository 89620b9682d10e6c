"""Packed weights: the bits of torch's own product, also after a change of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_stare.rollout.packed_weights import PackedLinear, pack_linear_layers

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU lacks oneDNN's bf16"
)


def layer_of(bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_packed_layer_equals_the_layer_bit_for_bit(bias: bool, rows: int) -> None:
    layer, x = layer_of(bias), torch.randn(2, rows, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(PackedLinear(layer)(x), layer(x))


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


def test_bf16_layers_of_a_model_are_packed_and_its_hooks_run() -> None:
    packed, plain = layer_of(bias=False), nn.Linear(80, 4)
    pack_linear_layers(nn.Sequential(packed, plain))
    assert isinstance(packed.forward, PackedLinear)
    assert not isinstance(plain.forward, PackedLinear)
    packed.register_forward_hook(lambda layer, inputs, output: output + 1)
    x = torch.randn(5, 96, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(packed(x), nn.functional.linear(x, packed.weight) + 1)
