"""Shared parts of the tests of the head: example inputs, one call for all three ways, the twin's
gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_stare.numerics.fused_loss import fused_loss
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from tests import reference

WAYS = ["logits", "recompute", "fused"]


def head(
    way: str,
    hidden_NH: Tensor,
    shard: VocabShard,
    target_N: Tensor,
    slope_N: Tensor,
    entropy_slope_N: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum slope s + entropy_slope H, surprisal_N, entropy_N) by any of the three ways."""

    def token_loss(surprisal_n: Tensor, entropy_n: Tensor, rows: slice) -> Tensor:
        loss_n = surprisal_n * slope_N[rows]
        return loss_n if entropy_slope_N is None else loss_n + entropy_n * entropy_slope_N[rows]

    if way == "fused":
        needs_entropy_grad = entropy_slope_N is not None
        loss, surprisal_N, entropy_N, _ = fused_loss(
            hidden_NH, shard, target_N, token_loss, needs_entropy_grad=needs_entropy_grad, **options
        )
        return loss, surprisal_N, entropy_N
    stats = token_stats(hidden_NH, shard, target_N, way=way, **options)  # type: ignore[arg-type]
    loss_N = token_loss(stats.surprisal_N, stats.entropy_N, slice(None))
    return loss_N.sum(), stats.surprisal_N, stats.entropy_N


def example(
    rows: int,
    width: int,
    vocabulary: int,
    real: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(rows, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(),
        "weight": (torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * scale)
        .to(dtype)
        .requires_grad_(),
        "target": torch.randint(0, real, (rows,), generator=generator),
        "temperature": torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5,
        "slope": torch.randn(rows, generator=generator, dtype=torch.float64),
        "entropy_slope": torch.randn(rows, generator=generator, dtype=torch.float64),
    }


def twin_gradients(
    data: dict[str, Tensor], real: int, temperature: float | Tensor, entropy: bool
) -> tuple[Any, ...]:
    hidden, weight = (
        data[name].detach().double().requires_grad_() for name in ("hidden", "weight")
    )
    twin = reference.token_statistics(hidden, weight[:real], data["target"], temperature)
    loss_N = twin["surprisal"] * data["slope"]
    if entropy:
        loss_N = loss_N + twin["entropy"] * data["entropy_slope"]
    return (twin, *torch.autograd.grad(loss_N.sum(), (hidden, weight)))


def relative(got: Tensor, want: Tensor) -> float:
    """Largest deviation in units of the largest value."""
    return float(
        (got.detach().double() - want.detach().double()).abs().max() / want.detach().abs().max()
    )
