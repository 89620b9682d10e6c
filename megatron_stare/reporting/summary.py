"""From the lines of metrics.jsonl to the numbers a run is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.config import UserError
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics

SUMMARY_NAME = "summary.json"  # of a comparison
ARM_LABELS = {"grpo_ds": "GRPO-ds", "grpo": "GRPO", "dapo": "DAPO", "stare": "STARE", "sft": "SFT"}
# What a table of runs shows: summary key, label (with {k} for the number of samples), format.
ROWS = (
    ("entropy_initial", "Entropy at the first step", ".3f"),
    ("entropy_final", "Entropy, last tenth of the steps", ".3f"),
    ("entropy_in_band_fraction", "Share of the last half in the target band", ".0%"),
    ("weight_last_half", "W, last half of the steps", ".2f"),
    ("gate_open_fraction", "Gate open, share of the last half", ".0%"),
    ("train_reward_final", "Training reward, last tenth", ".3f"),
    ("heldout_pass_at_k", "Held-out HARD, pass@{k}", ".3f"),
    ("heldout_avg_at_k", "Held-out HARD, avg@{k}", ".3f"),
    ("easy_avg_at_k", "Held-out EASY, avg@{k}", ".3f"),
    ("length_final", "Response length, last tenth", ".1f"),
    ("steps", "Optimizer steps", ".0f"),
    ("seconds", "Seconds", ".0f"),
    ("seconds_per_step", "Seconds per step", ".3f"),
)
# Entropy counts as held where it lies within this share of its target.
BAND = 0.25
HARD, EASY = "heldout_hard", "heldout_easy"


def summarize_run(run_directory: Path, target_entropy: float) -> dict[str, float | int | None]:
    """The numbers of one run, from its metrics.jsonl.

    entropy_final, train_reward_final and length_final are means over the last tenth of the steps
    (at least one); entropy_in_band_fraction is the share of the last half within 25% of the target;
    weight_last_half is the mean of STARE's W over that half, whose distance to loss.w_max is its
    reserve, and gate_open_fraction the share of it with the gate open (None without STARE); the
    held-out numbers are those of the last evaluation (None where there was none). Raises
    UserError where no step was logged.
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
        "entropy_initial": entropy[0],
        "entropy_final": _mean(last_tenth(entropy)),
        "entropy_in_band_fraction": _mean([low <= row["entropy"] <= high for row in half]),
        "weight_last_half": _mean([row["weight_w"] for row in gated]) if gated else None,
        "gate_open_fraction": _mean([row["gate"] for row in gated]) if gated else None,
        "train_reward_final": _mean(last_tenth(reward)) if reward else None,
        "length_final": _mean(last_tenth(length)) if length else None,
        "heldout_avg_at_k": _last(rows, f"eval/{HARD}/avg_at_k"),
        "heldout_pass_at_k": _last(rows, f"eval/{HARD}/pass_at_k"),
        "easy_avg_at_k": _last(rows, f"eval/{EASY}/avg_at_k"),
        "k": _last(rows, f"eval/{HARD}/k"),
        "steps": steps[-1]["step"],
        "seconds": seconds,
        "seconds_per_step": seconds / len(steps),
    }


def arm_label(arm: str) -> str:
    """What an arm of a comparison, or a loss, is called."""
    return ARM_LABELS.get(arm, arm.replace("_", " "))


def last_tenth(values: Sequence[float]) -> Sequence[float]:
    """The last tenth of a run's steps, rounded up: at least one."""
    return values[len(values) - -(-len(values) // 10) :]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _last(rows: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((row[key] for row in reversed(rows) if key in row), None)
