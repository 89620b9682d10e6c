"""Tokens by their rank inside their own sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.losses.grpo import clipped_surrogate
from megatron_stare.losses.planning import Step
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import Fraction, NonNegative, Positive
from megatron_stare.numerics.sequences import largest_per_sequence, sequence_quantile
from megatron_stare.records import LossPlan, LossTokens


def share_of_each_sequence(step: Step, value_T: Tensor, share: float) -> Tensor:
    """Mask of the max(1, int(share n)) largest of the n values of each sequence."""
    batch = step.batch
    place_T = (value_T, batch.token_index_T, batch.sequence_T)
    return largest_per_sequence(
        *place_T, batch.num_sequences, lambda n: max(1, int(round(share * n, 9))), step.across
    )


def plan_aspo(
    step: Step,
    *,
    entropy_quantile: Fraction = 0.8,
    eps_low_entropy: NonNegative = 0.2,
    eps_high_entropy: NonNegative = 0.4,
) -> LossPlan:
    """epsilon of each token: the larger where its entropy is over its sequence's quantile."""
    batch = step.batch
    limit_T = sequence_quantile(
        step.entropy_T, batch.sequence_T, entropy_quantile, batch.num_sequences, step.across
    )
    over_T = step.entropy_T > limit_T.to(step.entropy_T.dtype)
    epsilon_T = torch.full_like(step.advantage_T, eps_low_entropy)
    epsilon_T[over_T] = eps_high_entropy
    return LossPlan(
        values={"epsilon": epsilon_T},
        metrics={"high_entropy_fraction": step.share(over_T)},
    )


@policy_loss(plan=plan_aspo, family="ranked", source="2510.06062", needs=("entropy",))
def aspo(tokens: LossTokens, *, eps_clip_c: Positive = 3.0) -> Tensor:
    """ASPO (arXiv 2510.06062): positive tokens get the inverse ratio; epsilon from its plan.

    A < 0: -A r', r' = max(r, 1 - epsilon), and -A sg(c) ln pi where r' > c. A >= 0: r' = min(r, 1 +
    epsilon), -A (r' / sg r') / sg r', so no gradient where r > 1 + epsilon, and -A c ln pi where
    1 / r' > c. c `eps_clip_c`. Published with k3 KL of coefficient 0.001 (loss.kl_loss_coef).
    """
    advantage, ratio, epsilon = tokens.advantage, tokens.ratio, tokens.values["epsilon"]
    capped = -advantage * eps_clip_c * tokens.log_prob
    below = torch.maximum(ratio, 1 - epsilon)
    negative = torch.where(below.detach() > eps_clip_c, capped, -advantage * below)
    above = torch.minimum(ratio, 1 + epsilon)
    fixed = above.detach()
    positive = torch.where(1 / fixed > eps_clip_c, capped, -advantage * (above / fixed) / fixed)
    return torch.where(advantage < 0, negative, positive)


def plan_a3po(
    step: Step,
    *,
    positive_scale: NonNegative = 5.0,
    negative_scale: NonNegative = 5.0,
    token_share: Fraction = 0.2,
) -> LossPlan:
    """Factor of A: of positive sequences on the share of least probable tokens, of negative ones on
    the share of most probable tokens.
    """
    least_T = share_of_each_sequence(step, step.surprisal_T, token_share)
    most_T = share_of_each_sequence(step, -step.surprisal_T, token_share)
    up_T = (step.advantage_T > 0) & least_T
    down_T = (step.advantage_T < 0) & most_T
    factor_T = torch.ones_like(step.advantage_T)
    factor_T[up_T], factor_T[down_T] = positive_scale, negative_scale
    metrics = {"scaled_fraction": step.share(up_T | down_T)}
    return LossPlan(factor_T, metrics=metrics)


@policy_loss(plan=plan_a3po, family="ranked", source="2512.21625", weighted=True)
def a3po(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """A3PO (arXiv 2512.21625): clipped, with A times the factor of its plan. The factors' decay
    over training is not published: they stay.
    """
    return tokens.weight * clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)


def plan_arm(step: Step, *, alpha: NonNegative, token_share: Fraction = 0.2) -> LossPlan:
    """A' - A = alpha (c(q) - c(o|q)), 0 where all of the group is wrong.

    c(o|q) = exp(mean ln pi over the share of least probable tokens of the response); c(q) the mean
    of it over the group, which stands in for the prompt's own log-probs. A group is wrong where no
    A is positive, as then all of its rewards are equal.
    """
    batch, across = step.batch, step.across
    least_T = share_of_each_sequence(step, step.surprisal_T, token_share).double()
    size, sequence_T = batch.num_sequences, batch.sequence_T
    total_T = across.sum_by(least_T * step.surprisal_T.double(), sequence_T, size)
    confidence_T = torch.exp(-total_T / across.sum_by(least_T, sequence_T, size))
    assert batch.group_Q is not None, "a packed batch numbers its groups"
    group_T = batch.group_Q[sequence_T]
    share_T = 1.0 / batch.sequence_tokens_T.double()  # a sequence counts once
    members_T = across.sum_by(share_T, group_T, size)
    mean_T = across.sum_by(share_T * confidence_T, group_T, size) / members_T
    right_T = across.sum_by((step.advantage_T > 0).double(), group_T, size) > 0
    shift_T = torch.where(right_T, alpha * (mean_T - confidence_T), 0.0)
    metrics = {"confidence": across.mean(confidence_T)}
    return LossPlan(values={"shift": shift_T.to(step.advantage_T.dtype)}, metrics=metrics)


@policy_loss(
    plan=plan_arm,
    family="ranked",
    source="2602.05281",
    confidence="second-hand",
    needs=("group_ids",),
)
def arm(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """ARM (arXiv 2602.05281): clipped, with A' of its plan. alpha is not published, and what c(q)
    is taken over is inferred.
    """
    shaped = tokens.advantage + tokens.values["shift"]
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c, shaped)
