"""Adapters on the model of an engine: y + s (x A^T) B^T at the output of each adapted layer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

PREFIX = "base_model.model."  # begins the names of adapters, which are PEFT's


class AppliedAdapters:
    """Adapters that forward hooks add, as soon as their tensors have come; `scale` is s."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        self._model, self._scale = model, scale
        self._sides: dict[str, dict[str, Tensor]] = {}  # A [R, I] and B [O, R] of a layer

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a new tensor's copy. AttributeError: the model has no such layer."""
        path, _, side = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        layer: Any = self._model.get_submodule(path)
        if path not in self._sides:
            self._sides[path] = {}
            layer.register_forward_hook(functools.partial(self._added, path))
        self._sides[path][side] = tensor.detach().to(layer.weight, copy=True)

    def places(self) -> Iterator[tuple[str, Tensor]]:
        """The adapters' tensors by name; those of the next version are copied into them."""
        for path, sides in self._sides.items():
            yield from (
                (f"{PREFIX}{path}.lora_{side}.weight", each) for side, each in sides.items()
            )

    def _added(
        self, path: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        sides = self._sides[path]
        return output + self._scale * linear(linear(inputs[0], sides["A"]), sides["B"])
