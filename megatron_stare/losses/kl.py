"""KL estimators against a reference policy, per token (J.
Schulman, "Approximating KL divergence", 2020).

With d = ln pi_ref - ln pi, clamped to [-20, 20]:
    k1 = -d    abs = |d|    k2 = d^2 / 2    k3 = e^d - d - 1    low_var_kl = k3 clamped to [-10, 10]
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.records import LossTokens


def kl_penalty(tokens: LossTokens, kind: str) -> Tensor:
    """The estimator per token [nats]. ValueError: an unknown kind, or no reference surprisal."""
    if tokens.reference_surprisal is None:
        raise ValueError("a KL term needs the reference policy's surprisal")
    return estimate(tokens.surprisal - tokens.reference_surprisal, kind)


def estimate(difference: Tensor, kind: str) -> Tensor:
    """The estimator of d = ln pi_ref - ln pi. ValueError: an unknown kind."""
    difference = torch.clamp(difference, -20.0, 20.0)
    if kind == "k1":
        return -difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    if kind in ("k3", "low_var_kl"):
        found = torch.expm1(difference) - difference
        return torch.clamp(found, -10.0, 10.0) if kind == "low_var_kl" else found
    raise ValueError(f"KL estimator {kind!r} is unknown; use k1, abs, k2, k3 or low_var_kl")
