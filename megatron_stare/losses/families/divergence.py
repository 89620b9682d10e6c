"""Divergences as bounds, penalties and choosers of tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_stare.losses.grpo import clipped_surrogate, corrected, pessimistic
from megatron_stare.losses.kl import estimate
from megatron_stare.losses.planning import Step
from megatron_stare.losses.registry import policy_loss, variant
from megatron_stare.losses.settings import Fraction, NonNegative, Positive, Whole
from megatron_stare.records import LossPlan, LossTokens

PUBLISHED_DELTA = {"tv": 0.15, "kl": 0.05}


@policy_loss(
    family="divergence",
    source="2602.04879",
    aggregation="seq-mean-token-sum-norm",
    from_rollout=True,
    needs=("rollout_log_prob",),
)
def dppo(
    tokens: LossTokens,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    delta_low: NonNegative | None = None,
    delta_high: NonNegative | None = None,
    truncation: Positive = 10.0,
) -> Tensor:
    """DPPO (arXiv 2602.04879): a trust region in probability, not in the ratio.

    L = -A sg(min(pi / mu, truncation)) ln pi, mu the rollout policy; 0 where the step leads further
    away: A > 0, pi > mu, D > delta_high, or A <= 0, pi < mu, D > delta_low. D of the two-way
    distribution {a, not a}: tv |pi - mu| (delta 0.15) or KL(mu || pi) (delta 0.05).
    """
    assert tokens.rollout_surprisal is not None, "the caller gives the rollout's"
    low = PUBLISHED_DELTA[divergence] if delta_low is None else delta_low
    high = PUBLISHED_DELTA[divergence] if delta_high is None else delta_high
    log_pi, log_mu = tokens.log_prob.detach(), -tokens.rollout_surprisal
    pi, mu = torch.exp(log_pi), torch.exp(log_mu)
    if divergence == "tv":
        distance = (pi - mu).abs()
    else:
        rest = torch.log((1 - mu + 1e-8) / (1 - pi + 1e-8))
        distance = mu * (log_mu - log_pi) + (1 - mu) * rest
    beyond = torch.where(
        tokens.advantage > 0, (pi > mu) & (distance > high), (pi < mu) & (distance > low)
    )
    weight = torch.exp(torch.clamp(log_pi - log_mu, -20.0, 20.0)).clamp(max=truncation)
    return -tokens.advantage * torch.where(beyond, 0.0, weight) * tokens.log_prob


variant("dppo_tv", "dppo", {"divergence": "tv"})
variant("dppo_kl", "dppo", {"divergence": "kl"})


def covariance(step: Step) -> Tensor:
    """(A - mean A) (ln pi - mean ln pi) of every token, means over the batch. arXiv 2505.22617."""
    advantage_T, logprob_T = step.advantage_T.double(), -step.surprisal_T.double()
    centred_T = logprob_T - step.across.mean(logprob_T)
    return (advantage_T - step.across.mean(advantage_T)) * centred_T


def plan_kl_cov(step: Step, *, cov_share: Fraction = 2e-3) -> LossPlan:
    """Penalise the max(1, int(share N)) tokens of largest covariance."""
    count = max(1, int(cov_share * step.tokens)) if cov_share else 0
    everywhere_T = torch.ones_like(step.advantage_T, dtype=torch.bool)
    chosen_T = step.top(covariance(step), everywhere_T, count)
    metrics = {"penalised_fraction": step.share(chosen_T)}
    return LossPlan(values={"penalised": chosen_T.to(step.advantage_T.dtype)}, metrics=metrics)


@policy_loss(plan=plan_kl_cov, family="divergence", source="2505.22617")
def kl_cov(tokens: LossTokens, *, kl_coef: NonNegative = 1.0) -> Tensor:
    """KL-Cov (arXiv 2505.22617): -A r, unclipped, plus kl_coef |ln pi - ln pi_old| on the tokens of
    its plan. The share 2e-3 is the 7B recipe's (32B: 2e-4).
    """
    gap = (tokens.old_surprisal - tokens.surprisal).abs()
    return -tokens.advantage * tokens.ratio + kl_coef * tokens.values["penalised"] * gap


def plan_clip_cov(
    step: Step,
    *,
    cov_share: Fraction = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: Whole = 0,
    eps_clip: NonNegative = 1.0,
    eps_clip_high: NonNegative = 1.0,
) -> LossPlan:
    """Drop max(1, int(share N)) random tokens of those that PPO does not clip and whose covariance
    lies strictly between the bounds. The draw depends on seed, step and token, not on the layout.
    """
    cov_T = covariance(step)
    ratio_T, advantage_T = torch.exp(step.log_ratio_T), step.advantage_T
    clipped_T = pessimistic(ratio_T, advantage_T, eps_clip, eps_clip_high) > -advantage_T * ratio_T
    candidate_T = (cov_T > cov_low) & (cov_T < cov_high) & ~clipped_T
    number = step.state.get("step", 0.0)
    draw_T = _random(step.batch.token_index_T, seed * 1_000_003 + int(number))
    chosen_T = step.top(draw_T, candidate_T, max(1, int(cov_share * step.tokens)))
    return LossPlan(
        values={"live": (~chosen_T).to(step.advantage_T.dtype)},
        metrics={"dropped_fraction": step.share(chosen_T)},
        state={"step": number + 1.0},
    )


def _random(index_T: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) of each index: an integer hash (xor-shift and multiply), fp64."""
    value_T = index_T + (seed * 0x9E3779B97F4A7C15 & ((1 << 62) - 1))
    for shift, factor in ((29, 0x3F58476D1CE4E5B9), (32, 0x14D049BB133111EB)):
        value_T = (value_T ^ (value_T >> shift)) * factor  # wraps, as int64 does
    return (value_T & ((1 << 52) - 1)).double() / (1 << 52)


