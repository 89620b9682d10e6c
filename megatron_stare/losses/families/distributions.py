"""Objectives that read the whole next-token distribution: of each token [V] logits are kept.

Entropies of a part of the vocabulary, with their gradient; logits are at the sampling temperature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_stare.losses.grpo import clipped_surrogate
from megatron_stare.losses.planning import Plan, Step
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import NonNegative, Share
from megatron_stare.records import LossTokens


def truncated_entropy(logits_NV: Tensor, share: float) -> Tensor:
    """Entropy [nats] of the softmax without the int(V share) smallest logits. arXiv 2509.03493."""
    size = logits_NV.shape[-1]
    kept_NK = torch.topk(logits_NV, size - int(size * share), dim=-1).values
    return _entropy(torch.log_softmax(kept_NK, dim=-1))


def _entropy(log_NV: Tensor) -> Tensor:
    return -(torch.exp(log_NV) * log_NV).sum(-1)


def plan_aent(
    step: Step,
    *,
    coefficient: NonNegative = 1e-3,
    adaptive: bool = False,
    low: NonNegative = 0.1,
    high: NonNegative = 0.5,
    change: NonNegative = 1e-3,
    coefficient_min: NonNegative = 1e-5,
    coefficient_max: NonNegative = 0.01,
    warmup: NonNegative = 0.0,
) -> Plan:
    """The bonus of the last step's decision; then, with `adaptive` and past the warm-up,
    a <- clip(a - change (min(0, H - low) + max(0, H - high))): a dead band, proportional outside.
    H is the batch's whole entropy: the truncated one is known only while the update runs.
    """
    value, number = step.state.get("coefficient", coefficient), step.state.get("step", 0.0)
    moved = value
    if adaptive and number >= warmup and math.isfinite(step.entropy):
        error = min(0.0, step.entropy - low) + max(0.0, step.entropy - high)
        moved = min(max(value - change * error, coefficient_min), coefficient_max)
    return Plan(
        numbers={"bonus": value},
        metrics={"entropy_coefficient": value},
        state={"coefficient": moved, "step": number + 1.0},
    )


@policy_loss(
    plan=plan_aent, family="distributions", source="2509.03493", head="logits", needs=("logits",)
)
def aent(
    tokens: LossTokens,
    *,
    truncation: Share = 0.2,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 0.0,
) -> Tensor:
    """AEnt (arXiv 2509.03493): clipped - a H~, with the gradient through H~, the entropy without
    the share `truncation` of smallest logits; a from its plan.
    """
    assert tokens.logits is not None, "a loss with head=logits gets them"
    bonus = tokens.numbers["bonus"] * truncated_entropy(tokens.logits, truncation)
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c) - bonus
