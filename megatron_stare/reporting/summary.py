"""From the lines of metrics.jsonl to the numbers a run is judged by,
and from seeds to intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.config import UserError
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics

BAND = 0.25
IN_BAND_GOAL = 0.8
COLLAPSE_GOAL = 0.6
PASS_AT_K_GOAL = 0.5
HARD, EASY = "heldout_hard", "heldout_easy"

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook,
# 1.3.6.7.2). fmt: off
T_975 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
# fmt: on


class Interval(NamedTuple):
    """A mean over seeds and the half width of its 95% interval (None for one seed)."""

    mean: float
    half_width: float | None


class Finding(NamedTuple):
    """One claim, checked against the numbers."""

    text: str
    held: bool


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the chance that k of n samples drawn
    without replacement hold a right one.

    Unbiased for pass@k when the n samples are independent (Chen et al. 2021, arXiv:2107.03374,
    section 2.1).
    """
    _check_counts(samples, correct)
    if not 1 <= k <= samples:
        raise ValueError(
            f"pass@k: k={k} must lie in [1, {samples}], the number of samples per problem"
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def avg_at_k(samples: int, correct: int) -> float:
    """c / n: the accuracy of one problem over its n samples."""
    _check_counts(samples, correct)
    return correct / samples


def _check_counts(samples: int, correct: int) -> None:
    if samples < 1 or not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples is impossible")


def mean_and_interval(values: Sequence[float]) -> Interval:
    """The mean over seeds and t(n-1, 0.975) * s / sqrt(n),
    s the sample deviation (normal limit 1.960 beyond n=31).

    This treats seeds as normal draws; with three of them the interval is wide and only that honest.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = T_975[count - 2] if count - 2 < len(T_975) else 1.960
    return Interval(mean, quantile * deviation / math.sqrt(count))


def summarize_run(run_directory: Path, target_entropy: float) -> dict[str, float | int | None]:
    """The numbers of one run, from its metrics.jsonl.

    entropy_final and train_reward_final are means over the last tenth of the steps (at least one);
    entropy_in_band_fraction is the share of the last half within 25% of the target; the held-out
    numbers are those of the last evaluation (None where there was none). Raises UserError where no
    step was logged.
    """
    path = Path(run_directory) / METRICS_NAME
    rows = read_metrics(path)
    steps = [row for row in rows if "entropy" in row]
    if not steps:
        raise UserError(f"{path}: no step with an entropy yet; let the run take a step first")
    entropy = [row["entropy"] for row in steps]
    reward = [row["reward"] for row in steps if "reward" in row]
    low, high = target_entropy * (1 - BAND), target_entropy * (1 + BAND)
    last_half = entropy[len(entropy) // 2 :]
    return {
        "entropy_initial": entropy[0],
        "entropy_final": _mean(last_tenth(entropy)),
        "entropy_in_band_fraction": _mean([low <= value <= high for value in last_half]),
        "train_reward_final": _mean(last_tenth(reward)) if reward else None,
        "heldout_avg_at_k": _last(rows, f"eval/{HARD}/avg_at_k"),
        "heldout_pass_at_k": _last(rows, f"eval/{HARD}/pass_at_k"),
        "easy_avg_at_k": _last(rows, f"eval/{EASY}/avg_at_k"),
        "k": _last(rows, f"eval/{HARD}/k"),
        "steps": steps[-1]["step"],
        "seconds": math.fsum(row.get("seconds_total", 0.0) for row in rows),
    }


def last_tenth(values: Sequence[float]) -> Sequence[float]:
    """The last tenth of a run's steps, rounded up: at least one."""
    return values[len(values) - -(-len(values) // 10) :]


def combine_seeds(
    seeds: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Interval | None]]:
    """{seed: {arm: {key: number}}} -> {arm: {key: Interval}};
    None where some seed has no number for the key.
    """
    arms = {arm: None for runs in seeds.values() for arm in runs}
    combined: dict[str, dict[str, Interval | None]] = {}
    for arm in arms:
        runs = [runs[arm] for runs in seeds.values() if arm in runs]
        keys = {key: None for run in runs for key in run}
        combined[arm] = {}
        for key in keys:
            known = [float(run[key]) for run in runs if run.get(key) is not None]
            combined[arm][key] = mean_and_interval(known) if len(known) == len(runs) else None
    return combined


def mean_runs(
    seeds: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, float | None]]:
    """`combine_seeds` without the half widths:
    what summary.json's `runs` holds when there are several seeds.
    """
    return {
        arm: {key: None if interval is None else interval.mean for key, interval in values.items()}
        for arm, values in combine_seeds(seeds).items()
    }


def check_comparison(summary: Mapping[str, Any]) -> list[Finding]:
    """What the comparison of `stare` with `grpo_ds` claims, each claim checked in every seed;
    held or not.
    """
    seeds = summary.get("seeds") or {str(summary.get("seed", 0)): summary.get("runs", {})}
    target = summary["target_entropy"]
    pairs = [
        (seed, runs["grpo_ds"], runs["stare"])
        for seed, runs in seeds.items()
        if {"grpo_ds", "stare"} <= {*runs}
    ]
    if not pairs:
        return []
    findings = [
        _finding(
            f"STARE's entropy stays within {BAND:.0%} of the target for at least "
            f"{IN_BAND_GOAL:.0%} of the last half",
            [(seed, stare.get("entropy_in_band_fraction")) for seed, _, stare in pairs],
            lambda value: value >= IN_BAND_GOAL,
        ),
        _finding(
            f"GRPO-ds ends below {COLLAPSE_GOAL:.0%} of the target entropy "
            f"({COLLAPSE_GOAL * target:.3g} nats)",
            [(seed, grpo.get("entropy_final")) for seed, grpo, _ in pairs],
            lambda value: value < COLLAPSE_GOAL * target,
        ),
        _finding(
            f"STARE's pass@k on held-out HARD problems is at least {PASS_AT_K_GOAL:g} higher",
            [(seed, _gain(grpo, stare, "heldout_pass_at_k")) for seed, grpo, stare in pairs],
            lambda value: value >= PASS_AT_K_GOAL,
        ),
        _finding(
            "STARE's avg@k on held-out EASY problems is no lower",
            [(seed, _gain(grpo, stare, "easy_avg_at_k")) for seed, grpo, stare in pairs],
            lambda value: value >= 0,
            signed=True,
        ),
    ]
    return [finding for finding in findings if finding is not None]


def _finding(
    claim: str, values: list[tuple[str, float | None]], holds: Any, signed: bool = False
) -> Finding | None:
    known = [(seed, value) for seed, value in values if value is not None]
    if not known:
        return None
    spec = "+.3f" if signed else ".3f"
    measured = ", ".join(f"{value:{spec}} (seed {seed})" for seed, value in known)
    return Finding(f"{claim}: {measured}", all(holds(value) for _, value in known))


def _gain(grpo: Mapping[str, Any], stare: Mapping[str, Any], key: str) -> float | None:
    one, other = grpo.get(key), stare.get(key)
    return None if one is None or other is None else other - one


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _last(rows: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((row[key] for row in reversed(rows) if key in row), None)
