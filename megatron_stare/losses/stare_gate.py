"""STARE's closed loop (arXiv 2606.19236):
reweight only while batch entropy is under its target, adapt W and M; and STARE's metrics.

    gate on  iff  Hbar < H_tgt                                             (strict)

bang_bang, the paper's (only if adaptive; sgn(0) = 0):
    W <- clip(W + alpha sgn(H_tgt - Hbar), 1, W_max)
    M <- clip(M - alpha sgn(H_tgt - Hbar), M_min, 1)

critical, ours, from the exact sensitivity g = p (s - H) - c that the scoring pass measures:
    W = clip(1 + S + P e + I, 1, W_max)     e = H_tgt - Hbar     M = M_min
    S = smoothed (1 - D) S + D Lambda / Gamma, the critical weight's excess (sensitivity_metrics)
    I <- I + J e, unless W is at a bound and e would push it further (anti-windup)
with P = 5, J = 0.5 and D = 0.1. Where Gamma is not positive, a larger W would lower entropy: S and
I stay, and W does not rise.

Hbar [nats per token] is the batch entropy under the current policy, aggregated like the loss, once
per optimizer step, after dynamic sampling; W and M are adapted before the update they serve. No
number among what was measured: nothing adapts, and the gate stays shut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_stare.losses.planning import Step
from megatron_stare.numerics.selection import Across

PROPORTIONAL, INTEGRAL, SMOOTHING = 5.0, 0.5, 0.1


@dataclass(frozen=True)
class Band:
    """Target [nats], and where W and M start and end."""

    target: float
    reweight_w: float
    reweight_m: float
    w_max: float
    m_min: float


@dataclass(frozen=True)
class Gate:
    """The decision for one optimizer step.
    `state` carries W, M and a controller's memory to the next step and into checkpoints.
    """

    on: bool
    reweight_w: float
    reweight_m: float
    memory: Mapping[str, float]

    @property
    def state(self) -> dict[str, float]:
        own = {"reweight_w": self.reweight_w, "reweight_m": self.reweight_m}
        return own | dict(self.memory)

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "gate": float(self.on),
            "weight_w": self.reweight_w,
            "weight_m": self.reweight_m,
        } | dict(self.memory)


def decide(
    batch_entropy: float, band: Band, gate: bool, alpha: float, state: Mapping[str, float]
) -> Gate:
    """The gate of this step from Hbar and the state of the last one ({} at the start).

    A non-finite Hbar neither adapts nor opens the gate. `gate` false: always on, the paper's open
    loop. `alpha` 0: W and M are the configured ones, whatever an earlier run's state holds.
    """
    weight, damping = band.reweight_w, band.reweight_m
    gap = band.target - batch_entropy
    finite = math.isfinite(batch_entropy)
    if alpha:
        weight = state.get("reweight_w", weight)
        damping = state.get("reweight_m", damping)
    if alpha and finite:
        step = alpha * ((gap > 0) - (gap < 0))
        weight = min(max(weight + step, 1.0), band.w_max)
        damping = min(max(damping - step, band.m_min), 1.0)
    return Gate((finite and gap > 0) or not gate, weight, damping, {})


def critical(step: Step, up_T: Tensor, band: Band, gate: bool) -> Gate:
    """The gate and the W of the critical controller, from the tokens of L+."""
    change_T = step.advantage_T.double() * step.sensitivity_T.double()
    drift, gamma = step.across.sum(change_T), step.across.sum(change_T[up_T])
    excess = step.state.get("excess")
    integral = step.state.get("integral", 0.0)
    if gamma > 0:
        excess = (
            -drift / gamma if excess is None else excess + SMOOTHING * (-drift / gamma - excess)
        )
    weight = before = step.state.get("reweight_w", band.reweight_w)
    gap = band.target - step.entropy
    finite = math.isfinite(gap)
    if finite:
        centre = 1.0 + (excess or 0.0) + PROPORTIONAL * gap
        moved = integral + INTEGRAL * gap if gamma > 0 else integral
        if (centre + moved > band.w_max and gap > 0) or (centre + moved < 1.0 and gap < 0):
            moved = integral  # it would only wind up what the bound holds back
        weight = min(max(centre + moved, 1.0), band.w_max)
        if gamma <= 0:
            weight = min(weight, before)
        integral = moved
    memory = {"integral": integral} | ({} if excess is None else {"excess": excess})
    return Gate((finite and gap > 0) or not gate, weight, band.m_min, memory)


def selection_metrics(
    step: Step, weight_T: Tensor, ranked_T: Tensor, up_T: Tensor, down_T: Tensor
) -> dict[str, float]:
    """Metrics of the selection: how many tokens, the smallest selected value, mean weights."""
    across = step.across
    metrics = {
        "weight_mean": across.sum(weight_T) / max(1, step.tokens),
        "share_positive": step.share(step.advantage_T > 0),
        "share_negative": step.share(step.advantage_T < 0),
        "chosen_positive": float(across.count(up_T)),
        "chosen_negative": float(across.count(down_T)),
    }
    for side, chosen_T in (("positive", up_T), ("negative", down_T)):
        if metrics[f"chosen_{side}"]:
            metrics[f"threshold_{side}"] = across.minimum(ranked_T[chosen_T])
    return metrics


def sensitivity_metrics(
    sensitivity_T: Tensor, advantage_T: Tensor, up_T: Tensor, down_T: Tensor, across: Across
) -> dict[str, float]:
    """Shares of the four quadrants, mean g and share with g > 0 inside L+ and L-, entropy drift,
    and W* - 1.

    A step on a token with advantage A changes entropy by A g, where g = p (s - H) - c is positive
    iff s > s* (arXiv 2606.19236; the paper's Phi is -g). Four quadrants follow:

        L+ side: A > 0, g > 0  entropy up          U+: A > 0, g < 0  entropy down
        L- side: A < 0, g > 0  entropy down        U-: A < 0, g < 0  entropy up

    With W on the chosen L+ the batch's entropy stands still, to first order, at W* = 1 + Lambda /
    Gamma, where Lambda = -sum_T A g and Gamma = sum_{L+} A g.

    `entropy_drift` is sum A g / T = -Lambda / T, the first-order change of entropy per unit step on
    the unweighted batch, and `gamma` is Gamma / T. `critical_weight_excess` is left out where Gamma
    is not positive: no W on L+ could then hold entropy.
    """
    rising_T, positive_T, negative_T = sensitivity_T > 0, advantage_T > 0, advantage_T < 0
    total = max(1, across.count(sensitivity_T.numel()))
    quadrants = {
        "positive_rising": positive_T & rising_T,
        "positive_falling": positive_T & ~rising_T,
        "negative_rising": negative_T & rising_T,
        "negative_falling": negative_T & ~rising_T,
    }
    metrics = {
        f"quadrant/{name}": across.count(mask_T) / total for name, mask_T in quadrants.items()
    }
    for side, chosen_T in (("positive", up_T), ("negative", down_T)):
        chosen = across.count(chosen_T)
        if chosen:
            metrics[f"sensitivity_{side}"] = across.sum(sensitivity_T[chosen_T]) / chosen
            metrics[f"rising_share_{side}"] = across.count(chosen_T & rising_T) / chosen
    change_T = advantage_T.double() * sensitivity_T.double()
    drift, gamma = across.sum(change_T), across.sum(change_T[up_T])
    metrics |= {"entropy_drift": drift / total, "gamma": gamma / total}
    if gamma > 0:
        metrics["critical_weight_excess"] = -drift / gamma
    return metrics
