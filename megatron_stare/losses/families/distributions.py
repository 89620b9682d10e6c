"""Objectives that read the whole next-token distribution: of each token [V] logits are kept.

Entropies of a part of the vocabulary, with their gradient; logits are at the sampling temperature.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.losses.grpo import clipped_surrogate, corrected
from megatron_stare.losses.planning import Step
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import Fraction, NonNegative
from megatron_stare.numerics.sequences import sequence_quantile
from megatron_stare.numerics.token_stats import nucleus_entropy
from megatron_stare.records import LossPlan, LossTokens


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
) -> LossPlan:
    """The bonus of the last step's decision; then, with `adaptive` and in steps numbered above
    `warmup` (the first step is number 0),
    a <- clip(a - change (min(0, H - low) + max(0, H - high))): a dead band, proportional outside.
    H is the batch's whole entropy: the truncated one is known only while the update runs.
    """
    value, number = coefficient, step.state.get("step", 0.0)
    if adaptive:
        value = step.state.get("coefficient", value)
    moved = value
    if adaptive and number > warmup and math.isfinite(step.entropy):
        error = min(0.0, step.entropy - low) + max(0.0, step.entropy - high)
        moved = min(max(value - change * error, coefficient_min), coefficient_max)
    return LossPlan(
        numbers={"bonus": value},
        metrics={"entropy_coefficient": value},
        state={"coefficient": moved, "step": number + 1.0},
    )


@policy_loss(
    plan=plan_aent,
    family="distributions",
    source="2509.03493",
    head="logits",
    corrects=True,
    needs=("logits",),
)
def aent(
    tokens: LossTokens,
    *,
    truncation: Fraction = 0.2,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 0.0,
) -> Tensor:
    """AEnt (arXiv 2509.03493): clipped - a H~, with the gradient through H~, the entropy without
    the share `truncation` of smallest logits; a from its plan.
    """
    assert tokens.logits is not None, "a loss with head=logits gets them"
    bonus = tokens.numbers["bonus"] * truncated_entropy(tokens.logits, truncation)
    loss = clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)
    return corrected(loss, tokens) - bonus


def plan_siren(
    step: Step,
    *,
    quantile: Fraction = 0.8,
    coefficient: NonNegative = 5e-3,
    anchor: float | None = None,
) -> LossPlan:
    """HS, the mean over sequences of the mean nucleus entropy of their selected tokens: those over
    the `quantile` of their own sequence; a sequence without any counts 0. The first batch's HS is
    the anchor for good, unless one is given.

    The penalty b (HS - anchor)^2 has the derivative 2 b (HS - anchor) / (S n) by the entropy of a
    selected token, of n in its sequence, S sequences.
    """
    nucleus_T = step.nucleus_entropy_T.double()
    sequence_T, size = step.batch.sequence_T, step.batch.num_sequences
    limit_T = sequence_quantile(nucleus_T, sequence_T, quantile, size, step.across)
    chosen_T = nucleus_T > limit_T
    count_T = step.across.sum_by(chosen_T.double(), sequence_T, size)
    share_T = torch.where(chosen_T, 1 / count_T.clamp(min=1.0), 0.0) / max(1, step.sequences)
    mean = step.across.sum(share_T * nucleus_T)
    state = {"anchor": step.state.get("anchor", mean) if anchor is None else anchor}
    gap = mean - state["anchor"]
    pull_T = 2 * coefficient * gap * share_T / step.coefficient_T.double()
    penalty_T = coefficient * gap**2 / (step.tokens * step.coefficient_T.double())
    dtype = step.advantage_T.dtype
    return LossPlan(
        values={"pull": pull_T.to(dtype), "penalty": penalty_T.to(dtype)},
        metrics={"selected_entropy": mean, "selected_fraction": step.share(chosen_T), **state},
        state=state,
    )


@policy_loss(
    plan=plan_siren,
    family="distributions",
    source="2509.25133",
    aggregation="seq-mean-token-sum-norm",
    head="logits",
    corrects=True,
    needs=("logits", "nucleus"),
)
def siren(
    tokens: LossTokens,
    *,
    nucleus: Fraction = 0.8,
    crossing: Literal["excluded", "included"] = "excluded",
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 0.0,
) -> Tensor:
    """SIREN (arXiv 2509.25133): clipped, plus b (HS - anchor)^2 of its plan, two-sided, with the
    gradient through the entropy of each selected token's nucleus.

    The nucleus is the leading tokens whose cumulative probability stays under `nucleus`, without
    the one that crosses it, as in the authors' code; `crossing` included is the usual nucleus. HS
    is the whole batch's here, and each micro-batch's in the code. Its advantage has no std.
    """
    assert tokens.logits is not None, "a loss with head=logits gets them"
    entropy = nucleus_entropy(tokens.logits, nucleus, crossing == "included")
    pulled = tokens.values["pull"] * (entropy - entropy.detach()) + tokens.values["penalty"]
    loss = clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)
    return corrected(loss, tokens) + pulled
