"""STARE's theory, measured on every batch:
quadrants, sensitivity of the chosen tokens, the critical weight.

A step on a token with advantage A changes entropy by A g, where g = p (s - H) - c is positive iff s
> s* (arXiv 2606.19236; the paper's Phi is -g). Four quadrants follow:

    L+ side: A > 0, g > 0  entropy up          U+: A > 0, g < 0  entropy down
    L- side: A < 0, g > 0  entropy down        U-: A < 0, g < 0  entropy up

With W on the chosen L+ the batch's entropy stands still, to first order, at W* = 1 + Lambda /
Gamma, where Lambda = -sum_T A g and Gamma = sum_{L+} A g.
"""

from __future__ import annotations

from torch import Tensor

from megatron_stare.losses.planning import Step
from megatron_stare.numerics.selection import Across


def selection_metrics(
    step: Step, weight_T: Tensor, ranked_T: Tensor, up_T: Tensor, down_T: Tensor
) -> dict[str, float]:
    """What was chosen, by which smallest value, and what the weights come to."""
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
