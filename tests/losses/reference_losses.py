"""Naive float64 twins of the objectives:
one token at a time, branches written out, gradients by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from megatron_stare.config import LossConfig
from tests.reference import top_k

# The paper's clips, written out: unset they are the objective's published ones.
PAPER = LossConfig(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=10.0)

# (surprisal with gradient, constants...) of one token -> its loss
Twin = Callable[[Tensor, float, float, float, LossConfig], Tensor]


def ratio_of(surprisal: Tensor, old_surprisal: float) -> Tensor:
    """pi / pi_old; a log-ratio beyond +-20 is that bound, and has no gradient."""
    log_ratio = old_surprisal - surprisal
    if float(log_ratio.detach()) > 20:
        return torch.tensor(math.exp(20), dtype=torch.float64)
    if float(log_ratio.detach()) < -20:
        return torch.tensor(math.exp(-20), dtype=torch.float64)
    return torch.exp(log_ratio)


def ppo(
    surprisal: Tensor, old_surprisal: float, advantage: float, low: float, high: float
) -> Tensor:
    """The pessimistic one of the plain and the clipped surrogate. arXiv 1707.06347 eq.
    7, as a loss.
    """
    ratio = ratio_of(surprisal, old_surprisal)
    value = float(ratio.detach())
    if advantage > 0 and value > 1 + high:
        return torch.tensor(-advantage * (1 + high), dtype=torch.float64)
    if advantage < 0 and value < 1 - low:
        return torch.tensor(-advantage * (1 - low), dtype=torch.float64)
    return -advantage * ratio


def grpo(
    surprisal: Tensor, old: float, advantage: float, weight: float, config: LossConfig
) -> Tensor:
    return ppo(surprisal, old, advantage, config.eps_clip, config.eps_clip)


def dapo(
    surprisal: Tensor, old: float, advantage: float, weight: float, config: LossConfig
) -> Tensor:
    loss = ppo(surprisal, old, advantage, config.eps_clip, config.eps_clip_high)
    bound = -advantage * config.eps_clip_c
    if config.eps_clip_c and advantage < 0 and float(loss.detach()) > bound:
        return torch.tensor(bound, dtype=torch.float64)
    return loss


def stare(
    surprisal: Tensor, old: float, advantage: float, weight: float, config: LossConfig
) -> Tensor:
    return weight * dapo(surprisal, old, advantage, weight, config)


def sft(
    surprisal: Tensor, old: float, advantage: float, weight: float, config: LossConfig
) -> Tensor:
    return 1.0 * surprisal


TWINS: dict[str, Twin] = {"grpo": grpo, "dapo": dapo, "stare": stare, "sft": sft}


def gspo(
    surprisals: list[float],
    olds: list[float],
    advantages: list[float],
    sequences: list[int],
    config: LossConfig,
) -> tuple[list[float], list[float]]:
    """GSPO-token: each token's loss and its derivative by its own surprisal, by hand.

    With s the sequence's ratio, the loss is -A s and its derivative A s, or a clipped constant.
    """
    members: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        members.setdefault(sequence, []).append(place)
    values, gradients = [], []
    for place, advantage in enumerate(advantages):
        own = members[sequences[place]]
        mean = sum(olds[other] - surprisals[other] for other in own) / len(own)
        ratio = math.exp(min(mean, 10.0))
        low, high = 1 - config.eps_clip, 1 + config.eps_clip_high
        clipped = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
        values.append(-advantage * (min(max(ratio, low), high) if clipped else ratio))
        gradients.append(0.0 if clipped or mean > 10 else advantage * ratio)
    return values, gradients


def gspo_of_sequences(
    surprisals: list[float],
    olds: list[float],
    advantages: list[float],
    sequences: list[int],
    config: LossConfig,
) -> tuple[float, list[float]]:
    """GSPO as published (eq. 5): the mean over sequences of max(-A s, -A clip(s)), s with its
    gradient through every token, and its derivatives by the surprisals, by autograd.
    """
    live = torch.tensor(surprisals, dtype=torch.float64, requires_grad=True)
    losses = []
    for sequence in sorted(set(sequences)):
        own = [place for place, other in enumerate(sequences) if other == sequence]
        old = torch.tensor([olds[place] for place in own], dtype=torch.float64)
        ratio, advantage = torch.exp((old - live[own]).mean()), advantages[own[0]]
        clipped = torch.clamp(ratio, 1 - config.eps_clip, 1 + config.eps_clip_high)
        losses.append(torch.maximum(-advantage * ratio, -advantage * clipped))
    loss = torch.stack(losses).mean()
    return float(loss.detach()), torch.autograd.grad(loss, live)[0].tolist()


# Of sequences: the columns of all tokens, their sequences' numbers -> values and gradients.
SEQUENCE_TWINS = {"gspo": gspo}


def values_and_gradients(
    twin: Twin,
    surprisals: list[float],
    olds: list[float],
    advantages: list[float],
    weights: list[float],
    config: LossConfig,
) -> tuple[list[float], list[float]]:
    """Each token's loss and its derivative by the surprisal."""
    values, gradients = [], []
    for surprisal, *constants in zip(surprisals, olds, advantages, weights, strict=True):
        live = torch.tensor(surprisal, dtype=torch.float64, requires_grad=True)
        loss = twin(live, *constants, config)
        values.append(float(loss.detach()))
        gradients.append(float(torch.autograd.grad(loss, live)[0]) if loss.requires_grad else 0.0)
    return values, gradients


def aggregate(losses: list[float], sequences: list[int], aggregation: str) -> float:
    """The batch loss from every token's loss and the number of its sequence."""
    by_sequence: dict[int, list[float]] = {}
    for loss, sequence in zip(losses, sequences, strict=True):
        by_sequence.setdefault(sequence, []).append(loss)
    if aggregation == "token-mean":
        return sum(losses) / len(losses)
    if aggregation == "seq-mean-token-sum":
        return sum(sum(part) for part in by_sequence.values()) / len(by_sequence)
    assert aggregation == "seq-mean-token-mean"
    return sum(sum(part) / len(part) for part in by_sequence.values()) / len(by_sequence)


def chosen_count(n: int, share: str) -> int:
    """min(n, max(1, ceil(n P))) with P the decimal number that was written; 0 where P or n is 0."""
    exact = Fraction(share)
    if n == 0 or exact == 0:
        return 0
    return min(n, max(1, math.ceil(n * exact)))


def omega(
    surprisals: list[float],
    advantages: list[float],
    indices: list[int],
    segments: list[int],
    *,
    variant: str,
    share: str,
    w: float,
    m: float,
) -> list[float]:
    """STARE's weights while the gate is on:
    full sorts inside every segment, ties to the smaller index.
    """
    weights = [1.0] * len(surprisals)
    for positive, factor in ((True, w), (False, m if variant == "C2" else 1.0)):
        for segment in set(segments):
            side = [
                place
                for place, advantage in enumerate(advantages)
                if segments[place] == segment and (advantage > 0 if positive else advantage < 0)
            ]
            k = chosen_count(len(side), share)
            chosen = top_k(
                [surprisals[place] for place in side], [indices[place] for place in side], k
            )
            for place in side:
                if indices[place] in chosen:
                    weights[place] = factor
    return weights
