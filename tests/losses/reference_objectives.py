"""Naive float64 twins of whole objectives on a padded batch: one token at a time, in plain loops.

A twin is given a Batch and returns each token's loss {(row, column): scalar tensor}; tokens that
are missing from it left loss and denominator. Written from the formulas of the papers and of their
authors' code, independently of the package.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Place = tuple[int, int]
Losses = dict[Place, Tensor]


@dataclass
class Batch:
    """Columns by place; `s` is the log-prob with its gradient."""

    log_prob: Tensor
    old: Tensor
    rollout: Tensor
    advantage: Tensor
    entropy: Tensor
    old_entropy: Tensor
    logits: Tensor
    mask: Tensor
    groups: list[int]
    rewards: list[float]

    @property
    def places(self) -> list[Place]:
        return [tuple(place) for place in self.mask.nonzero().tolist()]

    def rows(self) -> dict[int, list[Place]]:
        found: dict[int, list[Place]] = {}
        for place in self.places:
            found.setdefault(place[0], []).append(place)
        return found

    def a(self, place: Place) -> float:
        return float(self.advantage[place])

    def r(self, place: Place) -> Tensor:
        return torch.exp(torch.clamp(self.log_prob[place] - self.old[place], -20, 20))

    def p(self, place: Place) -> float:
        return math.exp(float(self.log_prob[place]))

    def h(self, place: Place) -> float:
        return float(self.entropy[place])


def clip(ratio: Tensor, a: float, low: float, high: float, c: float = 0.0) -> Tensor:
    """max(-A r, -A clip(r)), and min with -A c where A < 0."""
    value = float(ratio.detach())
    loss = -a * ratio
    bounded = min(max(value, 1 - low), 1 + high)
    if -a * bounded > -a * value:
        loss = torch.tensor(-a * bounded, dtype=torch.float64)
    if c and a < 0 and float(loss) > -a * c:
        loss = torch.tensor(-a * c, dtype=torch.float64)
    return loss


def every(batch: Batch, loss: Callable[[Place], Tensor]) -> Losses:
    return {place: loss(place) for place in batch.places}


def clipped(batch: Batch, low: float, high: float, c: float = 0.0) -> Losses:
    return every(batch, lambda x: clip(batch.r(x), batch.a(x), low, high, c))


def dapo(batch: Batch) -> Losses:
    return clipped(batch, 0.2, 0.28, 10.0)


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def top(batch: Batch, value: Callable[[Place], float], places: list[Place], k: int) -> set[Place]:
    return set(sorted(places, key=lambda x: (-value(x), x))[:k])


def ce_gppo(batch: Batch, b1: float = 0.75, b2: float = 1.0) -> Losses:
    def loss(x: Place) -> Tensor:
        r, a = batch.r(x), batch.a(x)
        if a < 0 and float(r) < 0.8:
            out = -b1 * 0.8 * (r / float(r)) * a
        elif a > 0 and float(r) > 1.2:
            out = -b2 * 1.2 * (r / float(r)) * a
        else:
            out = -a * r
        if a < 0 and float(out) > -10 * a:
            out = torch.tensor(-10 * a, dtype=torch.float64)
        return out

    return every(batch, loss)


def dgpo(batch: Batch) -> Losses:
    def loss(x: Place) -> Tensor:
        r, a = batch.r(x), batch.a(x)
        if a < 0 and float(r) < 0.8:
            r = r * float(r) / 0.8
        elif a > 0 and float(r) > 1.2:
            r = r * (1.2 / float(r)) ** 0.5
        return -a * r

    return every(batch, loss)


def cispo(batch: Batch) -> Losses:
    return every(
        batch,
        lambda x: -min(float(batch.r(x)), 1.2) * batch.a(x) * batch.log_prob[x],
    )


def sapo(batch: Batch) -> Losses:
    def loss(x: Place) -> Tensor:
        tau = 1.0 if batch.a(x) > 0 else 1.05
        return -batch.a(x) * 4 / tau / (1 + torch.exp(-tau * (batch.r(x) - 1)))

    return every(batch, loss)


def bapo(batch: Batch) -> Losses:
    def contrast(low: float, high: float) -> float:
        positive = negative = 0.0
        for x in batch.places:
            r, a = float(batch.r(x)), batch.a(x)
            if a >= 0:
                positive += min(r, high) * a
            else:
                negative -= max(r, low) * a
        return positive / (negative + 1e-8) if negative > 0 else math.inf

    low, high = 0.8, 1.2
    while contrast(low, high) < 0.5 and low < 0.95:
        low = min(low + 0.05, 0.95)
    while contrast(low, high) < 0.5 and high < 2.0:
        high = min(high + 0.1, 2.0)
    return clipped(batch, 1 - low, high - 1, 3.0)


def dcpo(batch: Batch) -> Losses:
    def loss(x: Place) -> Tensor:
        r, q = torch.exp(batch.log_prob[x] - batch.old[x]), math.exp(float(batch.old[x]))
        low = (1 + math.sqrt(max(0.0, 1 - 0.8 / q))) / 2
        high = min(10.0, (1 + math.sqrt(1 + 1.12 / q)) / 2)
        return clip(r, batch.a(x), 1 - low, high - 1, 10.0)

    return every(batch, loss)


def erc(batch: Batch) -> Losses:
    return entropy_clipped(batch, dapo(batch))


def entropy_clipped(batch: Batch, losses: Losses) -> Losses:
    def loss(x: Place) -> Tensor:
        out = losses[x]
        rho = (batch.h(x) + 1e-8) / (float(batch.old_entropy[x]) + 1e-8)
        return out if 0.95 < rho < 1.05 else out.detach()

    return every(batch, loss)


def steer(batch: Batch, mapping: str = "linear") -> Losses:
    def omega(x: Place) -> float:
        p = min(max(batch.p(x), 1e-8), 1 - 1e-8)
        old = min(max(math.exp(float(batch.old[x])), 1e-8), 1.0)
        return abs(batch.a(x) / old * p * (1 - p) * (math.log(p) + float(batch.old_entropy[x])))

    found = [omega(x) for x in batch.places]
    low, high = min(found), max(found)

    def weight(x: Place) -> float:
        if mapping == "linear":
            return 1.2 - (omega(x) - low) * 0.4 / (high - low)
        return min(max(math.exp(math.log(0.8) / max(high, 0.02) * omega(x)), 0.8), 1.0)

    losses = dapo(batch)
    return {x: weight(x) * loss for x, loss in losses.items()}


def shaped(batch: Batch, advantage: Callable[[Place], float], *bounds: float) -> Losses:
    return every(batch, lambda x: clip(batch.r(x), advantage(x), *bounds))


def ar(batch: Batch, alpha: float) -> Losses:
    def advantage(x: Place) -> float:
        return batch.a(x) * (alpha * math.exp(float(batch.old[x])) + 1 - alpha)

    return shaped(batch, advantage, 0.2, 0.24, 10.0)


def entro_adv(batch: Batch) -> Losses:
    return shaped(
        batch,
        lambda x: batch.a(x) + min(0.4 * batch.h(x), abs(batch.a(x)) / 2),
        *(0.2, 0.28, 10.0),
    )


def entro_reg(batch: Batch) -> Losses:
    return {x: loss - 1e-3 * batch.entropy[x] for x, loss in dapo(batch).items()}


def hapo(batch: Batch) -> Losses:
    logs = {x: math.log(max(batch.h(x), 1e-8)) for x in batch.places}
    ordered = sorted(logs.values())
    pivot = ordered[round(0.8 * (len(ordered) - 1))]
    spread = math.sqrt(sum((e - pivot) ** 2 for e in logs.values()) / len(logs))
    raw = {x: (e - pivot) / spread for x, e in logs.items()}
    top_h, bottom = max(raw.values()), -min(raw.values())

    def loss(x: Place) -> Tensor:
        h = raw[x] / top_h if raw[x] > 0 else raw[x] / bottom
        r, a = torch.exp(batch.log_prob[x] - batch.old[x]), batch.a(x)
        low, high = (0.2 * (1 - h), 0.2) if h <= 0 else (0.2, 0.2 * (1 + h))
        inside = 1 - low / 2 < float(r) < 1 + high / 2
        if (h > 0 and not inside) or (h <= 0 and inside):
            a *= 1 + h
        return clip(r, a, low, high, 10.0)

    return every(batch, loss)


def stapo(batch: Batch) -> Losses:
    limit = quantile([batch.h(x) for x in batch.places], 0.8)
    return {
        x: loss
        for x, loss in clipped(batch, 0.2, 0.28).items()
        if not (batch.a(x) > 0 and batch.p(x) < 0.002 and batch.h(x) < limit)
    }


def entropy_20(batch: Batch) -> Losses:
    count = max(1, math.ceil(len(batch.places) / 5))
    chosen = top(batch, batch.h, batch.places, count)
    return {x: loss for x, loss in dapo(batch).items() if x in chosen}


def grpo_clip_b(batch: Batch) -> Losses:
    def signal(x: Place) -> float:
        log_mu = float(batch.rollout[x])
        return math.exp(log_mu) * (float(batch.old_entropy[x]) + log_mu)

    found = [signal(x) for x in batch.places]
    mean, spread = statistics.fmean(found), statistics.pstdev(found)
    return {
        x: loss
        for x, loss in clipped(batch, 0.2, 0.2, 3.0).items()
        if not (batch.a(x) < 0 and signal(x) - mean < -2.5 * spread)
    }


def grpo_clip_v(batch: Batch) -> Losses:
    def change(x: Place) -> float:
        p = torch.softmax(batch.logits[x].detach(), -1).tolist()
        h, log_q = float(batch.old_entropy[x]), float(batch.old[x])
        return sum(v * v * (h + math.log(v)) for v in p) - math.exp(log_q) * (h + log_q)

    spread = statistics.pstdev([change(x) for x in batch.places])
    over = {x for x in batch.places if batch.a(x) <= 0 and change(x) > 8.5 * spread}
    negative = [x for x in over if batch.a(x) < 0]
    if len(over) > 1e-4 * len(batch.places):
        over = {x for x in over if batch.a(x) == 0} | top(batch, change, negative, 1)
    return {x: loss for x, loss in clipped(batch, 0.2, 0.2, 3.0).items() if x not in over}


def one_side(batch: Batch, sign: int) -> Losses:
    return {x: loss for x, loss in clipped(batch, 0.2, 0.2).items() if sign * batch.a(x) > 0}
