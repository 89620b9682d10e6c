"""The change of entropy that an update is about to bring, to first order, token by token.

A step of size eta on the batch loss L moves a token's logits by -eta dL/ds (p - e_a), s its
surprisal, and so its entropy by eta (dL/ds) g with g = p (s - H) - c (arXiv 2606.19236, there of
L = -A r). dL/ds is taken from the loss itself, with coefficients, weights, clipping and
corrections. What tokens share, the model's weights, is left out, and so is what Adam makes of the
gradient: sign and shape are predicted, the scale is not.

Shape legend: T loss tokens of one rank's batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_stare.numerics.selection import Across
from megatron_stare.policy.actor import Actor
from megatron_stare.records import BoundLoss, Group, Signals, TokenBatch

QUADRANTS = ("positive_rising", "positive_falling", "negative_rising", "negative_falling")


class View(NamedTuple):
    """One scored mini-batch with its plan, before any update. `change_T` is (dL/ds) g, `plain_T`
    A g over the number of loss tokens of all ranks, both fp64; `predicts` as in
    reporting/diagnostics.py.
    """

    groups: Sequence[Group]
    batch: TokenBatch
    plan: Signals
    change_T: Tensor
    plain_T: Tensor
    predicts: str


def view_of(
    groups: Sequence[Group], batch: TokenBatch, plan: Signals, actor: Actor, loss: BoundLoss
) -> View:
    """Collective. Needs the scored sensitivity."""
    assert batch.sensitivity_T is not None, "scored with its sensitivity"
    if loss.logits:  # its derivatives are none of single tokens
        by_T = plan.coefficient_T * factor(plan) * batch.advantage_T
    else:
        by_T = actor.token_gradient(batch, loss, plan)[:, 0]
    total = max(1, actor.topology.across.count(batch.advantage_T.numel()))
    sensitivity_T = batch.sensitivity_T.double()
    return View(
        groups,
        batch,
        plan,
        by_T.double() * sensitivity_T,
        batch.advantage_T.double() * sensitivity_T / total,
        "weights" if loss.logits else "surprisal_part" if loss.entropy_gradient else "objective",
    )


def factor(plan: Signals) -> Tensor:
    """Everything of the plan that multiplies a token's loss: its weight and its correction."""
    return plan.weight_T if plan.correction_T is None else plan.weight_T * plan.correction_T


def quadrants(advantage_T: Tensor, sensitivity_T: Tensor) -> list[Tensor]:
    """Masks of the QUADRANTS: the sign of A, and whether g > 0."""
    rising_T = sensitivity_T > 0
    sides = (advantage_T > 0, advantage_T < 0)
    return [side_T & half_T for side_T in sides for half_T in (rising_T, ~rising_T)]


def change_metrics(view: View, across: Across) -> dict[str, float]:
    """entropy_change/predicted, and what of it each quadrant brings; nothing for a loss that is
    not finite, whose update is going to be skipped.
    """
    if across.count(~view.change_T.isfinite()):
        return {}
    assert view.batch.sensitivity_T is not None, "scored with its sensitivity"
    masks = quadrants(view.batch.advantage_T, view.batch.sensitivity_T)
    found = {"predicted": across.sum(view.change_T)}
    for name, mask_T in zip(QUADRANTS, masks, strict=True):
        found[name] = across.sum(view.change_T[mask_T])
    return {f"entropy_change/{name}": value for name, value in found.items()}


def clip_metrics(
    by_surprisal_T: Tensor, batch: TokenBatch, plan: Signals, across: Across
) -> dict[str, float]:
    """clip_fraction: the share of tokens that an update moved by nothing, by their loss's own
    doing; of those with an advantage and a weight, and of those with A > 0 and A < 0 alone.
    """
    counted_T = (batch.advantage_T != 0) & (plan.coefficient_T * factor(plan) != 0)
    clipped_T = counted_T & (by_surprisal_T == 0)
    sides = {"": counted_T}
    sides |= {"_positive": batch.advantage_T > 0, "_negative": batch.advantage_T < 0}
    found = {}
    for name, side_T in sides.items():
        total = across.count(counted_T & side_T)
        if total:
            found[f"clip_fraction{name}"] = across.count(clipped_T & side_T) / total
    return found


def merged(views: Sequence[View]) -> dict[str, Tensor]:
    """The flat values of several mini-batches of this rank, one after another; changes are those
    of the mean mini-batch. `part` is the number of the mini-batch.
    """
    parts: dict[str, list[Tensor]] = {}
    for number, view in enumerate(views):
        batch, plan = view.batch, view.plan
        ids = [micro.target_N for micro in batch.microbatches]
        chosen_T = plan.chosen_T
        row = {
            "change": view.change_T / len(views),
            "plain_change": view.plain_T / len(views),
            "surprisal": batch.surprisal_T,
            "entropy": batch.entropy_T,
            "sensitivity": batch.sensitivity_T,
            "gap": _where_sampled(batch, batch.surprisal_T, batch.entropy_T),
            "variance": _where_sampled(batch, batch.variance_T, None),
            "advantage": batch.advantage_T,
            "weight": factor(plan),
            "chosen": torch.zeros_like(batch.sequence_T) if chosen_T is None else chosen_T,
            "id": torch.cat(ids),
            "token_index": batch.token_index_T,
            "sequence": batch.sequence_T,
            "part": torch.full_like(batch.sequence_T, number),
        }
        for name, value_T in row.items():
            assert value_T is not None, "a scored batch"
            parts.setdefault(name, []).append(value_T)
    return {name: torch.cat(values) for name, values in parts.items()}


def _where_sampled(batch: TokenBatch, value_T: Tensor | None, less_T: Tensor | None) -> Tensor:
    """value - less where the current weights sampled the token; 0 elsewhere, or without values."""
    if value_T is None:
        return torch.zeros_like(batch.advantage_T)
    return torch.where(batch.sampled_T, value_T if less_T is None else value_T - less_T, 0.0)
