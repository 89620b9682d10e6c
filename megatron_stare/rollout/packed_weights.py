"""Linear layers of a bf16 model on a CPU whose products read packed weights.

torch.nn.functional.linear brings a bf16 weight into oneDNN's block format in every call. With few
rows, as in decoding, this takes a quarter to a half of the time. Here a layer packs its weight at
the first product after each change, and gives the same bits. The packed copies take as much memory
as the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS = 64  # of the inputs that the block format is chosen for; any number of rows is correct


class PackedLinear:
    """The forward function of a layer, with a packed copy of its weight."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self._packed: Tensor | None = None
        self._changes = -1  # torch's count of changes in place of the weight that was packed

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        if weight._version != self._changes:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
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
