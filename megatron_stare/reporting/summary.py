"""The numbers that a run is judged by, their means over seeds with Student's t intervals, and the
claims of a comparison of STARE with GRPO-ds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from megatron_stare.config import Config, UserError
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.problem_scores import evaluation_sets

SUMMARY_NAME = "summary.json"  # of a comparison
ARM_LABELS = {"grpo_ds": "GRPO-ds", "grpo": "GRPO", "dapo": "DAPO", "stare": "STARE", "sft": "SFT"}
Row = tuple[str, str, str]  # of a table of runs: summary key, label, format
BEFORE_EVALUATION: tuple[Row, ...] = (
    ("entropy_initial", "Entropy at the first step", ".3f"),
    ("entropy_final", "Entropy, last tenth of the steps", ".3f"),
    ("entropy_in_band_fraction", "Share of the last half in the target band", ".0%"),
    ("weight_last_half", "W, last half of the steps", ".2f"),
    ("gate_open_fraction", "Gate open, share of the last half", ".0%"),
    ("train_reward_final", "Training reward, last tenth", ".3f"),
)
AFTER_EVALUATION: tuple[Row, ...] = (
    ("length_final", "Response length, last tenth", ".1f"),
    ("steps", "Steps", ".0f"),
    ("seconds", "Seconds", ".0f"),
    ("seconds_per_step", "Seconds per step", ".3f"),
)
# Entropy counts as held while it lies within this fraction of its target.
BAND = 0.25
# Goals of the comparison's claims.
IN_BAND_GOAL = 0.8
COLLAPSE_GOAL = 0.6
PASS_AT_K_GOAL = 0.5
HARD, EASY = "heldout_hard", "heldout_easy"
# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook,
# 1.3.6.7.2).
# fmt: off
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on


def target_of(config: Config, otherwise: float) -> float:
    """The entropy [nats] that STARE steers a run to; of a run without STARE, `otherwise`."""
    steered = "stare" in (config.loss.name, config.loss.reweight)
    return config.loss.target_entropy if steered else otherwise


def summarize_run(run_directory: Path, target_entropy: float) -> dict[str, float | int | None]:
    """The numbers of one run, from its metrics.jsonl.

    entropy_final, train_reward_final and length_final are means over the last tenth of the steps
    (at least one); entropy_in_band_fraction is the share of the last half within 25% of
    target_entropy; weight_last_half is the mean of STARE's W over that half, whose distance to
    loss.w_max is its reserve, and gate_open_fraction the share of it with the gate open (None
    without STARE).
    eval/<set>/pass_at_k, avg_at_k and k of each evaluation set are those of its last evaluation.
    Raises UserError where no step was logged.
    """
    path = Path(run_directory) / METRICS_NAME
    rows = read_metrics(path)
    steps = [row for row in rows if "entropy" in row]
    if not steps:
        raise UserError(f"{path}: no step with an entropy yet; let the run take a step first")
    entropy = [row["entropy"] for row in steps]
    reward = [row["reward"] for row in steps if "reward" in row]
    length = [row["response_length"] for row in steps if "response_length" in row]
    seconds = math.fsum(row.get("seconds_total", 0.0) for row in rows)
    low, high = target_entropy * (1 - BAND), target_entropy * (1 + BAND)
    half = steps[len(steps) // 2 :]
    gated = [row for row in half if "weight_w" in row]  # other objectives' rows have a gate of 0
    return {
        "target_entropy": target_entropy,
        "entropy_initial": entropy[0],
        "entropy_final": fmean(last_tenth(entropy)),
        "entropy_in_band_fraction": fmean([low <= row["entropy"] <= high for row in half]),
        "weight_last_half": fmean([row["weight_w"] for row in gated]) if gated else None,
        "gate_open_fraction": fmean([row["gate"] for row in gated]) if gated else None,
        "train_reward_final": fmean(last_tenth(reward)) if reward else None,
        "length_final": fmean(last_tenth(length)) if length else None,
        **_last_evaluation(rows),
        "steps": rows[-1]["step"],
        "seconds": seconds,
        "seconds_per_step": seconds / len(rows),
    }


def table_rows(summaries: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows of a table of these summaries, with two for each evaluation set that any has."""
    summaries = list(summaries)
    evaluated: list[Row] = []
    for name in sorted(evaluation_sets(chain.from_iterable(summaries)), reverse=True):
        draws = {each.get(f"eval/{name}/k") for each in summaries}
        k = f"{draws.pop():g}" if len(draws) == 1 and None not in draws else "k"
        evaluated += [
            (f"eval/{name}/{kind}_at_k", f"{evaluation_label(name)}, {kind}@{k}", ".3f")
            for kind in ("pass", "avg")
        ]
    return [*BEFORE_EVALUATION, *evaluated, *AFTER_EVALUATION]


def evaluation_label(name: str) -> str:
    """heldout_hard: Held-out HARD."""
    words = name.split("_")
    if words[0] == "heldout":
        return " ".join(["Held-out", *(word.upper() for word in words[1:])])
    return " ".join(words)


