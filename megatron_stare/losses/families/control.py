"""Objectives with an entropy controller of their own.

Each measures Hbar [nats], the batch's entropy, once per optimizer step, exactly over all ranks; its
state is a few floats, the same on all ranks, in the checkpoint, untouched by an Hbar that is not
finite. e = Hbar - target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.losses.grpo import clipped_surrogate, corrected
from megatron_stare.losses.planning import Step, coefficients
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import Count, Fraction, NonNegative, Positive, Whole
from megatron_stare.records import LossPlan, LossTokens


def plan_entropic(
    step: Step,
    *,
    aggregation: str = "token-mean",
    padded_length: Count | None = None,
    target: float = 0.1,
    gain: NonNegative = 1.0,
    integral_gain: NonNegative = 0.01,
    probability_threshold: Fraction = 0.95,
    divide_by: Literal["selected", "all"] = "selected",
    error_of: Literal["batch", "microbatch"] = "batch",
) -> LossPlan:
    """alpha = clip(gain e + integral_gain E, -1, 1) on M = {pi > threshold}; then E <- E + e.

    `divide_by` selected: the extra term is averaged over M alone, as in the code. `error_of`
    microbatch: as in the code, every micro-batch has its own e and alpha and then adds e times its
    share of the sequences to E. The default measures once per step, because micro-batches that are
    packed by length would make alpha depend on the packing.
    """
    total = step.state.get("error_sum", 0.0)
    apart, alphas = error_of == "microbatch", []
    for entropy, share in _entropies(step) if apart else [(step.entropy, 1.0)]:
        error, alpha = entropy - target, 0.0
        if target >= 0 and math.isfinite(error):
            alpha = min(max(gain * error + integral_gain * total, -1.0), 1.0)
            total += error * share
        alphas.append(alpha)
    chosen_T = step.probability_T > probability_threshold
    alpha_T = step.advantage_T.new_tensor(alphas)[step.batch.microbatch_T if apart else 0]
    extra_T = alpha_T * chosen_T.to(step.advantage_T.dtype)
    if divide_by == "selected" and step.across.count(chosen_T):
        own_T = coefficients(step.batch, aggregation, step.across, chosen_T, padded_length)
        extra_T = extra_T * own_T / step.coefficient_T
    metrics = {
        "alpha": sum(alphas) / len(alphas),
        "selected_fraction": step.share(chosen_T),
        "error_sum": total,
    }
    return LossPlan(values={"extra": extra_T}, metrics=metrics, state={"error_sum": total})


def _entropies(step: Step) -> list[tuple[float, float]]:
    """Mean entropy [nats] of every micro-batch, and its share of the batch's sequences; micro-batch
    i is that of all ranks.
    """
    across, part_T = step.across, step.batch.microbatch_T
    size = int(across.maximum(part_T.double())) + 1
    count_P = across.sums(torch.ones_like(step.entropy_T), part_T, size).clamp(min=1)
    entropy_P = across.sums(step.entropy_T, part_T, size) / count_P
    share_P = across.sums(1.0 / step.batch.sequence_tokens_T.double(), part_T, size)
    share_P = share_P / max(1, step.sequences)
    return list(zip(entropy_P.tolist(), share_P.tolist(), strict=True))


@policy_loss(
    plan=plan_entropic, family="control", source="2511.15248", corrects=True, needs=("entropy",)
)
def entropic(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 3.0,
) -> Tensor:
    """EntroPIC (arXiv 2511.15248): clipped, plus alpha times -r |A| on confident tokens, so that
    there A > 0 counts 1 + alpha and A < 0 counts 1 - alpha. No importance weight on the extra term.
    """
    loss = corrected(clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c), tokens)
    return loss - tokens.values["extra"] * tokens.ratio * tokens.advantage.abs()


def plan_skywork(
    step: Step,
    *,
    target: float = 0.2,
    delta: NonNegative = 1e-4,
    coefficient: NonNegative = 0.0,
    coefficient_min: NonNegative = 0.0,
    coefficient_max: NonNegative = 0.005,
) -> LossPlan:
    """The bonus of the last step's decision; then a +- delta where Hbar is below the target or not.
    First step: a = `coefficient`, gate open.
    """
    value, gate = step.state.get("coefficient", coefficient), step.state.get("gate", 1.0)
    state = {"coefficient": value, "gate": gate}
    if math.isfinite(step.entropy):
        below = step.entropy < target
        moved = value + (delta if below else -delta)
        state = {
            "coefficient": min(max(moved, coefficient_min), coefficient_max),
            "gate": float(below),
        }
    metrics = {"entropy_coefficient": value * gate}
    return LossPlan(numbers={"bonus": value * gate}, metrics=metrics, state=state)


@policy_loss(
    plan=plan_skywork,
    family="control",
    source="2505.22312",
    entropy_gradient=True,
    corrects=True,
    needs=("entropy",),
)
def skywork_or1(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 0.0,
) -> Tensor:
    """Skywork-OR1's adaptive entropy (arXiv 2505.22312): clipped - a g H, with the gradient through
    H; a and the gate g from its plan.
    """
    loss = corrected(clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c), tokens)
    return loss - tokens.numbers["bonus"] * tokens.entropy


def plan_repo_r(
    step: Step,
    *,
    target: float,
    zeta: float = 1e-3,
    zeta_min: Positive = 1e-4,
    zeta_max: Positive = 0.05,
) -> LossPlan:
    """zeta of the last step's decision; then up (Hbar below the target) or its mirror image down:
    doubled if positive, `zeta_min` from 0, halved if negative, `zeta_min` once below that.
    """
    value = step.state.get("zeta", zeta)
    side = 0
    if math.isfinite(step.entropy):
        side = (step.entropy < target) - (step.entropy > target)
    signed = side * value  # positive: it already pushes the way it should
    if signed > 0:
        signed = min(2 * signed, zeta_max)
    elif signed == 0 or -signed < zeta_min:
        signed = zeta_min
    else:
        signed = signed / 2
        signed = zeta_min if -signed < zeta_min else signed
    state = {"zeta": side * signed if side else value}
    return LossPlan(numbers={"zeta": value}, metrics={"zeta": value}, state=state)


@policy_loss(
    plan=plan_repo_r,
    family="control",
    source="2603.11682",
    confidence="second-hand",
    needs=("entropy",),
)
def repo_r(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.28,
    eps_clip_c: NonNegative = 10.0,
) -> Tensor:
    """REPO-R (arXiv 2603.11682): clipped with A' = max(A (1 - zeta x), 0) where A > 0 and
    min(A (1 + zeta x), 0) where A < 0, x = max(sg ln pi, -20). zeta > 0 raises entropy.
    """
    advantage, zeta = tokens.advantage, tokens.numbers["zeta"]
    x = torch.clamp(tokens.log_prob.detach(), min=-20.0)
    shaped = torch.where(
        advantage > 0,
        torch.clamp(advantage * (1 - zeta * x), min=0.0),
        torch.clamp(advantage * (1 + zeta * x), max=0.0),
    )
    shaped = torch.where(advantage == 0, advantage, shaped)
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c, shaped)


def plan_adapo(
    step: Step,
    *,
    change: Positive,
    high_min: NonNegative,
    high_max: NonNegative,
    target: float | None = None,
    eps_clip_high: NonNegative = 0.28,
) -> LossPlan:
    """eps_high moves by `change`: up while Hbar is below its target, down while above; the target
    is the first batch's Hbar where none is given.
    """
    state = dict(step.state)
    value = state.get("eps_high", eps_clip_high)
    if math.isfinite(step.entropy):
        goal = state.setdefault("target", step.entropy) if target is None else target
        side = (step.entropy < goal) - (step.entropy > goal)
        value = min(max(value + change * side, high_min), high_max)
    state["eps_high"] = value
    return LossPlan(numbers={"eps_high": value}, metrics={"eps_high": value}, state=state)


@policy_loss(
    plan=plan_adapo,
    family="control",
    source="2603.11682",
    confidence="second-hand",
    needs=("entropy",),
)
def adapo(
    tokens: LossTokens, *, eps_clip: NonNegative = 0.2, eps_clip_c: NonNegative = 10.0
) -> Tensor:
    """ADAPO (arXiv 2603.11682): clipped, with the upper bound of its plan. Its step and bounds are
    not published.
    """
    return clipped_surrogate(tokens, eps_clip, tokens.numbers["eps_high"], eps_clip_c)


def tempering(
    state: Mapping[str, float],
    *,
    target: float = 0.5,
    temperature_high: Positive = 1.2,
    temperature_low: Positive = 0.8,
) -> float:
    """T of this step, from the last one's mean surprisal [nats], 0 before the first: up to the
    target `temperature_high`, over it `temperature_low`.
    """
    return temperature_high if state.get("surprisal", 0.0) <= target else temperature_low


def plan_dcpo_distribution(
    step: Step,
    *,
    target: float = 0.5,
    gap_max: NonNegative = 0.1,
    reward_threshold: float = 0.05,
) -> LossPlan:
    """a = min(|target - S|, gap_max) / f, then a / (1 + a), and 0 where f is: S is the last step's
    mean surprisal [nats], 0 before the first, f the share of the sequences, of those with a reward,
    whose reward is over the threshold. w = pi^T(a) / pi(a) of the scored policy on their tokens,
    with T temperature_high where S is up to the target, else temperature_low.
    """
    before = step.state.get("surprisal", 0.0)
    right_Q = step.reward_Q > reward_threshold
    share = int(right_Q.sum()) / max(1, int(step.reward_Q.isfinite().sum()))
    mix = min(abs(target - before), gap_max) / share if share else 0.0
    mix /= 1 + mix
    pull_T = right_Q[step.batch.sequence_T] * torch.exp(step.tempered_T)
    return LossPlan(
        values={"pull": pull_T.to(step.advantage_T.dtype)},
        numbers={"mix": mix},
        metrics={"mix": mix, "right_share": share},
        state={"surprisal": step.across.mean(step.surprisal_T)},
    )


@policy_loss(
    plan=plan_dcpo_distribution,
    tempering=tempering,
    family="control",
    source="2601.12730",
    needs=("tempered_log_prob", "rewards"),
)
def dcpo_distribution(
    tokens: LossTokens,
    *,
    eps_clip: NonNegative = 0.2,
    eps_clip_high: NonNegative = 0.2,
    eps_clip_c: NonNegative = 3.0,
) -> Tensor:
    """DCPO, distribution-centric (arXiv 2601.12730; `dcpo` is another paper's): clipped, with
    A' = (1 - a) A + a 1[R > 0.05] w, a and w of its plan: REINFORCE on right responses as if they
    had been sampled at another temperature, which raises entropy below its target and lowers it
    above. w is neither clipped nor differentiated.
    """
    mix = tokens.numbers["mix"]
    mixed = (1 - mix) * tokens.advantage + mix * tokens.values["pull"]
    return clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c, mixed)


def plan_opefo(step: Step, *, kernel: Literal["plain", "one_minus", "exact"] = "plain") -> LossPlan:
    """lambda = (D - U) / (D + U) from the first-order changes dH of entropy, U the sum of the
    positive and D that of the negative; 1 + lambda on the former, 1 - lambda on the latter.

    dH = A pi (s - H) (plain), times 1 - pi (one_minus), or A g with the exact g (exact).
    """
    if kernel == "exact":
        change_T = step.advantage_T.double() * step.sensitivity_T.double()
    else:
        pi_T = step.probability_T.double()
        gap_T = step.surprisal_T.double() - step.entropy_T.double()
        change_T = step.advantage_T.double() * pi_T * gap_T
        change_T = change_T * (1 - pi_T) if kernel == "one_minus" else change_T
    up = step.across.sum(change_T.clamp(min=0))
    down = -step.across.sum(change_T.clamp(max=0))
    balance = (down - up) / (down + up) if down + up else 0.0
    weight_T = 1 + balance * torch.sign(change_T)
    return LossPlan(weight_T, metrics={"balance": balance})


@policy_loss(
    plan=plan_opefo,
    family="control",
    source="2605.11491",
    confidence="second-hand",
    weighted=True,
    needs=("entropy",),
)
def opefo(tokens: LossTokens) -> Tensor:
    """OPEFO (arXiv 2605.11491): -w A r, unclipped, w of its plan; made for one update per batch."""
    return -tokens.weight * tokens.advantage * tokens.ratio


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
    corrects=True,
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
    loss = corrected(clipped_surrogate(tokens, eps_clip, eps_clip_high, eps_clip_c), tokens)
    return loss - coefficient * (tokens.entropy - tokens.values["penalty"])
