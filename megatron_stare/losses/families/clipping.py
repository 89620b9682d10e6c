"""Losses that treat ratios outside of the clip otherwise: keep, bound or smooth their gradient.

With r = pi / pi_old, advantage A and sg the stop-gradient. "Clipped" is the surrogate of
losses/grpo.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.losses.grpo import clipped_surrogate, dual_clipped, pessimistic
from megatron_stare.losses.planning import Step
from megatron_stare.losses.registry import policy_loss, variant
from megatron_stare.losses.settings import NonNegative, Positive
from megatron_stare.records import LossPlan, LossTokens


def outside(tokens: LossTokens, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Masks of what PPO clips: below (A < 0, r < 1 - low) and above (A > 0, r > 1 + high)."""
    ratio = tokens.ratio.detach()
    return (tokens.advantage < 0) & (ratio < 1 - low), (tokens.advantage > 0) & (ratio > 1 + high)


def exact_step(tokens: LossTokens) -> Tensor:
    """pi / sg pi: 1, with the gradient of ln pi, however far pi is from pi_old."""
    return torch.exp(tokens.surprisal.detach() - tokens.surprisal)


@policy_loss(family="clipping", source="2509.20712")
def ce_gppo(
    tokens: LossTokens,
    *,
    beta_low: NonNegative = 0.75,
    beta_high: NonNegative = 1.0,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """CE-GPPO (arXiv 2509.20712): clipped tokens keep a bounded gradient.

    L = -beta_low (1 - eps_clip) (r / sg r) A below, -beta_high (1 + eps_clip_high) (r / sg r) A
    above, else -r A; dual clip. beta_low 0.75 is the 7B recipe's (1.5B: 0.5).
    """
    below, above = outside(tokens, eps_clip, eps_clip_high)
    alive = exact_step(tokens)
    ratio = torch.where(below, beta_low * (1 - eps_clip) * alive, tokens.ratio)
    ratio = torch.where(above, beta_high * (1 + eps_clip_high) * alive, ratio)
    return dual_clipped(-tokens.advantage * ratio, tokens.advantage, eps_clip_c)


variant("gppo", "ce_gppo", {"beta_low": 1.0, "beta_high": 1.0}, source="2508.07629")


@policy_loss(family="clipping", source="2603.14389")
def dgpo(
    tokens: LossTokens,
    *,
    power_low: Positive = 1.0,
    power_high: Positive = 2.0,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
) -> Tensor:
    """DGPO (arXiv 2603.14389): L = -A rho, where the weight of a clipped token decays.

    rho = r (sg r / (1 - eps_clip))^n below, r ((1 + eps_clip_high) / sg r)^(1/m) above, else r;
    n `power_low`, m `power_high`. No dual clip.
    """
    below, above = outside(tokens, eps_clip, eps_clip_high)
    gap = tokens.old_surprisal - tokens.surprisal
    fixed = gap.detach()
    # exponents are kept finite where they are not chosen, or their gradient would be 0 x inf
    low = gap + power_low * fixed - power_low * math.log(max(1 - eps_clip, 1e-300))
    high = gap + (math.log1p(eps_clip_high) - fixed) / power_high
    ratio = torch.where(below, torch.exp(torch.where(below, low, 0.0)), tokens.ratio)
    ratio = torch.where(above, torch.exp(torch.where(above, high, 0.0)), ratio)
    return -tokens.advantage * ratio


@policy_loss(family="clipping", source="2506.13585")
def cispo(
    tokens: LossTokens, *, eps_clip: NonNegative = 10.0, eps_clip_high: NonNegative = 0.2
) -> Tensor:
    """CISPO (arXiv 2506.13585): L = -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A ln pi.
    eps_clip 10: no lower bound, as in the usual script.
    """
    weight = torch.clamp(tokens.ratio.detach(), 1 - eps_clip, 1 + eps_clip_high)
    return -weight * tokens.advantage * tokens.log_prob


@policy_loss(family="clipping", source="2504.02546", confidence="paper")
def gpg(tokens: LossTokens) -> Tensor:
    """GPG (arXiv 2504.02546): the plain policy gradient, L = -A ln pi."""
    return -tokens.advantage * tokens.log_prob


@policy_loss(family="clipping", source="2511.20347", aggregation="seq-mean-token-mean")
def sapo(tokens: LossTokens, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> Tensor:
    """SAPO (arXiv 2511.20347): a soft gate instead of a clip.
    L = -A (4 / tau) sigmoid(tau (r - 1)), tau `tau_pos` where A > 0, else `tau_neg`.
    """
    tau = torch.full_like(tokens.advantage, tau_neg)
    tau[tokens.advantage > 0] = tau_pos
    return -tokens.advantage * torch.sigmoid(tau * (tokens.ratio - 1)) * (4.0 / tau)


def plan_bapo(
    step: Step,
    *,
    ratio_lower_start: NonNegative = 0.8,
    ratio_lower_max: NonNegative = 0.95,
    ratio_lower_step: NonNegative = 0.05,
    ratio_upper_start: NonNegative = 1.2,
    ratio_upper_max: NonNegative = 2.0,
    ratio_upper_step: NonNegative = 0.1,
    adv_ratio_target: NonNegative = 0.5,
) -> LossPlan:
    """Bounds of r: raise the lower, then the upper, until positive / negative >= the target, with
    positive and negative the batch's sums of A min(r, upper) (A >= 0) and -A max(r, lower).
    """
    ratio_T, advantage_T = torch.exp(step.log_ratio_T).double(), step.advantage_T.double()

    def contrast(lower: float, upper: float) -> float:
        effective_T = torch.where(advantage_T >= 0, ratio_T.clamp(max=upper), ratio_T.clamp(lower))
        effective_T = effective_T * advantage_T
        negative = -step.across.sum(effective_T.clamp(max=0))
        positive = step.across.sum(effective_T.clamp(min=0))
        return positive / (negative + 1e-8) if negative > 0 else math.inf

    lower, upper = ratio_lower_start, ratio_upper_start
    found = contrast(lower, upper)
    while found < adv_ratio_target and lower < ratio_lower_max and ratio_lower_step:
        lower = min(lower + ratio_lower_step, ratio_lower_max)
        found = contrast(lower, upper)
    while found < adv_ratio_target and upper < ratio_upper_max and ratio_upper_step:
        upper = min(upper + ratio_upper_step, ratio_upper_max)
        found = contrast(lower, upper)
    bounds = {"ratio_lower": lower, "ratio_upper": upper}
    return LossPlan(numbers=bounds, metrics=bounds)


@policy_loss(plan=plan_bapo, family="clipping", source="2510.18927")
def bapo(tokens: LossTokens, *, eps_clip_c: NonNegative = 3.0) -> Tensor:
    """BAPO (arXiv 2510.18927): clipped, between the bounds of its plan; dual clip.

    As in the code, the target compares positive with negative; the paper's text has the share
    positive / (positive + negative). Raising the lower bound raises the negative sum, so an unmet
    target first drives it to its maximum.
    """
    lower, upper = tokens.numbers["ratio_lower"], tokens.numbers["ratio_upper"]
    loss = pessimistic(tokens.ratio, tokens.advantage, 1 - lower, upper - 1)
    return dual_clipped(loss, tokens.advantage, eps_clip_c)


@policy_loss(family="clipping", source="2509.02333", aggregation="seq-mean-token-mean")
def dcpo(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: Positive = 10.0,
) -> Tensor:
    """DCPO's dynamic clipping (arXiv 2509.02333): wide bounds for what was improbable, q = pi_old.

    r from (1 + sqrt(max(0, 1 - 4 eps_clip / q))) / 2 to min(c, (1 + sqrt(1 + 4 eps_clip_high / q))
    / 2), and dual clip at c; below 10, c is 10 in the bound. ln r is not clamped. The code averages
    each response's tokens and does not average responses; divide the learning rate to compare.
    """
    ratio = torch.exp(tokens.old_surprisal - tokens.surprisal)
    inverse = torch.exp(tokens.old_surprisal)  # 1 / q
    low = 0.5 * (1 + torch.sqrt(torch.clamp(1 - 4 * eps_clip * inverse, min=0.0)))
    high = 0.5 * (1 + torch.sqrt(1 + 4 * eps_clip_high * inverse))
    high = torch.clamp(high, max=max(eps_clip_c, 10.0))
    bounded = torch.minimum(torch.maximum(ratio, low), high)
    loss = torch.maximum(-tokens.advantage * ratio, -tokens.advantage * bounded)
    return dual_clipped(loss, tokens.advantage, eps_clip_c)


@policy_loss(family="clipping", source="2512.05591", needs=("entropy", "old_entropy"))
def erc(
    tokens: LossTokens,
    *,
    ratio_low: NonNegative = 0.95,
    ratio_high: NonNegative = 1.05,
    surrogate: Literal["dapo", "gppo"] = "dapo",
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """ERC, entropy ratio clipping (arXiv 2512.05591), on the `surrogate` of DAPO or of GPPO.

    Where (H + 1e-8) / (H_old + 1e-8) is not strictly inside (ratio_low, ratio_high) the finished
    loss keeps its value and loses its gradient. The first optimizer step of a batch has
    H = H_old, so ERC changes nothing there.
    """
    assert tokens.old_entropy is not None, "the caller gives pi_old's entropy"
    if surrogate == "gppo":
        loss = ce_gppo(
            tokens,
            beta_low=1.0,
            beta_high=1.0,
            eps_clip=eps_clip,
            eps_clip_high=eps_clip_high,
            eps_clip_c=eps_clip_c,
        )
    else:
        loss = clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)
    ratio = (tokens.entropy.detach() + 1e-8) / (tokens.old_entropy + 1e-8)
    return torch.where((ratio > ratio_low) & (ratio < ratio_high), loss, loss.detach())
