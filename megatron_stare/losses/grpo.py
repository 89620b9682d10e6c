"""The clipped surrogate and its plainest users: GRPO, DAPO and what differs only in defaults.

With ratio r = pi / pi_old and advantage A, per token:

    L = max(-A r, -A clip(r, 1 - eps_clip, 1 + eps_clip_high))
    where A < 0 and eps_clip_c > 1:  L = min(L, -A eps_clip_c)         (dual clip, arXiv 1912.09729)
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.losses.registry import policy_loss, variant
from megatron_stare.losses.settings import NonNegative
from megatron_stare.records import LossTokens


def clipped_surrogate(
    tokens: LossTokens,
    low: float,
    high: float,
    dual: float = 0.0,
    advantage: Tensor | None = None,
) -> Tensor:
    """The formula above, per token; `dual` 0 turns the dual clip off. `advantage`: instead of the
    tokens' own. arXiv 1707.06347, 1912.09729.
    """
    advantage = tokens.advantage if advantage is None else advantage
    loss = pessimistic(torch.exp(tokens.log_ratio), advantage, low, high)
    return dual_clipped(loss, advantage, dual)


def dual_clipped(loss: Tensor, advantage: Tensor, bound: float) -> Tensor:
    """min(L, -A bound) where A < 0 (arXiv 1912.09729); `bound` 0 turns it off."""
    if not bound:
        return loss
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * bound), loss)


def corrected(loss: Tensor, tokens: LossTokens) -> Tensor:
    """The surrogate times the weight for another rollout policy, in a loss with a further term that
    this weight does not concern (`corrects`).
    """
    return loss if tokens.correction is None else loss * tokens.correction


def pessimistic(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) per token, for a ratio of tokens or sequences."""
    return torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, 1.0 - low, 1.0 + high))


@policy_loss(family="clipping", source="2402.03300", confidence="paper")
def grpo(tokens: LossTokens, *, eps_clip: NonNegative = 0.2) -> Tensor:
    """GRPO (arXiv 2402.03300): one symmetric clip `eps_clip`, no dual clip."""
    return clipped_surrogate(tokens, eps_clip, eps_clip)


@policy_loss(family="clipping", source="2503.14476")
def dapo(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """DAPO (arXiv 2503.14476): clip-higher and dual clip.
    With dynamic sampling this is the paper's GRPO-ds.
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)


variant(
    "dr_grpo",
    "grpo",
    {},
    source="2503.20783",
    confidence="code",
    aggregation="seq-mean-token-sum-norm",
)
variant("grpo_ds", "dapo", {})
variant("just_rl", "dapo", {}, source="2512.16649")
