"""Token weights and advantages shaped by probability or entropy, on the clipped surrogate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.losses.grpo import clipped_surrogate, dual_clipped
from megatron_stare.losses.planning import Step
from megatron_stare.losses.registry import policy_loss, variant
from megatron_stare.losses.settings import Fraction, NonNegative, Positive
from megatron_stare.records import LossPlan, LossTokens


def plan_steer(
    step: Step,
    *,
    mapping: Literal["linear", "exp"] = "linear",
    w_min: Positive = 0.8,
    w_max: Positive = 1.2,
) -> LossPlan:
    """w from Omega = |A / pi_old  pi (1 - pi) (ln pi + H)|, H of pi_old, over the batch's extrema.

    linear: w_max - (Omega - min) (w_max - w_min) / (max - min), the midpoint where all are equal.
    exp: clamp(e^(-k Omega), w_min, 1), k = -ln(w_min) / max(max, 0.02).
    """
    probability_T = torch.exp(-step.surprisal_T.double()).clamp(1e-8, 1 - 1e-8)
    old_T = torch.exp(-step.old_surprisal_T.double()).clamp(1e-8, 1.0)
    spread_T = probability_T * (1 - probability_T)
    drift_T = spread_T * (torch.log(probability_T) + step.old_entropy_T.double())
    omega_T = (step.advantage_T.double() / old_T * drift_T).abs()
    omega_T = torch.where(torch.isfinite(omega_T), omega_T, 0.0)
    low, high = step.across.minimum(omega_T), step.across.maximum(omega_T)
    if mapping == "exp":
        rate = -math.log(w_min) / max(high, 0.02)
        weight_T = torch.exp(-rate * omega_T).clamp(w_min, 1.0)
    elif high > low:
        weight_T = w_max - (omega_T - low) * ((w_max - w_min) / (high - low))
        weight_T = weight_T.clamp(w_min, w_max)
    else:
        weight_T = torch.full_like(omega_T, 0.5 * (w_min + w_max))
    mean = step.across.mean(weight_T)
    return LossPlan(weight_T, metrics={"weight_mean": mean, "omega_max": high})


@policy_loss(
    plan=plan_steer, family="weighting", source="2510.10150", weighted=True, needs=("entropy",)
)
def steer(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """STEER (arXiv 2510.10150): L = w times clipped; w of its plan, smaller where a step would
    change entropy more.
    """
    return tokens.weight * clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)


variant("steer_linear", "steer", {"mapping": "linear"})
variant("steer_exp", "steer", {"mapping": "exp"})


@policy_loss(
    family="weighting",
    source="2505.12929",
    passes=({"tokens_of": "low"}, {"tokens_of": "high"}),
)
def ar_lopti(
    tokens: LossTokens,
    *,
    alpha: Fraction = 0.3,
    eta: Fraction = 0.5,
    tokens_of: Literal["all", "low", "high"] = "all",
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.24,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """Advantage reweighting and Lopti (arXiv 2505.12929).

    AR: A' = A (alpha pi_old + 1 - alpha), clipped. Lopti is two updates of a batch: `tokens_of`
    low (pi_old < eta), then high; each counts all tokens. The sum of both losses is that of `all`.
    A run does both, unless loss.settings.tokens_of is set. alpha 0.3 goes with Lopti; 0.2 alone
    (`ar`). Lopti alone: alpha 0, eta 0.4.
    """
    old = torch.exp(-tokens.old_surprisal)
    shaped = tokens.advantage * (alpha * old + 1 - alpha)
    loss = clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c, shaped)
    if tokens_of == "all":
        return loss
    return torch.where((old < eta) == (tokens_of == "low"), loss, 0.0)


variant("ar", "ar_lopti", {"alpha": 0.2}, passes=({},))


def require_schedule(settings: Mapping[str, Any]) -> None:
    """UserError: the schedule lacks a number that is not published."""
    schedule, epochs = settings["schedule"], settings["epochs"] or 0
    if schedule == "entropy":
        if settings["initial"] is None:
            raise UserError(
                "positive_reweighting with schedule=entropy needs loss.settings.initial, the first "
                "lambda: no value of it is published"
            )
    elif not settings["total_steps"] or (schedule == "epoch" and epochs < 2):
        raise UserError(
            f"positive_reweighting with schedule={schedule} needs loss.settings.total_steps"
            f"{' and epochs of at least 2' if schedule == 'epoch' else ''}"
        )


def plan_positive_reweighting(
    step: Step,
    *,
    schedule: Literal["stage", "epoch", "entropy"] = "stage",
    total_steps: int | None = None,
    epochs: int | None = None,
    initial: Fraction | None = None,
    threshold: NonNegative = 0.2,
    change: NonNegative = 0.05,
) -> LossPlan:
    """lambda on tokens with A > 0, by the step's number n of N (`total_steps`), from 0.

    stage: 0 for the first half, then linear to 1. epoch: (e - 1) / (E - 1), e the running epoch of
    E. entropy: lambda - `change` where Hbar < threshold, + `change` where it is over it, in [0, 1].
    """
    number = step.state.get("step", 0.0)
    if schedule == "entropy":
        assert initial is not None, "require_schedule has checked it"
        share = step.state.get("positive_weight", initial)
        gap = step.entropy - threshold
        share = min(max(share + change * ((gap > 0) - (gap < 0)), 0.0), 1.0)
    else:
        assert total_steps, "require_schedule has checked it"
        done = min(number / total_steps, 1.0)
        share = max(0.0, 2 * done - 1)
        if schedule == "epoch" and epochs:
            share = min(math.floor(done * epochs), epochs - 1) / (epochs - 1)
    weight_T = torch.ones_like(step.advantage_T)
    weight_T[step.advantage_T > 0] = share
    state = {"step": number + 1.0, "positive_weight": share}
    return LossPlan(weight_T, metrics={"positive_weight": share}, state=state)


@policy_loss(
    plan=plan_positive_reweighting,
    require=require_schedule,
    family="weighting",
    source="2511.05993",
    confidence="second-hand",
    weighted=True,
    needs=("entropy",),
)
def positive_reweighting(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """Positive-advantage reweighting, "Revisiting entropy" (arXiv 2511.05993): clipped, times the
    lambda of its plan where A > 0.
    """
    return tokens.weight * clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)


@policy_loss(family="weighting", source="2506.14758", confidence="paper", needs=("entropy",))
def entro_adv(
    tokens: LossTokens,
    *,
    alpha: NonNegative = 0.4,
    kappa: Positive = 2.0,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """EntroAdv (arXiv 2506.14758): clipped, with A' = A + min(alpha sg(H), |A| / kappa)."""
    bonus = torch.minimum(alpha * tokens.entropy.detach(), tokens.advantage.abs() / kappa)
    shaped = tokens.advantage + bonus
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c, shaped)


