"""Objectives whose ratio is a whole sequence's."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.losses.grpo import pessimistic
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import Count, NonNegative
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