def arm_label(arm: str) -> str:
    """The display name of a comparison's arm or of a loss."""
    return ARM_LABELS.get(arm, arm.replace("_", " "))


def last_tenth(values: Sequence[float]) -> Sequence[float]:
    """The last tenth of a run's steps, rounded up: at least one."""
    return values[len(values) - -(-len(values) // 10) :]


def _last_evaluation(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    last = {key: row[key] for row in rows for key in row if key.startswith("eval/")}
    wanted = ("pass_at_k", "avg_at_k", "k")
    return {
        f"eval/{name}/{key}": last.get(f"eval/{name}/{key}")
        for name in evaluation_sets(last)
        for key in wanted
    }


class Interval(NamedTuple):
    """A mean over seeds and the half width of its 95% interval (None for one seed)."""

    mean: float
    half_width: float | None


def mean_and_interval(values: Sequence[float]) -> Interval:
    """The mean over seeds and t(n-1, 0.975) * s / sqrt(n), s the sample standard deviation.

    Above n = 31 the quantile is the normal limit 1.960. Seeds are treated as normal draws, so with
    three of them the interval is wide and only approximate.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    count = len(values)
    if count == 1:
        return Interval(float(values[0]), None)
    quantile = T_975[count - 2] if count - 2 < len(T_975) else 1.960
    return Interval(fmean(values), quantile * stdev(values) / math.sqrt(count))


def combine_seeds(
    seeds: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Interval | None]]:
    """{seed: {arm: {key: number}}} -> {arm: {key: Interval}}; None if a seed lacks the key."""
    arms = {arm: None for runs in seeds.values() for arm in runs}
    combined: dict[str, dict[str, Interval | None]] = {}
    for arm in arms:
        runs = [runs[arm] for runs in seeds.values() if arm in runs]
        keys = {key: None for run in runs for key in run}
        combined[arm] = {}
        for key in keys:
            numbers = [float(run[key]) for run in runs if run.get(key) is not None]
            combined[arm][key] = mean_and_interval(numbers) if len(numbers) == len(runs) else None
    return combined


def mean_runs(
    seeds: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, float | None]]:
    """`combine_seeds` without half widths: `runs` of summary.json for several seeds."""
    return {
        arm: {key: None if interval is None else interval.mean for key, interval in values.items()}
        for arm, values in combine_seeds(seeds).items()
    }


class Claim(NamedTuple):
    """One claim, checked against the numbers."""

    text: str
    held: bool


def check_comparison(summary: Mapping[str, Any]) -> list[Claim]:
    """The claims of a comparison of `stare` with `grpo_ds`; a claim must hold in every seed."""
    seeds = summary.get("seeds") or {str(summary.get("seed", 0)): summary.get("runs", {})}
    pairs = [
        (seed, runs["grpo_ds"], runs["stare"])
        for seed, runs in seeds.items()
        if {"grpo_ds", "stare"} <= {*runs}
    ]
    if not pairs:
        return []
    target = pairs[0][2]["target_entropy"]
    claims = [
        _claim(
            f"STARE's entropy stays within {BAND:.0%} of the target for at least "
            f"{IN_BAND_GOAL:.0%} of the last half",
            [(seed, stare.get("entropy_in_band_fraction")) for seed, _, stare in pairs],
            lambda value: value >= IN_BAND_GOAL,
        ),
        _claim(
            f"GRPO-ds ends below {COLLAPSE_GOAL:.0%} of the target entropy "
            f"({COLLAPSE_GOAL * target:.3g} nats)",
            [(seed, grpo.get("entropy_final")) for seed, grpo, _ in pairs],
            lambda value: value < COLLAPSE_GOAL * target,
        ),
        _claim(
            f"STARE's pass@k on held-out HARD problems is at least {PASS_AT_K_GOAL:g} higher",
            [(seed, _gain(grpo, stare, f"eval/{HARD}/pass_at_k")) for seed, grpo, stare in pairs],
            lambda value: value >= PASS_AT_K_GOAL,
        ),
        _claim(
            "STARE's avg@k on held-out EASY problems is no lower",
            [(seed, _gain(grpo, stare, f"eval/{EASY}/avg_at_k")) for seed, grpo, stare in pairs],
            lambda value: value >= 0,
            signed=True,
        ),
    ]
    return [claim for claim in claims if claim is not None]


def _claim(
    text: str, values: list[tuple[str, float | None]], holds: Any, signed: bool = False
) -> Claim | None:
    measured = [(seed, value) for seed, value in values if value is not None]
    if not measured:
        return None
    spec = "+.3f" if signed else ".3f"
    numbers = ", ".join(f"{value:{spec}} (seed {seed})" for seed, value in measured)
    return Claim(f"{text}: {numbers}", all(holds(value) for _, value in measured))


def _gain(grpo: Mapping[str, Any], stare: Mapping[str, Any], key: str) -> float | None:
    one, other = grpo.get(key), stare.get(key)
    return None if one is None or other is None else other - one
