"""What a step measures of itself: statistics of its tokens, and seconds per phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_stare.losses.aggregation import batch_mean
from megatron_stare.numerics.selection import Across
from megatron_stare.records import Signals, TokenBatch


def batch_metrics(batch: TokenBatch, signals: Signals, across: Across) -> dict[str, float]:
    """Entropy and surprisal [nats], aggregated like the loss; loss tokens; trainer against engine log-probs.

    logprob_diff is |ln pi_trainer - ln pi_engine| over tokens that the current weights sampled: mean and maximum.
    Carried-over tokens were sampled by older weights, so their difference is no fault and is not in it.
    """
    assert batch.surprisal_T is not None and batch.entropy_T is not None, "metrics need a scored batch"
    tokens = across.count(batch.advantage_T.numel())
    metrics = {
        "entropy": batch_mean(batch.entropy_T, signals.coefficient_T, across),
        "surprisal": batch_mean(batch.surprisal_T, signals.coefficient_T, across),
        "loss_tokens": float(tokens),
        "sequences": float(batch.num_sequences),
        "stale_token_fraction": across.count(~batch.fresh_T) / max(1, tokens),
    }
    difference_T = (batch.rollout_logprob_T + batch.surprisal_T).abs()[batch.fresh_T]
    if across.count(difference_T.numel()):
        metrics["logprob_diff_mean"] = across.mean(difference_T)
        metrics["logprob_diff_max"] = across.maximum(difference_T)
    return {"gate": 0.0} | metrics | signals.metrics


_COUNTS = ("loss_tokens", "sequences", "chosen_positive", "chosen_negative")


def mean_metrics(many: Sequence[dict[str, float]]) -> dict[str, float]:
    """One dict of several mini-batches' or updates': maxima stay maxima, counts add up, the rest is averaged."""
    values: dict[str, list[float]] = {}
    for metrics in many:
        for key, value in metrics.items():
            values.setdefault(key, []).append(value)
    return {
        key: max(found) if key.endswith("_max") else sum(found) / (1 if key in _COUNTS else len(found))
        for key, found in values.items()
    }


class Stopwatch:
    """Seconds of each named phase of one step, and of the step as a whole."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        """seconds_<phase> of every phase, and seconds_total since construction."""
        phases = {f"seconds_{phase}": value for phase, value in self._phases.items()}
        return phases | {"seconds_total": time.perf_counter() - self._start}
