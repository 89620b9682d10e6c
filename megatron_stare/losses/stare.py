"""STARE: surprisal-guided token-level advantage reweighting (arXiv 2606.19236).

First-order, a policy step on a token with advantage A changes entropy by A * g, where the
sensitivity g is positive exactly for surprisals s above a critical s*. So the most surprising
tokens decide whether entropy survives:

    T+ = tokens with A > 0     L+ = the k+ most surprising of T+       k = min(n, max(1, ceil(n P)))
    T- = tokens with A < 0     L- = the k- most surprising of T-       and 0 where P = 0

    omega = W on L+  (variants O1 and C2)      raises entropy where success was a surprise
    omega = M on L-  (variant C2)              damps the loss of entropy where failure was one
    omega = 1 elsewhere, and everywhere while the gate is off (batch entropy at or over its target)

    L_t = omega_t * clipped surrogate_t        (losses/grpo.py: clip-higher, dual clip)

select=rising (ours) leaves tokens with g <= 0 out of L+ and L-, which then have at most k tokens:
where the policy is sure of most tokens, the top P reaches below s*.

Surprisal s = -ln pi(a) [nats] is the current policy's, detached. The choice is exact over the
global batch: the same tokens under every parallel layout, micro-batching and packing. Shape legend:
T loss tokens of one rank's batch.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from megatron_stare.losses import stare_gate
from megatron_stare.losses.grpo import clipped_surrogate
from megatron_stare.losses.planning import Step
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import FIELDS, NonNegative
from megatron_stare.losses.stare_gate import selection_metrics, sensitivity_metrics
from megatron_stare.numerics.selection import Across
from megatron_stare.numerics.sequences import largest_per_sequence
from megatron_stare.records import LossPlan, LossTokens


def plan_stare(
    step: Step,
    *,
    variant: str,
    top_p_ratio: float,
    reweight_w: float,
    reweight_m: float,
    target_entropy: float,
    gate: bool,
    adaptive: bool,
    alpha: float,
    w_max: float,
    m_min: float,
    select: str,
    controller: str,
    scope: str,
) -> LossPlan:
    """Gate, selection and omega of one optimizer step. LossConfig defines the settings."""
    batch, across = step.batch, step.across
    ranked_T = step.surprisal_T
    if select == "sensitivity":  # what the tokens do to entropy, first-order, and not its proxy
        ranked_T = step.advantage_T.abs() * step.sensitivity_T
    rising_T = torch.ones_like(step.advantage_T, dtype=torch.bool)
    if select == "rising":
        rising_T = step.sensitivity_T > 0
        ranked_T = ranked_T.masked_fill(~rising_T, -math.inf)
    segment_T = {"global": None, "microbatch": batch.microbatch_T, "sequence": batch.sequence_T}
    up_T, down_T = (
        select_top(ranked_T, batch.token_index_T, side_T, top_p_ratio, across, segment_T[scope])
        & rising_T
        for side_T in (step.advantage_T > 0, step.advantage_T < 0)
    )
    band = stare_gate.Band(target_entropy, reweight_w, reweight_m, w_max, m_min)
    if controller == "critical":
        decided = stare_gate.critical(step, up_T, band, gate)
    else:
        decided = stare_gate.decide(
            step.entropy, band, gate, alpha if adaptive else 0.0, step.state
        )
    weight_T = omega(
        up_T, down_T, variant, decided.reweight_w, decided.reweight_m, decided.on, ranked_T.dtype
    )
    metrics = decided.metrics | selection_metrics(step, weight_T, ranked_T, up_T, down_T)
    if batch.sensitivity_T is not None:
        metrics |= sensitivity_metrics(batch.sensitivity_T, batch.advantage_T, up_T, down_T, across)
    chosen_T = up_T.to(torch.int8) - down_T.to(torch.int8)
    return LossPlan(weight_T, metrics=metrics, state=decided.state, chosen_T=chosen_T)


@policy_loss(
    plan=plan_stare,
    family="weighting",
    source="2606.19236",
    weighted=True,
    needs=("entropy",),
    fields=FIELDS,
)
def stare(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """L_t = omega_t * clipped surrogate_t."""
    return tokens.weight * clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)


def chosen_count(n: int, top_p_ratio: float) -> int:
    """k = min(n, max(1, ceil(n P))), 0 where P = 0 or n = 0.
    Rounding first keeps 70 * 0.1 at 7, not 8.
    """
    if n == 0 or top_p_ratio == 0:
        return 0
    return min(n, max(1, math.ceil(round(n * top_p_ratio, 9))))


def select_top(
    surprisal_T: Tensor,
    index_T: Tensor,
    side_T: Tensor,
    top_p_ratio: float,
    across: Across,
    segment_T: Tensor | None = None,
) -> Tensor:
    """Mask of the most surprising share P of the tokens in `side_T`:
    over all ranks, or inside each local segment.
    """
    k_of = functools.partial(chosen_count, top_p_ratio=top_p_ratio)
    surprisal, index = surprisal_T[side_T], index_T[side_T]
    if segment_T is None:
        chosen = across.top_k(surprisal, index, k_of(across.count(surprisal.numel())))
    else:  # a segment lies on one rank
        names, segment = torch.unique(segment_T[side_T], return_inverse=True)
        chosen = largest_per_sequence(surprisal, index, segment, len(names), k_of, Across())
    chosen_T = torch.zeros_like(side_T)
    chosen_T[side_T] = chosen
    return chosen_T


def omega(
    up_T: Tensor,
    down_T: Tensor,
    variant: str,
    w: float,
    m: float,
    gate_on: bool,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """omega [dtype] from the masks of L+ and L-. ValueError: an unknown variant."""
    if variant not in ("O1", "C2"):
        raise ValueError(
            f"variant={variant!r} is unknown; use O1 (reweight L+) or C2 (reweight L+ and L-)"
        )
    weight_T = torch.ones(up_T.shape, dtype=dtype, device=up_T.device)
    if gate_on:
        weight_T[up_T] = w
        if variant == "C2":
            weight_T[down_T] = m
    return weight_T


def token_weights(
    surprisal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    variant: str = "O1",
    top_p_ratio: float = 0.1,
    reweight_w: float = 1.1,
    reweight_m: float = 0.9,
    gate_on: bool = True,
    sensitivity: Tensor | None = None,
) -> Tensor:
    """omega for people who use another trainer:
    equal-shaped tensors of one process in, omega [fp32] out.

    surprisal [nats] is -ln pi(a); mask is 1 on response tokens; tokens with mask 0 or advantage 0
    get 1. With `sensitivity`, g of every token, those with g <= 0 get 1 (select=rising). Ties go to
    the earlier token in memory order. ValueError: shapes differ, or a surprisal under the mask is
    NaN.
    """
    rising = torch.ones_like(mask, dtype=torch.bool) if sensitivity is None else sensitivity > 0
    if not surprisal.shape == advantages.shape == mask.shape == rising.shape:
        raise ValueError(
            f"shapes differ: surprisal {surprisal.shape}, advantages {advantages.shape}, mask "
            f"{mask.shape}, sensitivity {rising.shape}"
        )
    flat = surprisal.detach().masked_fill(~rising, -math.inf).flatten()
    advantage, valid = advantages.flatten(), mask.flatten().bool()
    index = torch.arange(flat.numel(), device=flat.device)
    alone = Across()
    up, down = (
        select_top(flat, index, valid & side, top_p_ratio, alone) & rising.flatten()
        for side in (advantage > 0, advantage < 0)
    )
    return omega(up, down, variant, reweight_w, reweight_m, gate_on).view(surprisal.shape)
