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
    def loss(x: Place) -> Tensor:
        out = clip(batch.r(x), batch.a(x), 0.2, 0.28, 10.0)
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
        low, high = (0.2 * (1 - h), 0.28) if h <= 0 else (0.2, 0.28 * (1 + h))
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
        for x, loss in clipped(batch, 0.2, 0.2).items()
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
    return {x: loss for x, loss in clipped(batch, 0.2, 0.2).items() if x not in over}


def one_side(batch: Batch, sign: int) -> Losses:
    return {x: loss for x, loss in clipped(batch, 0.2, 0.2).items() if sign * batch.a(x) > 0}


def dppo(batch: Batch, kind: str) -> Losses:
    delta = {"tv": 0.15, "kl": 0.05}[kind]

    def loss(x: Place) -> Tensor:
        pi, mu, a = batch.p(x), math.exp(float(batch.rollout[x])), batch.a(x)
        distance = abs(pi - mu)
        if kind == "kl":
            rest = math.log((1 - mu + 1e-8) / (1 - pi + 1e-8))
            distance = mu * math.log(mu / pi) + (1 - mu) * rest
        away = pi > mu if a > 0 else pi < mu
        weight = 0.0 if away and distance > delta else min(pi / mu, 10.0)
        return -a * weight * batch.log_prob[x]

    return every(batch, loss)


def covariances(batch: Batch) -> dict[Place, float]:
    a = statistics.fmean(batch.a(x) for x in batch.places)
    log_p = statistics.fmean(float(batch.log_prob[x]) for x in batch.places)
    return {x: (batch.a(x) - a) * (float(batch.log_prob[x]) - log_p) for x in batch.places}


def kl_cov(batch: Batch) -> Losses:
    found = covariances(batch)
    chosen = top(batch, lambda x: found[x], batch.places, 1)  # int(2e-3 n) is 0 of so few

    def loss(x: Place) -> Tensor:
        gap = (batch.log_prob[x] - batch.old[x]).abs()
        return -batch.a(x) * batch.r(x) + (gap if x in chosen else 0.0)

    return every(batch, loss)


def lp_reg(batch: Batch) -> Losses:
    def proxy(x: Place) -> float:
        p = torch.softmax(batch.logits[x].detach(), -1).tolist()
        kept, own = [v for v in p if v >= 0.02 * max(p)], math.exp(float(batch.old[x]))
        return math.log(own / sum(kept)) if own >= 0.02 * max(p) else -math.inf

    negative = [x for x in batch.places if batch.a(x) < 0]
    count = int(0.2 * len(negative))
    lowest = top(batch, lambda x: -float(batch.log_prob[x]), negative, count if count > 1 else 0)

    def loss(x: Place) -> Tensor:
        if x in lowest and float(batch.log_prob[x]) < proxy(x):
            d = proxy(x) - batch.log_prob[x]
            return -batch.a(x) * batch.r(x) + torch.clamp(torch.exp(d) - d - 1, -10, 10)
        return clip(batch.r(x), batch.a(x), 1.0, 9.0)

    return every(batch, loss)


def of_rows(batch: Batch, loss: Callable[[list[Place]], Tensor]) -> Losses:
    """The row's loss on each of its tokens."""
    found = {}
    for places in batch.rows().values():
        value = loss(places)
        found |= dict.fromkeys(places, value)
    return found


def gmpo(batch: Batch) -> Losses:
    def loss(places: list[Place]) -> Tensor:
        a, total = batch.a(places[0]), torch.zeros((), dtype=torch.float64)
        for x in places:
            gap = batch.log_prob[x] - batch.old[x]
            value = float(gap)
            if (a > 0 and value > 0.4) or (a < 0 and value < -0.4):
                gap = torch.tensor(math.copysign(0.4, value), dtype=torch.float64)
            total = total + gap
        return -a * torch.exp(total / len(places))

    return of_rows(batch, loss)


def espo(batch: Batch) -> Losses:
    def loss(places: list[Place]) -> Tensor:
        total = torch.stack([batch.log_prob[x] - batch.old[x] for x in places]).sum()
        return clip(torch.exp(total / batch.mask.shape[1]), batch.a(places[0]), 0.2, 0.2)

    return of_rows(batch, loss)


def gspo(batch: Batch) -> Losses:
    def loss(places: list[Place]) -> Tensor:
        mean = torch.stack([batch.log_prob[x] - batch.old[x] for x in places]).mean()
        return clip(torch.exp(mean), batch.a(places[0]), 3e-4, 4e-4)

    return of_rows(batch, loss)


def kpo(batch: Batch) -> Losses:
    found: Losses = {}
    for row in range(batch.mask.shape[0]):
        spread = x_t = 0.0
        for column in range(batch.mask.shape[1]):
            place = (row, column)
            gain = (spread + 1e-6) / (spread + 1e-6 + 1.0)
            spread = gain
            there = bool(batch.mask[place])
            z = float(batch.log_prob[place] - batch.old[place]) if there else 0.0
            x_t = (1 - gain) * x_t + gain * z
            if there:
                own = batch.log_prob[place] - float(batch.log_prob[place])
                found[place] = clip(torch.exp(own + x_t), batch.a(place), 3e-4, 4e-4)
    return found


