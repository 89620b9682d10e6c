"""Metrics of a step: statistics of its tokens, the change of entropy that its update is about to
bring, seconds per phase, use of the GPUs.

The change of entropy is predicted to first order, token by token. A step of size eta on the batch
loss L moves a token's logits by -eta dL/ds (p - e_a), s its surprisal, and so its entropy by
eta (dL/ds) g with g = p (s - H) - c (arXiv 2606.19236, there of L = -A r). dL/ds is taken from the
loss itself, with coefficients, weights, clipping and corrections. What tokens share, the model's
weights, is left out, and so is what Adam makes of the gradient: sign and shape are predicted, the
scale is not.

Shape legend: T loss tokens of one rank's batch.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_stare.losses.kl import divergence
from megatron_stare.losses.planning import batch_mean
from megatron_stare.losses.rollout_correction import k3
from megatron_stare.numerics.selection import Across
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.huggingface.shape import Shape, forward_operations
from megatron_stare.policy.layout import response_position
from megatron_stare.policy.topology import Topology
from megatron_stare.records import (
    BoundLoss,
    Group,
    RoutingShape,
    Signals,
    TokenBatch,
    trained_sequences,
)
from megatron_stare.reporting import heartbeat


def batch_metrics(batch: TokenBatch, signals: Signals, across: Across) -> dict[str, float]:
    """Entropy and surprisal [nats] over all loss tokens, whatever the loss makes of them, so that
    objectives can be compared; entropy averaged as the loss is, which is what a gate sees; loss
    tokens; trainer against engine log-probs.

    logprob_diff is |ln pi_trainer - ln pi_engine| over tokens that the current weights sampled:
    mean, maximum, mean clamped k3, and mean from each position of the response on. Other tokens
    were sampled by older weights, so that their difference is not a fault; rollout_diff is over all
    tokens, and so is rollout_effective_fraction, (sum r)^2 / (n sum r^2) with r = pi_trainer /
    pi_engine: the effective sample size of importance weights. Those sampled at another temperature
    are in none of them.
    """
    assert batch.surprisal_T is not None and batch.entropy_T is not None, (
        "metrics need a scored batch"
    )
    tokens = across.count(batch.advantage_T.numel())
    metrics = {"loss_tokens": float(tokens), "sequences": float(batch.num_sequences)}
    if not tokens:  # no mean exists
        return {"gate": 0.0} | metrics | signals.metrics
    metrics |= {
        "entropy": across.mean(batch.entropy_T),
        "entropy_of_loss": batch_mean(batch.entropy_T, signals.coefficient_T, across),
        "surprisal": across.mean(batch.surprisal_T),
        "stale_token_fraction": across.count(~batch.fresh_T) / tokens,
    }
    if batch.reference_surprisal_T is not None:
        metrics["reference_kl"] = across.mean(batch.reference_surprisal_T - batch.surprisal_T)
    if batch.top_logprob_TK is not None and batch.teacher_top_TK is not None:
        exact_T = divergence(batch.top_logprob_TK.double(), batch.teacher_top_TK.double())
        metrics["teacher_kl"] = across.mean(exact_T)
    metrics |= exactness_metrics(batch, across) | _engine_metrics(batch, across)
    return {"gate": 0.0} | metrics | signals.metrics


def exactness_metrics(batch: TokenBatch, across: Across) -> dict[str, float]:
    """Whether the engine samples from the policy: z = sum (s - H) / sqrt(sum Var s), over tokens
    that the current weights sampled at the policy's temperature, and the mean of s - H [nats].

    Under exact sampling the expectation of s given the tokens before it is H, so that sum (s - H)
    is a martingale with the conditional variances Var s, and z is N(0, 1) for many tokens. Also of
    each server's own rollouts, if there are several servers (docs/exactness.md).
    """
    assert batch.surprisal_T is not None and batch.entropy_T is not None, "a scored batch"
    if batch.variance_T is None:
        return {}
    own_T = batch.sampled_T
    gap_T = (batch.surprisal_T.double() - batch.entropy_T.double())[own_T]
    variance_T = batch.variance_T.double()[own_T]
    # Server -1, the unknown one, has the first place.
    servers, server_T = 1, torch.zeros_like(batch.sequence_T[own_T])
    if batch.server_Q is not None and len(batch.server_Q):
        servers = int(batch.server_Q.max()) + 2
        server_T = batch.server_Q.to(server_T.device)[batch.sequence_T[own_T]] + 1
    sums = [across.sums(value_T, server_T, servers).tolist() for value_T in (gap_T, variance_T)]
    counts = across.sums(torch.ones_like(gap_T), server_T, servers).tolist()
    found = _exactness("", math.fsum(sums[0]), math.fsum(sums[1]), sum(counts))
    rows = list(zip(*sums, counts, strict=True))
    if sum(count > 0 for count in counts) > 1:
        for number, row in enumerate(rows[1:]):
            found |= _exactness(f"_server_{number}", *row)
    return found


def _exactness(name: str, gap: float, variance: float, count: float) -> dict[str, float]:
    """The z statistic and its mean; empty where no token could have been another one."""
    if variance <= 0:
        return {}
    return {
        f"exactness_z{name}": gap / math.sqrt(variance),
        f"exactness_gap{name}": gap / count,
    }


def _engine_metrics(batch: TokenBatch, across: Across) -> dict[str, float]:
    """Trainer against engine log-probs, of the tokens where they are of one temperature."""
    assert batch.surprisal_T is not None, "a scored batch"
    own_T = batch.comparable_T
    difference_T = torch.clamp(-batch.surprisal_T - batch.rollout_logprob_T, -20.0, 20.0)[own_T]
    metrics = _difference_metrics("rollout_diff", difference_T, across)
    if tokens := across.count(own_T):
        ratio_T = torch.exp(difference_T.double())
        squares = across.sum(ratio_T.square())
        metrics["rollout_effective_fraction"] = across.sum(ratio_T) ** 2 / (tokens * squares)
    fresh_T = batch.fresh_T[own_T]
    metrics |= _difference_metrics("logprob_diff", difference_T[fresh_T], across)
    position_T = response_position(batch.token_index_T[own_T][fresh_T])
    return metrics | _by_position(difference_T[fresh_T].abs(), position_T, across)


def _difference_metrics(name: str, difference_T: Tensor, across: Across) -> dict[str, float]:
    if not across.count(difference_T.numel()):
        return {}
    return {
        f"{name}_mean": across.mean(difference_T.abs()),
        f"{name}_max": across.maximum(difference_T.abs()),
        f"{name}_k3": across.mean(k3(difference_T)),
    }


def _by_position(size_T: Tensor, position_T: Tensor, across: Across) -> dict[str, float]:
    """Mean per stretch of the response; a stretch is named by its first position."""
    found = {}
    for first, last in itertools.pairwise(POSITIONS):
        part_T = size_T[(position_T >= first) & (position_T < last)]
        if across.count(part_T.numel()):
            found[f"logprob_diff_from_{first}"] = across.mean(part_T)
    return found


def missing_routing(groups: Sequence[Group], shape: RoutingShape) -> dict[str, float]:
    """routing_missing: the share of positions that are trained and whose experts no rollout has,
    so that the trainer's routers choose them. The same on every rank.
    """
    known, positions = 0, 0
    for _, group, rollout, *_ in trained_sequences(groups):
        length = group.prompt_length + rollout.length - 1
        known += min(length, shape.positions(rollout.routing_bytes))
        positions += length
    return {"routing_missing": 1 - known / max(1, positions)}


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


# Where the stretches of a response begin, over which log-prob differences are averaged.
POSITIONS = (0, 256, 1024, 4096, 16384, 1 << 40)
_COUNTS = (
    *("loss_tokens", "sequences", "chosen_positive", "chosen_negative"),
    "mismatch_alarm_masked",
)
# Means over all loss tokens.
_OF_TOKENS = ("entropy", "surprisal", "reference_kl", "teacher_kl", "stale_token_fraction")


def mean_metrics(many: Sequence[dict[str, float]]) -> dict[str, float]:
    """One dict of several mini-batches' or updates': maxima stay maxima, counts add up, N(0, 1)
    variables are added and stay N(0, 1), the learning rate is the last one, means over all loss
    tokens stay such means, the rest is averaged.
    """
    if len(many) == 1:
        return dict(many[0])
    values: dict[str, list[float]] = {}
    tokens: dict[str, list[float]] = {}
    for metrics in many:
        for key, value in metrics.items():
            values.setdefault(key, []).append(value)
            tokens.setdefault(key, []).append(metrics.get("loss_tokens", 0.0))
    return {key: _joined(key, found, tokens[key]) for key, found in values.items()}


def _joined(key: str, values: Sequence[float], tokens: Sequence[float]) -> float:
    if key == "lr":
        return values[-1]
    if key.endswith("_max"):
        return max(values)
    if key in _COUNTS:
        return sum(values)
    if key in _OF_TOKENS:
        return math.sumprod(values, tokens) / sum(tokens)
    return sum(values) / (math.sqrt(len(values)) if key.startswith("exactness_z") else len(values))


# bf16 operations per second without sparsity, from NVIDIA's data sheets, by part of a GPU's name;
# the first part that fits.
PEAK_OPERATIONS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "GB200": 2500e12,
    "B200": 2250e12,
}


class Passes(NamedTuple):
    """How often a step read each of its tokens: to score it, and to update on it."""

    scores: float = 0.0
    updates: float = 0.0
    frozen: bool = False  # the weights are: adapters learn


def gpu_metrics(
    topology: Topology,
    shape: Shape,
    groups: Sequence[Group],
    seconds: Mapping[str, float],
    passes: Passes,
) -> dict[str, float]:
    """Use of the GPUs in a step; empty on a CPU. Collective; `groups` are those of all ranks.

    gpu_memory_peak    [GiB] of torch's allocator since the last step, on the rank with the most
    tokens_per_second  trained tokens, prompts included, per second of the step and trainer GPU
    mfu                F (3 u + s) / (t G P): F operations of one forward pass (shape.py), 3 for
                       every update and 1 for every score of a token, of products with frozen
                       weights 2 and 1; t seconds of both phases, G trainer GPUs, P their peak in
                       bf16; without recomputation (arXiv 2204.02311, B) and a reference model's
                       passes. Absent for a GPU whose peak is not listed.
    """
    if not torch.cuda.is_available():
        return {}
    found = {"gpu_memory_peak": max(topology.gather(torch.cuda.max_memory_allocated())) / 2**30}
    torch.cuda.reset_peak_memory_stats()
    lengths = [
        (group.prompt_length + rollout.length - rollout.loss_tokens, rollout.loss_tokens)
        for _, group, rollout, *_ in trained_sequences(groups)
    ]
    busy = sum(seconds.get(f"seconds_{phase}", 0.0) for phase in ("score", "update"))
    if not lengths or not passes.updates or not busy:
        return found
    gpus, tokens = topology.world_size, sum(map(sum, lengths))
    found["tokens_per_second"] = tokens / seconds["seconds_total"] / gpus
    name = torch.cuda.get_device_name()
    if peak := next((rate for part, rate in PEAK_OPERATIONS.items() if part in name), 0.0):
        products, others = forward_operations(shape, lengths)
        done = (products + others) * (3 * passes.updates + passes.scores)
        done -= products * passes.updates * passes.frozen
        found["mfu"] = done / (busy * gpus * peak)
    return found


class Stopwatch:
    """Seconds of each named phase of one step, and of the step as a whole."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        with heartbeat.phase(phase):
            yield
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        """seconds_<phase> of every phase, and seconds_total since construction."""
        return self._named() | {"seconds_total": time.perf_counter() - self._start}

    def added_to(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics with the phases, whose seconds the step's total gains."""
        total = metrics.get("seconds_total", 0.0) + sum(self._phases.values())
        return metrics | self._named() | {"seconds_total": total}

    def _named(self) -> dict[str, float]:
        return {f"seconds_{phase}": value for phase, value in self._phases.items()}
