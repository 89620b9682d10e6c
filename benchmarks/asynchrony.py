"""Seconds per step on-policy, one step off and fully asynchronous:
the same run, one mode after another.

The quickstart's task from its cold start. Each mode is an ordinary `train` of the command line, on
a server of its own (--engine sglang) or in the trainer's process. Seconds are medians over the
steps behind the first ten; evaluation is at the end and not in them. What a mode costs in learning
stands next to them: reward and entropy over the last quarter, and the held-out problems.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_stare.config import CompareConfig, dump, override
from megatron_stare.recipes import find_recipe
from megatron_stare.reporting.logbook import read_metrics

ONE_OFF = ["rollout.asynchrony=one_step_off", "rollout.max_staleness=1"]
MODES: dict[str, list[str]] = {
    "on_policy": [],
    "one_step_off": ONE_OFF,  # the ratio starts at the engine's log-probs
    "one_step_off, ratio from 1": [*ONE_OFF, "mismatch.old_policy=trainer"],
    "one_step_off + token_tis": [*ONE_OFF, "mismatch.correction=token_tis"],
    "fully_async": ["rollout.asynchrony=fully_async", "rollout.max_staleness=1"],
}
WARM_UP = 10
PHASES = ("rollout", "wait", "score", "update", "sync")


def main() -> None:
    """Run every mode and seed, print the table, leave the figures in --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("runs/asynchrony"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--modes", nargs="*", choices=list(MODES), default=list(MODES))
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for every mode"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in options.modes}
    for seed in range(options.seeds):
        start = cold_start(options.directory, seed)
        for mode in options.modes:
            found[mode].append(measured(run_mode(mode, seed, start, options)))
    table(found)
    if options.json:
        options.json.write_text(
            json.dumps({"steps": options.steps, "engine": options.engine, "modes": found}, indent=2)
        )


def cold_start(directory: Path, seed: int) -> Path:
    """The quickstart's world and supervised checkpoint for a seed,
    made by one step of its own command.
    """
    base = directory / f"start{seed}"
    if not (base / f"seed{seed}/cold_start/config.json").is_file():
        settings = [
            f"run.dir={base}",
            "compare.run=[stare]",
            "train.num_rollout=1",
            "evaluation.eval_interval=0",
        ]
        command("train", "quickstart", *settings, f"compare.seeds=[{seed}]")
    return base / f"seed{seed}"


def run_mode(
    mode: str, seed: int, start: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The metrics rows of one run; a finished one is read, not run again."""
    directory = options.directory / options.engine / f"seed{seed}" / file_name(mode)
    recipe = find_recipe("quickstart")
    settings = [
        *recipe.compare.arms["stare"],
        "cold_start.steps=0",
        f"policy.hf_checkpoint={start / 'cold_start'}",
        f"data.prompt_data={start / 'world/train.jsonl'}",
        f"evaluation.eval_data.hard={start / 'world/heldout_hard.jsonl'}",
        f"evaluation.eval_interval={options.steps}",
        f"run.dir={directory}",
        f"run.seed={seed}",
        f"rollout.engine={options.engine}",
        f"train.num_rollout={options.steps}",
        *MODES[mode],
        *options.set,
    ]
    file = options.directory / f"{options.engine}-{seed}-{file_name(mode)}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    dump(override(dataclasses.replace(recipe, compare=CompareConfig()), settings), file)
    command("train", str(file))
    return read_metrics(directory / "metrics.jsonl")


def file_name(mode: str) -> str:
    """The mode without what a path should not have."""
    return "".join(letter for letter in mode if letter not in " ,")


def command(*arguments: str) -> None:
    """One command of the command line, its output passed on."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run(
        [sys.executable, "-m", "megatron_stare", *arguments], env=environment, check=True
    )


def measured(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of the seconds after the warm-up, if the run continues after it; means of the last
    quarter.
    """
    steady, late = rows[WARM_UP:] or rows[-1:], rows[-max(1, len(rows) // 4) :]
    without_evaluation = [row["seconds_total"] - row.get("seconds_evaluate", 0.0) for row in steady]
    phases = {
        phase: statistics.median(row.get(f"seconds_{phase}", 0.0) for row in steady)
        for phase in PHASES
    }
    return {
        "seconds": statistics.median(without_evaluation),
        **phases,
        "reward": statistics.fmean(row["reward"] for row in late),
        "entropy": statistics.fmean(row["entropy"] for row in late),
        "hard_avg": rows[-1]["eval/hard/avg_at_k"],
        "staleness": statistics.fmean(
            row.get("staleness_mean", row["stale_token_fraction"]) for row in steady
        ),
    }


def table(found: dict[str, list[dict[str, float]]]) -> None:
    """One line per mode, means over seeds; the ratio is to on_policy where it ran."""
    first = next(iter(found))
    base = statistics.fmean(run["seconds"] for run in found[first])
    print(
        f"| mode | s per step | of {first} | {' | '.join(PHASES)} | staleness | reward | entropy | "
        "held-out hard |"
    )
    print("|---|" + "---:|" * (len(PHASES) + 6))
    for mode, runs in found.items():
        mean = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        phases = " | ".join(f"{mean[phase]:.2f}" for phase in PHASES)
        rewards = " / ".join(f"{run['reward']:.3f}" for run in runs)
        hard = " / ".join(f"{run['hard_avg']:.3f}" for run in runs)
        print(
            f"| {mode} | {mean['seconds']:.2f} | {mean['seconds'] / base:.2f} | {phases} | "
            f"{mean['staleness']:.2f} | {rewards} | {mean['entropy']:.3f} | {hard} |"
        )


if __name__ == "__main__":
    main()