def minpro(batch: Batch) -> Losses:
    found: Losses = {}
    for places in batch.rows().values():
        smallest = math.inf
        for x in places:
            r = float(batch.r(x))
            weight = r if smallest == math.inf else smallest * r
            smallest = min(smallest, r)
            found[x] = -min(max(weight, 0.8), 1.2) * batch.a(x) * batch.log_prob[x]
    return found


def aspo(batch: Batch) -> Losses:
    def loss(x: Place) -> Tensor:
        limit = quantile([batch.h(y) for y in batch.rows()[x[0]]], 0.8)
        eps = 0.4 if batch.h(x) > limit else 0.2
        r, a = batch.r(x), batch.a(x)
        value = float(r)
        if a < 0:
            kept = r if value >= 1 - eps else torch.tensor(1 - eps, dtype=torch.float64)
            return -a * 3 * batch.log_prob[x] if value > 3 else -a * kept
        if value > 1 + eps:
            return torch.tensor(-a / (1 + eps), dtype=torch.float64)
        if 1 / value > 3:
            return -a * 3 * batch.log_prob[x]
        return -a * (r / value) / value

    return every(batch, loss)


def a3po(batch: Batch) -> Losses:
    losses = dapo(batch)
    for places in batch.rows().values():
        count, sign = max(1, int(0.2 * len(places) + 1e-9)), batch.a(places[0])
        for x in top(batch, lambda y, s=sign: -s * float(batch.log_prob[y]), places, count):
            losses[x] = losses[x] * (5.0 if sign else 1.0)
    return losses


def arm(batch: Batch) -> Losses:
    confidence = {}
    for row, places in batch.rows().items():
        lowest = sorted(float(batch.log_prob[x]) for x in places)
        lowest = lowest[: max(1, int(0.2 * len(places) + 1e-9))]
        confidence[row] = math.exp(statistics.fmean(lowest))

    def advantage(x: Place) -> float:
        members = [row for row in confidence if batch.groups[row] == batch.groups[x[0]]]
        right = any(batch.a(batch.rows()[row][0]) > 0 for row in members)
        mean = statistics.fmean(confidence[row] for row in members)
        return batch.a(x) + (0.1 * (mean - confidence[x[0]]) if right else 0.0)

    return shaped(batch, advantage, 0.2, 0.28, 10.0)


def mean_entropy(batch: Batch) -> float:
    return statistics.fmean(batch.h(x) for x in batch.places)


def entropic(batch: Batch) -> Losses:
    alpha = min(max(mean_entropy(batch) - 0.1, -1.0), 1.0)
    chosen = [x for x in batch.places if batch.p(x) > 0.05]
    factor = alpha * len(batch.places) / len(chosen)
    losses = clipped(batch, 0.2, 0.2, 3.0)
    return {
        x: loss - (factor * batch.r(x) * abs(batch.a(x)) if x in chosen else 0.0)
        for x, loss in losses.items()
    }


def repo_r(batch: Batch) -> Losses:
    def advantage(x: Place) -> float:
        a, log_p = batch.a(x), max(float(batch.log_prob[x]), -20.0)
        if a > 0:
            return max(a * (1 - 0.03 * log_p), 0.0)
        return min(a * (1 + 0.03 * log_p), 0.0)

    return shaped(batch, advantage, 0.2, 0.28, 10.0)


def opefo(batch: Batch) -> Losses:
    def change(x: Place) -> float:
        return batch.a(x) * batch.p(x) * (-float(batch.log_prob[x]) - batch.h(x))

    up = sum(max(change(x), 0.0) for x in batch.places)
    down = sum(max(-change(x), 0.0) for x in batch.places)
    balance = (down - up) / (down + up)

    def loss(x: Place) -> Tensor:
        sign = (change(x) > 0) - (change(x) < 0)
        return -(1 + balance * sign) * batch.a(x) * batch.r(x)

    return every(batch, loss)


def aent(batch: Batch) -> Losses:
    def truncated(x: Place) -> Tensor:
        kept = torch.sort(batch.logits[x]).values[int(0.2 * batch.logits.shape[-1]) :]
        p = torch.softmax(kept, -1)
        return -(p * torch.log(p)).sum()

    return {x: loss - 1e-3 * truncated(x) for x, loss in clipped(batch, 0.2, 0.2).items()}


def stare(batch: Batch) -> Losses:
    sides = [[x for x in batch.places if s * batch.a(x) > 0] for s in (1, -1)]
    weights = {}
    for places, weight in zip(sides, (1.1, 0.9), strict=True):
        count = min(len(places), max(1, math.ceil(len(places) / 10)))
        for x in top(batch, lambda y: -float(batch.log_prob[y]), places, count):
            weights[x] = weight
    return {x: weights.get(x, 1.0) * loss for x, loss in dapo(batch).items()}
