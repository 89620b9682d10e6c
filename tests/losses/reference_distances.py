"""Naive float64 twins, continued: divergences, sequences, ranks inside them, and controllers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from tests.losses.reference_objectives import (
    Batch,
    Losses,
    Place,
    clip,
    clipped,
    dapo,
    every,
    quantile,
    shaped,
    top,
)


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


def lp_reg(batch: Batch, threshold: float = 0.02, rho: float = 0.2) -> Losses:
    def proxy(x: Place) -> float:
        p = torch.softmax(batch.logits[x].detach(), -1).tolist()
        kept, own = [v for v in p if v >= threshold * max(p)], math.exp(float(batch.old[x]))
        return math.log(own / sum(kept)) if own >= threshold * max(p) else -math.inf

    negative = [x for x in batch.places if batch.a(x) < 0]
    count = int(rho * len(negative))
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


def dcpo_distribution(batch: Batch) -> Losses:
    """The loss of the first step: T 1.2, and a gap of 0.5 that is cut to 0.1."""
    share = sum(r > 0.05 for r in batch.rewards) / len(batch.rewards)
    mix = 0.1 / share / (1 + 0.1 / share)

    def advantage(x: Place) -> float:
        if batch.rewards[x[0]] <= 0.05:
            return (1 - mix) * batch.a(x)
        q, p = math.exp(float(batch.old[x])), torch.softmax(batch.logits[x].detach(), -1).tolist()
        tempered = q ** (1 / 1.2) / sum(v ** (1 / 1.2) for v in p)
        return (1 - mix) * batch.a(x) + mix * tempered / q

    return shaped(batch, advantage, 0.2, 0.2, 3.0)


def turns(batch: Batch) -> dict[Place, int]:
    found = {}
    for row, places in batch.rows().items():
        turn = 0
        for x in places:
            turn += x[1] > 0 and x != places[0] and not batch.mask[row, x[1] - 1]
            found[x] = turn
    return found


def epo(batch: Batch, mode: str) -> Losses:
    """The losses of the first step, and of one with a token of the turn from which P counts."""
    turn, width = turns(batch), batch.mask.shape[1]

    def inside(x: Place) -> bool:
        alike = [y for y in batch.places if turn[y] == turn[x]]
        past = statistics.fmean(float(batch.old_entropy[y]) for y in alike)
        own = sum(batch.h(y) for y in alike if y[0] == x[0])
        now = {"token": batch.h(x), "padded": own / width}.get(mode)
        now = own / sum(y[0] == x[0] for y in alike) if now is None else now
        return 0.8 * past < now < 1.2 * past

    return {
        x: loss - 1e-3 * (batch.entropy[x] - (0.0 if inside(x) else 0.1))
        for x, loss in clipped(batch, 0.2, 0.2, 3.0).items()
    }


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


def siren(batch: Batch) -> Losses:
    """The penalty (0.3, anchor 0.2) is spread over the tokens; only its sum is defined."""

    def nucleus(x: Place) -> Tensor:
        p = torch.sort(torch.softmax(batch.logits[x], -1), descending=True).values
        kept, mass = [], 0.0
        for each in p:
            mass += float(each)
            if mass >= 0.8:
                break
            kept.append(each)
        if not kept:
            return 0 * p[0]
        q = torch.stack(kept) / torch.stack(kept).sum()
        return -(q * torch.log(q)).sum()

    means = []
    for places in batch.rows().values():
        entropies = [nucleus(x) for x in places]
        limit = quantile([float(h) for h in entropies], 0.8)
        chosen = [h for h in entropies if float(h) > limit]
        means.append(torch.stack(chosen).mean() if chosen else 0 * entropies[0])
    penalty = 0.3 * (torch.stack(means).mean() - 0.2) ** 2
    norm = batch.log_prob.shape[1] / len(batch.places)
    return {x: loss + norm * penalty for x, loss in clipped(batch, 0.2, 0.2).items()}


def stare(batch: Batch) -> Losses:
    sides = [[x for x in batch.places if s * batch.a(x) > 0] for s in (1, -1)]
    weights = {}
    for places, weight in zip(sides, (1.1, 0.9), strict=True):
        count = min(len(places), max(1, math.ceil(len(places) / 10)))
        for x in top(batch, lambda y: -float(batch.log_prob[y]), places, count):
            weights[x] = weight
    return {x: weights.get(x, 1.0) * loss for x, loss in dapo(batch).items()}
