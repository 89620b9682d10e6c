"""Naive float64 twins: the formulas written a second time, slowly, with nothing sharded,
chunked or fused.

Shape legend: N rows, H hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def token_statistics(
    hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature: float | Tensor = 1.0
) -> dict[str, Tensor]:
    """surprisal, entropy, variance, c, sensitivity of each row; differentiable by autograd;
    V is the true vocabulary.
    """
    temperature_N = torch.as_tensor(temperature, dtype=torch.float64).expand(hidden_NH.shape[0])
    logits_NV = hidden_NH.double() @ weight_VH.double().t() / temperature_N.unsqueeze(1)
    surprisal_NV = torch.logsumexp(logits_NV, 1, keepdim=True) - logits_NV
    probability_NV = torch.exp(-surprisal_NV)
    weighted_NV = torch.where(probability_NV > 0, probability_NV * surprisal_NV, 0.0)
    entropy_N = weighted_NV.sum(1)
    c_N = torch.where(
        probability_NV > 0, probability_NV.square() * (surprisal_NV - entropy_N.unsqueeze(1)), 0.0
    ).sum(1)
    surprisal_N = surprisal_NV.gather(1, target_N.unsqueeze(1)).squeeze(1)
    return {
        "surprisal": surprisal_N,
        "entropy": entropy_N,
        "variance": torch.where(
            probability_NV > 0,
            probability_NV * (surprisal_NV - entropy_N.unsqueeze(1)).square(),
            0.0,
        ).sum(1),
        "c": c_N,
        "sensitivity": torch.exp(-surprisal_N) * (surprisal_N - entropy_N) - c_N,
    }


def log_kept_mass(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    kappa: float,
    temperature: float | Tensor = 1.0,
) -> list[float]:
    """ln of the mass of the tokens with p >= kappa max p, one row and one token at a time; inf
    if the target is not one of them.
    """
    temperature_N = torch.as_tensor(temperature, dtype=torch.float64).expand(hidden_NH.shape[0])
    logits_NV = hidden_NH.double() @ weight_VH.double().t() / temperature_N.unsqueeze(1)
    return [
        math.log(math.fsum(p for p in row if p >= kappa * max(row)))
        if row[target] >= kappa * max(row)
        else math.inf
        for row, target in zip(torch.softmax(logits_NV, 1).tolist(), target_N.tolist(), strict=True)
    ]


def top_k(values: list[float], indices: list[int], k: int) -> set[int]:
    """The indices of the min(k, n) largest values, by (value descending, index ascending)."""
    order = sorted(zip(values, indices, strict=True), key=lambda pair: (-pair[0], pair[1]))
    return {index for _, index in order[: max(0, k)]}


def top_k_per_segment(
    values: list[float], indices: list[int], segments: list[int], k_of: Callable[[int], int]
) -> set[int]:
    """`top_k` inside every segment."""
    chosen: set[int] = set()
    for segment in set(segments):
        members = [place for place, other in enumerate(segments) if other == segment]
        chosen |= top_k(
            [values[i] for i in members], [indices[i] for i in members], k_of(len(members))
        )
    return chosen


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation at position q (n - 1) of the sorted values."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def divergence(p_logits_SV: Tensor, q_logits_SV: Tensor) -> list[float]:
    """KL(p || q) of every row: the sum written out, one probability at a time."""
    values = []
    for p_row, q_row in zip(p_logits_SV.tolist(), q_logits_SV.tolist(), strict=True):
        p_total, q_total = (math.fsum(math.exp(z) for z in row) for row in (p_row, q_row))
        values.append(
            math.fsum(
                math.exp(p) / p_total * (p - math.log(p_total) - q + math.log(q_total))
                for p, q in zip(p_row, q_row, strict=True)
            )
        )
    return values


def bit_hash(words: list[int]) -> int:
    """numerics/hashes.py on the elements' bits as signed whole numbers; signed."""
    total, size = 0, 1 << 64
    for place, word in enumerate(words, start=1):
        mixed = (word + place * 0x9E3779B97F4A7C15) % size
        for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
            mixed = (mixed ^ (mixed >> shift)) * factor % size
        total = (total + mixed) % size
    return total - size if total >= size // 2 else total


def preceding_minimum(values: list[float]) -> list[float]:
    """w_t = min of all earlier values, 1 at the first."""
    return [min(values[:place], default=1.0) for place in range(len(values))]


def kalman_mean(
    values: list[float], places: Iterable[int], process_noise: float, measurement_noise: float
) -> list[float]:
    """x_t = (1 - K_t) x_{t-1} + K_t z_t through every place up to the last, z = 0 between."""
    at = dict(zip(places, values, strict=True))
    mean = spread = 0.0
    means = {}
    for place in range(max(at, default=-1) + 1):
        gain = (spread + process_noise) / (spread + process_noise + measurement_noise)
        spread = measurement_noise * gain
        mean = (1 - gain) * mean + gain * at.get(place, 0.0)
        means[place] = mean
    return [means[place] for place in at]


def e4m3_blocks(weight_OI: Tensor, block: int = 128) -> Tensor:
    """For every number the nearest E4M3 multiple of its block's scale; in a tie the one with the
    even code. The scale is the least 2^k, k >= -100, that reaches the
    block's largest number.
    """
    codes = torch.tensor(
        [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)],
        dtype=torch.float64,
    )[:-1]  # the last is not a number
    found = torch.zeros_like(weight_OI, dtype=torch.float64)
    for top in range(0, weight_OI.shape[0], block):
        for left in range(0, weight_OI.shape[1], block):
            place = (slice(top, top + block), slice(left, left + block))
            value = weight_OI[place].double()
            power = -100
            while value.abs().max() > 448 * 2.0**power:
                power += 1
            size = value.abs() / 2.0**power
            above = torch.searchsorted(codes, size)  # the first code that is not below
            below = (above - 1).clamp(min=0)
            to_above, to_below = codes[above] - size, size - codes[below]
            down = (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0))
            nearest = torch.where(down, below, above)
            found[place] = value.sign() * codes[nearest] * 2.0**power
    return found
