"""KL to another model, as a term of any objective: of a reference policy, or of a teacher.

Estimators against a reference policy, per token (J. Schulman, "Approximating KL divergence", 2020).
With d = ln pi_ref - ln pi:
    k1 = -d    abs = |d|    k2 = d^2 / 2
    k3 = e^d - d - 1 with d clamped to [-20, 20], the result to [-10, 10]; low_var_kl is its alias
    k1+, k3+: the value of k1 or k3 with the gradient of k2, the one whose mean is that of the KL
The clamps and the estimators with + are those of verl (core_algos.py).

On-policy distillation: a teacher's log-probs of the policy's own tokens, as an advantage.

    A'_t = reward_coef A_t + distillation_coef (ln pi_teacher(y_t) - ln pi(y_t))

Its policy gradient is that of reward_coef times the rewards' minus distillation_coef times
KL(pi || pi_teacher) of each position, on prefixes that the policy sampled: reverse KL with a
discount of 0 (arXiv 2306.13649, on-policy with lambda = 1). Both log-probs are at the temperature
of the rollouts; pi is the policy before the step's first update.

With loss.distillation_top_k = K no sampled token estimates it: every token's loss has the
divergence of its position,

    distillation_coef sum_v pi(v) (ln pi(v) - ln pi_teacher(v))

where v are the K likeliest tokens of that policy and all others together, as one more token. That
is at most KL(pi || pi_teacher), and equal to it if K is the size of the vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_stare.config import LossConfig
from megatron_stare.records import LossTokens, TokenBatch

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


def distilled(batch: TokenBatch, config: LossConfig) -> TokenBatch:
    """The batch with these advantages [T, nats]; itself with distillation_coef = 0. With
    distillation_top_k they are the rewards' part alone.
    """
    if not config.distillation_coef:
        return batch
    if config.distillation_top_k:
        return dataclasses.replace(batch, advantage_T=config.reward_coef * batch.advantage_T)
    assert batch.surprisal_T is not None and batch.reference_surprisal_T is not None, "scored"
    teacher_T = batch.surprisal_T - batch.reference_surprisal_T
    advantage_T = (
        config.reward_coef * batch.advantage_T.double()
        + config.distillation_coef * teacher_T.double()
    )
    return dataclasses.replace(batch, advantage_T=advantage_T.to(batch.advantage_T.dtype))


def top_k_divergence(tokens: LossTokens) -> Tensor:
    """The divergence [N, nats] of each token's position; its gradient reaches `tokens.logits`."""
    assert tokens.logits is not None and tokens.top_ids is not None, "the head has whole logits"
    assert tokens.teacher_top is not None, "the teacher has read the batch"
    own_NK = tokens.logits.gather(1, tokens.top_ids) - tokens.logits.logsumexp(1, keepdim=True)
    return divergence(own_NK, tokens.teacher_top.to(own_NK.dtype))


def divergence(own_NK: Tensor, teacher_NK: Tensor) -> Tensor:
    """KL [N, nats] of two distributions over K tokens, from their log-probs, and the rest as one
    more. A rest below 16 epsilons of the dtype is rounding: it counts as 16, without a slope.
    """
    probability_NK = own_NK.exp()
    least = 16 * torch.finfo(own_NK.dtype).eps
    rest_N, teacher_rest_N = (
        (1 - part_NK.sum(1)).clamp(min=least) for part_NK in (probability_NK, teacher_NK.exp())
    )
    top_N = (probability_NK * (own_NK - teacher_NK)).sum(1)
    return top_N + rest_N * (rest_N.log() - teacher_rest_N.log())
