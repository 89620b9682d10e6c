"""What the quickstart's comparison claims, each claim checked against its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_stare.reporting.summary import BAND

IN_BAND_GOAL = 0.8
COLLAPSE_GOAL = 0.6
PASS_AT_K_GOAL = 0.5


class Finding(NamedTuple):
    """One claim, checked against the numbers."""

    text: str
    held: bool


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
