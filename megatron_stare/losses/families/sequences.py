"""Objectives whose ratio is a whole sequence's, or runs along it."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.losses.grpo import pessimistic
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import Count, NonNegative, Positive
from megatron_stare.numerics.sequences import kalman_mean, preceding_minimum
from megatron_stare.records import LossTokens


@policy_loss(family="sequences", source="2507.20673", head="recompute", aggregation="row-mean")
def gmpo(
    tokens: LossTokens, *, eps_clip: NonNegative = 0.4, eps_clip_high: NonNegative = 0.4
) -> Tensor:
    """GMPO, geometric mean (arXiv 2507.20673): L = -A exp(mean_t c_t), the same for all tokens of a
    sequence, with the gradient through every c_t.

    c_t = sgn(A) min(sgn(A) d_t, sgn(A) clip(d_t, -eps_clip, eps_clip_high)), d_t = ln(pi / pi_old).
    A is the sequence's mean advantage. row-mean: the plain mean over sequences, as in the code.
    """
    gap, sign = tokens.old_surprisal - tokens.surprisal, torch.sign(tokens.advantage)
    bounded = torch.clamp(gap, -eps_clip, eps_clip_high)
    chosen = sign * torch.minimum(sign * gap, sign * bounded)
    advantage = tokens.sequence_mean(tokens.advantage)
    return -advantage * torch.exp(tokens.sequence_mean(chosen))


@policy_loss(family="sequences", source="2512.03759", head="recompute", aggregation="row-mean")
def espo(
    tokens: LossTokens,
    *,
    padded_length: Count,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
) -> Tensor:
    """ESPO (arXiv 2512.03759): the whole sequence is one action, clipped.

    r = exp((E - E_old) / L), E the sequence's sum of ln pi, L `padded_length`. For a diffusion
    model the log-probs are the tokens' shares of its ELBO; for an autoregressive one E is exact.
    Published with k2 KL (loss.kl_loss_type) and leave-one-out advantages.
    """
    total = tokens.sequence_sum(tokens.old_surprisal - tokens.surprisal)
    ratio = torch.exp(torch.clamp(total / padded_length, -20.0, 20.0))
    return pessimistic(ratio, tokens.sequence_mean(tokens.advantage), eps_clip, eps_clip_high)


@policy_loss(
    family="sequences", source="2602.10609", head="recompute", aggregation="seq-mean-token-mean"
)
def kpo(
    tokens: LossTokens,
    *,
    process_noise: Positive = 1e-6,
    measurement_noise: Positive = 1.0,
    over: Literal["positions", "tokens"] = "positions",
    eps_clip: NonNegative = 3e-4,
    eps_clip_high: NonNegative = 4e-4,
) -> Tensor:
    """KPO, online causal Kalman filtering (arXiv 2602.10609): clipped, with a filtered ratio.

    ln ratio = ln pi - sg ln pi + x_t, at most 10; x_t = (1 - K_t) x_{t-1} + K_t z_t along the
    response, z_t = sg ln(pi / pi_old); K_t = (P_{t-1} + Q) / (P_{t-1} + Q + R), P_t = R K_t, P_0 =
    x_0 = 0; Q `process_noise`, R `measurement_noise`. `over` positions: tool output counts as z =
    0, as in the code; tokens: it is passed over. The unclipped form has Q = 1e-4.
    """
    scan = functools.partial(
        kalman_mean, process_noise=process_noise, measurement_noise=measurement_noise
    )
    gap = (tokens.old_surprisal - tokens.surprisal).detach()
    state = tokens.sequence_scan(scan, gap, every_position=over == "positions")
    own = tokens.surprisal.detach() - tokens.surprisal  # 0, with the gradient of ln pi
    ratio = torch.exp(torch.clamp(own + state, max=10.0))
    return pessimistic(ratio, tokens.advantage, eps_clip, eps_clip_high)


@policy_loss(family="sequences", source="2601.22718", confidence="second-hand", head="recompute")
def minpro(tokens: LossTokens, *, eps_clip: NonNegative, eps_clip_high: NonNegative) -> Tensor:
    """MinPRO (arXiv 2601.22718): L = -sg(clip(w_t r_t, 1 - eps_clip, 1 + eps_clip_high)) A ln pi,
    w_t the smallest ratio before t in its sequence, w_1 = 1. No values of the clips are published.
    """
    ratio = tokens.ratio.detach()
    weight = tokens.sequence_scan(preceding_minimum, ratio) * ratio
    weight = torch.clamp(weight, 1 - eps_clip, 1 + eps_clip_high)
    return -weight * tokens.advantage * tokens.log_prob


LARGEST_LOG_RATIO = 10.0


@policy_loss(
    family="sequences", source="2507.18071", head="recompute", aggregation="seq-mean-token-mean"
)
def gspo(
    tokens: LossTokens, *, eps_clip: NonNegative = 3e-4, eps_clip_high: NonNegative = 4e-4
) -> Tensor:
    """GSPO: group sequence policy optimization (arXiv 2507.18071), in its token form (section 4.3).

    With the n loss tokens of a sequence, its advantage A, and sg the stop-gradient:

        s   = exp( 1/n sum_t ln(pi_t / pi_old_t) )        the sequence's ratio, geometric mean
        s_t = sg(s) pi_t / sg(pi_t)                       equals s, its log at most 10
        L_t = max(-A s_t, -A clip(s_t, 1 - eps_clip, 1 + eps_clip_high))

    so a sequence is clipped whole or not at all; s lies far nearer to 1 than a token's ratio, and
    the clip with it. The stop-gradient moves each token's share of the gradient to its own loss:
    under loss.aggregation=seq-mean-token-mean, as published, loss and gradient are those of the
    sequence form, mean over sequences of max(-A s, -A clip(s)).
    """
    mean = tokens.sequence_mean((tokens.old_surprisal - tokens.surprisal).detach())
    own = tokens.surprisal.detach() - tokens.surprisal  # 0, with the gradient of ln pi_t
    ratio = torch.exp(torch.clamp(mean + own, max=LARGEST_LOG_RATIO))
    return pessimistic(ratio, tokens.advantage, eps_clip, eps_clip_high)
