"""TransformerEngine's fused rotation (RoPE) on small tensors."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor


def _positions(cumulative: Tensor, size: int, rank: int) -> Tensor:
    """The place in its sequence of every packed token that this context rank holds: of 2 `size`
    chunks the rank has one from the front and one from the back.
    """
    parts = []
    for start, stop in itertools.pairwise(cumulative.tolist()):
        chunk = (stop - start) // (2 * size) if size > 1 else stop - start
        parts.append(torch.arange(rank * chunk, (rank + 1) * chunk))
        if size > 1:
            back = 2 * size - 1 - rank
            parts.append(torch.arange(back * chunk, (back + 1) * chunk))
    return torch.cat(parts)


def _rotated(way: int, x: Tensor, *arguments: Any) -> Tensor:
    """x cos a + way rotated_half(x) sin a over the leading widths that have an angle."""
    angles, starts, layout, interleaved, cumulative, size, rank = arguments
    if interleaved or starts is not None:
        raise NotImplementedError("the null device rotates halves, from position 0 on")
    if layout.name.endswith("THD"):
        angle = angles.flatten(0, -2)[_positions(cumulative, size, rank)].unsqueeze(1)
    else:
        angle = angles[: x.shape[0]]
    width = angle.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    first, second = turned.chunk(2, -1)
    half = torch.cat([-second, first], -1)
    angle = angle.float()
    return torch.cat([(turned * angle.cos() + way * half * angle.sin()).to(x.dtype), rest], -1)


def forward(result: Tensor, x: Tensor, *arguments: Any) -> None:
    """(x, angles, first positions, layout, interleaved, cumulative lengths, context size, rank)."""
    result.copy_(_rotated(1, x, *arguments))


def backward(result: Tensor, gradient: Tensor, *arguments: Any) -> None:
    """The rotation back."""
    result.copy_(_rotated(-1, gradient, *arguments))


AFTERWARDS = {"fused_rope_forward": forward, "fused_rope_backward": backward}