def plan_hapo(step: Step, *, entropy_quantile: Fraction = 0.8) -> LossPlan:
    """h in [-1, 1] from e = ln max(H, 1e-8): (e - Q(e)) over its RMS, each side over its extreme.

    Q is the nearest-rank quantile, halves to the even rank, and RMS the root of mean (e - Q)^2.
    """
    log_T = torch.log(step.entropy_T.double().clamp(min=1e-8))
    n = step.tokens
    rank = round(entropy_quantile * (n - 1))
    pivot = step.across.quantile(log_T, rank / max(1, n - 1))
    distance_T = log_T - pivot
    variance = step.across.mean(distance_T.square())
    distance_T = distance_T / math.sqrt(max(variance, 1e-8))
    top = max(step.across.maximum(distance_T), 1e-8)
    bottom = max(-step.across.minimum(distance_T), 1e-8)
    h_T = torch.where(distance_T > 0, distance_T / top, distance_T / bottom)
    return LossPlan(
        values={"h": h_T.to(step.advantage_T.dtype)},
        metrics={"entropy_pivot": math.exp(pivot)},
    )


@policy_loss(plan=plan_hapo, family="weighting", source="2509.16591", needs=("entropy",))
def hapo(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """HAPO, heterogeneous adaptive (arXiv 2509.16591), with h of its plan.

    Clip: h <= 0 widens the lower to eps_clip (1 - h), h > 0 the upper to eps_clip_high (1 + h).
    A' = A (1 + h) where h > 0 and r is outside (1 - low / 2, 1 + high / 2), or h <= 0 and inside.
    Dual clip; ln r is not clamped. The authors' code flips the sign of negative h; here h is that
    of their paper. Their advantage and their sampling temperature are separate settings.
    """
    h = tokens.values["h"]
    ratio = torch.exp(tokens.old_surprisal - tokens.surprisal)
    low = torch.where(h <= 0, eps_clip * (1 - h), eps_clip)
    high = torch.where(h > 0, eps_clip_high * (1 + h), eps_clip_high)
    inside = (ratio.detach() > 1 - low / 2) & (ratio.detach() < 1 + high / 2)
    advantage = torch.where((h > 0) != inside, tokens.advantage * (1 + h), tokens.advantage)
    bounded = torch.minimum(torch.maximum(ratio, 1 - low), 1 + high)
    loss = torch.maximum(-advantage * ratio, -advantage * bounded)
    return dual_clipped(loss, advantage, eps_clip_c)
