"""The seconds of a run's steps by phase, and two short runs of the quickstart to measure."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_stare.compare.worlds.mirror_grid import make_world
from megatron_stare.config import Config, override
from megatron_stare.loop.cold_start import cold_start
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.recipes import find_recipe

PHASES = ("rollout", "score", "update", "sync", "evaluate", "other")


CONSOLE = Console(width=118)


def breakdown(runs: dict[str, Path]) -> list[dict[str, Any]]:
    """Table 2."""
    interval = find_recipe("quickstart").evaluation.eval_interval
    table = Table(title=f"ms per step; evaluate: one evaluation in {interval} steps")
    table.add_column("run")
    for name in ("steps", "rounds", *PHASES, "total"):
        table.add_column(name, justify="right")
    rows: list[dict[str, Any]] = []
    for name, path in runs.items():
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        lines = lines[1:] or lines  # the first step warms up
        mean = {
            p: statistics.fmean(line.get(f"seconds_{p}", 0.0) for line in lines) for p in PHASES[:4]
        }
        evaluated = [line["seconds_evaluate"] for line in lines if "seconds_evaluate" in line]
        busy = [line["seconds_total"] - line.get("seconds_evaluate", 0.0) for line in lines]
        mean["evaluate"] = statistics.fmean(evaluated) / interval if evaluated else 0.0
        mean["other"] = statistics.fmean(busy) - sum(mean[p] for p in PHASES[:4])
        total = sum(mean.values())
        rounds = statistics.fmean(line["generation_rounds"] for line in lines)
        rows.append(
            {
                "run": name,
                "steps": len(lines),
                "generation_rounds": rounds,
                "seconds": mean,
                "total": total,
            }
        )
        table.add_row(
            name,
            str(len(lines)),
            f"{rounds:.1f}",
            *(f"{mean[p] * 1e3:.1f}" for p in PHASES),
            f"{total * 1e3:.1f}",
        )
        table.add_row("", "", "", *(f"{mean[p] / total:.1%}" for p in PHASES), "")
    CONSOLE.print(table)
    return rows


def quickstart_runs(
    options: argparse.Namespace, topology: Topology, folder: Path, *overrides: str
) -> dict[str, Trainer]:
    """The recipe's two arms after a few steps: its model, data, batch sizes and evaluation sets;
    with these overrides.
    """
    make_world(folder / "world", 0)
    recipe, world = find_recipe("quickstart"), folder / "world"
    settings = [
        f"policy.hf_checkpoint={world / 'model'}",
        f"data.prompt_data={world / 'train.jsonl'}",
    ]
    settings += [
        f"evaluation.eval_data.{name}={world / name}.jsonl"
        for name in ("heldout_hard", "heldout_easy")
    ]
    settings += [
        f"cold_start.data={world / 'cold_start.jsonl'}",
        f"cold_start.steps={options.cold_start_steps}",
    ]
    settings += [f"train.num_rollout={options.steps}", f"evaluation.eval_interval={options.steps}"]
    config = override(recipe, [*settings, "run.save_interval=0", *overrides])
    cold_start(config, topology, Interrupt(), folder / "start")
    found: dict[str, Trainer] = {}
    for arm in recipe.compare.run:
        own = [f"policy.hf_checkpoint={folder / 'start'}", f"run.dir={folder / arm}"]
        run = override(config, [*recipe.compare.arms[arm], *own])
        trainer = found[f"quickstart, {arm}"] = Trainer(
            dataclasses.replace(run, compare=Config().compare), topology
        )
        trainer.run(Interrupt())
    return found