@policy_loss(plan=plan_clip_cov, family="divergence", source="2505.22617")
def clip_cov(
    tokens: LossTokens, *, eps_clip: NonNegative = 1.0, eps_clip_high: NonNegative = 1.0
) -> Tensor:
    """Clip-Cov (arXiv 2505.22617): clipped, and 0 on the tokens that its plan drops, which stay in
    the denominator. No dual clip.
    """
    return clipped_surrogate(tokens, eps_clip, eps_clip_high) * tokens.values["live"]


@policy_loss(
    family="divergence",
    confidence="second-hand",
    entropy_gradient=True,
    corrects=True,
    needs=("entropy",),
)
def entro_reg(
    tokens: LossTokens,
    *,
    beta: NonNegative = 1e-3,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """EntroReg: clipped - beta H, with the gradient through H. beta is inferred."""
    loss = clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)
    return corrected(loss, tokens) - beta * tokens.entropy


def plan_lp_reg(
    step: Step,
    *,
    rho: Fraction = 0.01,
    proxy_threshold: Fraction = 0.02,  # the scoring pass reads it: Objective.proxy_threshold_of
) -> LossPlan:
    """Penalise the int(rho n) least probable tokens of the n with A < 0 where the proxy gives them
    more; none where max(1, int(rho n)) is 1.
    """
    proxy_T = step.proxy_surprisal_T
    negative_T = step.advantage_T < 0
    count = int(rho * step.across.count(negative_T))
    lowest_T = step.top(step.surprisal_T, negative_T, count if count > 1 else 0)
    chosen_T = lowest_T & (proxy_T < step.surprisal_T)
    dtype = step.advantage_T.dtype
    return LossPlan(
        values={
            "proxy_surprisal": torch.where(chosen_T, proxy_T, step.surprisal_T).to(dtype),
            "penalised": chosen_T.to(dtype),
        },
        metrics={"penalised_fraction": step.share(chosen_T)},
    )


@policy_loss(plan=plan_lp_reg, family="divergence", source="2510.03222", needs=("proxy",))
def lp_reg(
    tokens: LossTokens,
    *,
    kl_coef: NonNegative = 1.0,
    eps_clip: NonNegative = 1.0,
    eps_clip_high: NonNegative = 9.0,
) -> Tensor:
    """Lp-Reg (arXiv 2510.03222): low-probability tokens are kept near a proxy of pi_old.

    On the tokens of its plan -A r + kl_coef k3(ln pi, ln proxy), else clipped, r in [0, 10]. The
    proxy is pi_old without the tokens below `proxy_threshold` times its largest probability,
    renormalised. rho 0.01 is the setting of the 14B recipe (32B: 0.005).
    """
    penalised = tokens.values["penalised"] > 0
    plain = clipped_surrogate(tokens, eps_clip, eps_clip_high)
    distance = estimate(tokens.surprisal - tokens.values["proxy_surprisal"], "low_var_kl")
    return torch.where(penalised, -tokens.advantage * tokens.ratio + kl_coef * distance, plain)
