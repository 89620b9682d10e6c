"""Tokens that leave loss and denominator (`kept_T` of the plan)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_stare.losses.grpo import clipped_surrogate
from megatron_stare.losses.planning import Step
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import Fraction, NonNegative
from megatron_stare.records import LossPlan, LossTokens


def kept(step: Step, kept_T: Tensor) -> LossPlan:
    """The plan of a mask, with what it keeps as a metric."""
    return LossPlan(kept_T=kept_T, metrics={"kept_fraction": step.share(kept_T)})


def plan_stapo(
    step: Step, *, probability_threshold: Fraction = 0.002, entropy_quantile: Fraction = 0.8
) -> LossPlan:
    """Leave out A > 0 with pi < tau_p and H below the batch's quantile: spurious tokens."""
    limit = step.across.quantile(step.entropy_T, entropy_quantile)
    spurious_T = (step.advantage_T > 0) & (step.probability_T < probability_threshold)
    return kept(step, ~(spurious_T & (step.entropy_T < limit)))


@policy_loss(
    plan=plan_stapo,
    family="masking",
    source="2602.15620",
    confidence="second-hand",
    needs=("entropy",),
)
def stapo(
    tokens: LossTokens, *, eps_clip: NonNegative = 0.2, eps_clip_high: NonNegative = 0.28
) -> Tensor:
    """STAPO / S2T (arXiv 2602.15620): clipped, over the tokens its plan keeps, which are also the
    denominator. The clip's values are inferred.
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip_high)


def plan_entropy_20(step: Step, *, entropy_share: Fraction = 0.2) -> LossPlan:
    """Keep the max(1, ceil(share n)) tokens of largest entropy."""
    count = max(1, math.ceil(round(entropy_share * step.tokens, 9)))
    everywhere_T = torch.ones_like(step.entropy_T, dtype=torch.bool)
    return kept(step, step.top(step.entropy_T, everywhere_T, count))


@policy_loss(plan=plan_entropy_20, family="masking", source="2506.01939", needs=("entropy",))
def entropy_20(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """20-Entropy, "Beyond the 80/20 rule" (arXiv 2506.01939): DAPO on the tokens its plan keeps.
    The authors' code chooses per micro-batch; this does over the global batch.
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)


def plan_clip_b(step: Step, *, mu: NonNegative = 2.5) -> LossPlan:
    """Leave out A < 0 with S - mean S < -mu std S: S = p (H + ln p), p the rollout policy's."""
    logprob_T = step.batch.rollout_logprob_T.double()
    signal_T = torch.exp(logprob_T) * (step.old_entropy_T.double() + logprob_T)
    mean, spread = step.across.mean(signal_T), step.across.std(signal_T)
    low_T = signal_T - mean < -mu * spread
    return kept(step, ~((step.advantage_T < 0) & low_T) | (spread < 1e-12))


@policy_loss(
    plan=plan_clip_b, family="masking", source="2602.03392", needs=("entropy", "rollout_log_prob")
)
def grpo_clip_b(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 3.0,
) -> Tensor:
    """GRPO-Clip_B (arXiv 2602.03392): clipped with a dual clip, over the tokens that its plan
    keeps, which are also the denominator; H is the entropy of pi_old.
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)


def plan_clip_v(step: Step, *, mu: NonNegative = 8.5, max_share: Fraction = 1e-4) -> LossPlan:
    """Leave out A <= 0 with D > mu std D, where D = sum_v p_v^2 (H + ln p_v) - p (H + ln p).

    That D is the entropy sensitivity g, which the scoring pass measures. Of A < 0 at most
    max(1, int(max_share N)), by largest D, if more than that share of all tokens would go; A = 0 is
    outside of that bound.
    """
    change_T = step.sensitivity_T.double()
    spread = step.across.std(change_T)
    over_T = (step.advantage_T <= 0) & (change_T > mu * spread)
    if spread < 1e-12:
        over_T = torch.zeros_like(over_T)
    if step.share(over_T) > max_share:
        negative_T = over_T & (step.advantage_T < 0)
        bound = max(int(max_share * step.tokens), 1)
        over_T = (over_T & ~negative_T) | step.top(change_T, negative_T, bound)
    return kept(step, ~over_T)


@policy_loss(
    plan=plan_clip_v, family="masking", source="2602.03392", needs=("entropy", "sensitivity")
)
def grpo_clip_v(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 3.0,
) -> Tensor:
    """GRPO-Clip_V (arXiv 2602.03392): clipped with a dual clip, over the tokens that its plan
    keeps, which are also the denominator.
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)


def plan_positive(step: Step) -> LossPlan:
    """Keep A > 0."""
    return kept(step, step.advantage_T > 0)


def plan_negative(step: Step) -> LossPlan:
    """Keep A < 0."""
    return kept(step, step.advantage_T < 0)


@policy_loss(plan=plan_positive, family="masking", source="2506.01347")
def psr(tokens: LossTokens, *, eps_clip: NonNegative = 0.2) -> Tensor:
    """Positive sample reinforcement (arXiv 2506.01347): clipped, over A > 0, which is also the
    denominator. Published with A = 1 of correct answers (scoring.advantage).
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip)


@policy_loss(plan=plan_negative, family="masking", source="2506.01347")
def nsr(tokens: LossTokens, *, eps_clip: NonNegative = 0.2) -> Tensor:
    """Negative sample reinforcement (arXiv 2506.01347): clipped, over A < 0, which is also the
    denominator. Published with A = -1 of wrong answers (scoring.advantage).
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip)


@policy_loss(family="masking", source="2506.01347")
def w_reinf(tokens: LossTokens, *, eps_clip: NonNegative = 0.2) -> Tensor:
    """W-REINFORCE (arXiv 2506.01347): clipped, over all tokens. Published with A = 0.1 of correct
    and -1 of wrong answers (scoring.advantage).
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip)
