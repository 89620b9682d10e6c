"""EPO: an entropy bonus, less a penalty where the entropy leaves the history of its turn."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.losses.grpo import clipped_surrogate
from megatron_stare.losses.planning import Step
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import Count, NonNegative, Whole
from megatron_stare.records import LossPlan, LossTokens


def plan_epo(
    step: Step,
    *,
    low: NonNegative = 0.8,
    high: NonNegative = 1.2,
    penalty: NonNegative = 0.1,
    mode: Literal["token", "seq"] = "token",
    seq_mean: Literal["padded", "tokens"] = "padded",
    padded_length: Count | None = None,
    first_turn: Whole = 25,
    schedule: Literal["none", "exponential"] = "none",
    total_steps: Count = 150,
) -> LossPlan:
    """P = 0 where low h < H < high h, else `penalty` w. h of a turn is the mean, over the steps so
    far that had it, this one among them, of its tokens' mean entropy [nats] under pi_old. H is the
    token's entropy, or with mode seq the mean over its turn in its sequence; seq_mean padded
    divides the sum by padded_length, as in the code, whose rows are single turns.

    P = 0 in a step without a token of `first_turn` or later. w is 1, or with schedule exponential,
    e steps after the first of E: 1 - 0.2 (1 - exp(-2 x)), x = e / (E // 2), until x = 1, and then
    0.8 exp(-3 x) with x from 0 to 1.
    """
    turn_T, number = step.turn_T, step.state.get("step", 0.0)
    turns = int(step.across.maximum(turn_T.double())) + 1
    means, state = _history(step, turns)
    history_T = torch.tensor(means, dtype=torch.float64, device=turn_T.device)[turn_T]
    entropy_T = step.entropy_T.double()
    if mode == "seq":
        entropy_T = _turn_means(step, turns, padded_length if seq_mean == "padded" else 0)
    inside_T = (entropy_T > low * history_T) & (entropy_T < high * history_T)
    size = penalty if turns > first_turn else 0.0
    if schedule == "exponential":
        size *= weight_at(int(number), total_steps)
    penalty_T = size * (~inside_T).to(step.advantage_T.dtype)
    metrics = {"outside_fraction": step.share(~inside_T), "outside_penalty": size}
    return LossPlan(
        values={"penalty": penalty_T}, metrics=metrics, state=state | {"step": number + 1}
    )


def _history(step: Step, turns: int) -> tuple[list[float], dict[str, float]]:
    """h of every turn, and the state that it is made of: of each turn a sum of means, and how many
    steps had it.
    """
    old_T, turn_T, state = step.old_entropy_T.double(), step.turn_T, dict(step.state)
    totals = step.across.sums(old_T, turn_T, turns).tolist()
    counts = step.across.sums(torch.ones_like(old_T), turn_T, turns).tolist()
    means = []
    for turn, (total, count) in enumerate(zip(totals, counts, strict=True)):
        summed, steps = (state.get(f"{name}/{turn}", 0.0) for name in ("entropy", "steps"))
        if count:
            summed, steps = summed + total / count, steps + 1
            state |= {f"entropy/{turn}": summed, f"steps/{turn}": steps}
        means.append(summed / max(1.0, steps))
    return means, state


def _turn_means(step: Step, turns: int, divisor: int | None) -> Tensor:
    """For each token the entropy of its turn in its sequence, summed and divided; by the turn's
    tokens where `divisor` is 0.
    """
    if divisor is None:
        raise UserError("epo with seq_mean=padded divides by loss.padded_length; set it")
    key_T, size = step.batch.sequence_T * turns + step.turn_T, step.batch.num_sequences * turns
    entropy_T = step.entropy_T.double()
    total_T = step.across.sum_by(entropy_T, key_T, size)
    count_T = step.across.sum_by(torch.ones_like(entropy_T), key_T, size)
    return total_T / (divisor or count_T)


def weight_at(number: int, total: int) -> float:
    """w after some of `total` steps: from 1 slowly towards 0.8, from the middle fast to 0.04."""
    done, half = min(number, total), total // 2
    if done <= half:
        return 1 - 0.2 * (1 - math.exp(-2 * done / max(1, half)))
    return 0.8 * math.exp(-3 * (done - half) / (total - half))


@policy_loss(
    plan=plan_epo,
    family="control",
    source="2509.22576",
    entropy_gradient=True,
    needs=("entropy", "turns"),
)
def epo(
    tokens: LossTokens,
    *,
    coefficient: NonNegative = 1e-3,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 3.0,
) -> Tensor:
    """EPO (arXiv 2509.22576), for episodes of many turns: clipped - coefficient (H - P), with the
    gradient through H; P of its plan.

    As in the code P is a constant: it shows in the loss, and what trains is the bonus. There the
    history of a step with fewer turns than the most is shifted to later ones, and micro-batches
    without a late turn have P = 0; here a turn is its number, and the whole batch decides.
    """
    loss = clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c)
    return loss - coefficient * (tokens.entropy - tokens.values["penalty"])
