"""KL estimators against a reference policy, per token (J.
Schulman, "Approximating KL divergence", 2020).

With d = ln pi_ref - ln pi:
    k1 = -d    abs = |d|    k2 = d^2 / 2
    k3 = e^d - d - 1 with d clamped to [-20, 20], the result to [-10, 10]; low_var_kl is its alias
    k1+, k3+: the value of k1 or k3 with the gradient of k2, the one whose mean is that of the KL
The clamps and the estimators with + are those of verl (core_algos.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.records import LossTokens

ESTIMATORS = ("k1", "k1+", "abs", "k2", "k3", "k3+", "low_var_kl")


def kl_penalty(tokens: LossTokens, kind: str) -> Tensor:
    """The estimator per token [nats]. ValueError: an unknown kind, or no reference surprisal."""
    if tokens.reference_surprisal is None:
        raise ValueError("a KL term needs the reference policy's surprisal")
    return estimate(tokens.surprisal - tokens.reference_surprisal, kind)


def estimate(difference: Tensor, kind: str) -> Tensor:
    """The estimator of d = ln pi_ref - ln pi. ValueError: an unknown kind."""
    if kind in ("k1+", "k3+"):
        gradient = estimate(difference, "k2")
        return gradient - gradient.detach() + estimate(difference.detach(), kind[:2])
    if kind == "k1":
        return -difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    if kind in ("k3", "low_var_kl"):
        difference = torch.clamp(difference, -20.0, 20.0)
        return torch.clamp(torch.expm1(difference) - difference, -10.0, 10.0)
    raise ValueError(f"KL estimator {kind!r} is unknown; use {', '.join(ESTIMATORS)}")
