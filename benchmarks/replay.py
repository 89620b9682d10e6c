"""Recorded steps, drawn at random over runs of every kind, taken again: which of them have the same
bits.

The quickstart's task from its cold start, each run an ordinary `train` of the command line:
on-policy; fully asynchronous; one step off and killed twice (SIGKILL between two checkpoints, at a
step and a moment drawn at random; the same command continues); where --runs names it, fully
asynchronous on an SGLang server.
Steps are replayed in this process, so in another one than they were trained in. Exit code 1: one of
them differs.

    python benchmarks/replay.py --steps 30 --draws 20
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.asynchrony import cold_start
from megatron_stare.config import CompareConfig, Config, dump, override
from megatron_stare.debug.replay import Replay
from megatron_stare.loop.run_directory import read_head, recorded_steps, records_directory
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from megatron_stare.recipes import find_recipe
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics

ASYNC = ("rollout.asynchrony=fully_async", "rollout.max_staleness=2")
RUNS: dict[str, tuple[str, ...]] = {
    "on-policy": (),
    "fully async": ASYNC,
    "killed twice": ("rollout.asynchrony=one_step_off", "rollout.max_staleness=1"),
    "SGLang": ("rollout.engine=sglang", *ASYNC),
}
SAVES = 3  # checkpoints of a run
PATIENCE_S = 600.0


def main() -> None:
    """Train the runs, replay the steps, print the table."""
    options = arguments()
    if options.steps < 3 * SAVES:
        sys.exit(f"--steps {options.steps} leaves no room between {SAVES} checkpoints")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}")
    chance = random.Random(seed)
    place = options.directory / str(seed)
    runs = {name: trained(name, place, options, chance) for name in options.runs}
    steps = [(name, step) for name in runs for step in range(1, options.steps + 1)]
    drawn = sorted(chance.sample(steps, options.draws), key=steps.index)
    with topologies.session(Config().policy) as topology:
        rows = [replayed(name, runs[name], step, topology) for name, step in drawn]
    Console(width=110).print(shown(rows))
    identical = sum(row["identical"] for row in rows)
    print(f"{identical} of {len(rows)} steps identical, seed {seed}")
    if options.json:
        options.json.write_text(json.dumps({"seed": seed, "rows": rows}, indent=2))
    sys.exit(identical < len(rows))


def arguments() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("runs/replay"))
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--draws", type=int, default=20, help="steps to replay")
    parser.add_argument("--seed", type=int, help="of steps and kills; left out: another each time")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS)[:3])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def trained(name: str, place: Path, options: argparse.Namespace, chance: random.Random) -> Path:
    """The directory of one run, trained to its end."""
    start, directory = cold_start(options.directory, 0), place / name.replace(" ", "_")
    recipe, interval = find_recipe("quickstart"), options.steps // SAVES
    settings = [
        *recipe.compare.arms["stare"],
        "cold_start.steps=0",
        f"policy.hf_checkpoint={start / 'cold_start'}",
        f"data.prompt_data={start / 'world/train.jsonl'}",
        "evaluation.eval_interval=0",
        f"run.dir={directory}",
        f"run.save_interval={interval}",
        f"run.keep_every={interval}",
        "run.record=all",
        f"train.num_rollout={options.steps}",
        *RUNS[name],
        *options.set,
    ]
    file = directory.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    dump(override(dataclasses.replace(recipe, compare=CompareConfig()), settings), file)
    if name == "killed twice":
        for save in (1, 2):
            killed(file, directory, save * interval + chance.randint(1, interval - 1), chance)
    if process(file).wait() != 0:
        sys.exit(f"the run {name!r} failed: {file.with_suffix('.log')}")
    return directory


def process(file: Path) -> subprocess.Popen[bytes]:
    """`train` on a config; what it prints goes next to it."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with file.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_stare", "train", str(file)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def killed(file: Path, directory: Path, step: int, chance: random.Random) -> None:
    """Start the run, or continue it, and kill it at a random moment after `step`."""
    child, deadline = process(file), time.monotonic() + PATIENCE_S
    metrics = directory / METRICS_NAME
    while not (rows := read_metrics(metrics) if metrics.is_file() else []) or len(rows) < step:
        if child.poll() is not None or time.monotonic() > deadline:
            child.kill()
            sys.exit(f"step {step} was not reached: {file.with_suffix('.log')}")
        time.sleep(0.02)
    time.sleep(chance.random() * rows[-1]["seconds_total"])
    child.kill()
    if child.wait() >= 0:
        sys.exit(f"the run ended before it was killed at step {step}; take more --steps")
    print(f"killed at step {step}", flush=True)


def replayed(name: str, run: Path, step: int, topology: Topology) -> dict[str, Any]:
    """One step as the table has it."""
    records = records_directory(run)
    attempts = [read_head(records, each).attempt for each in recorded_steps(records)]
    again = Replay(run, step, topology)
    every = list(again.steps())
    last = every[-1]
    return {
        "run": name,
        "step": step,
        "attempt": list(dict.fromkeys(attempts)).index(attempts[step - 1]) + 1,
        "from": again.start,
        "recorded": last.weights[0],
        "replayed": last.weights[1],
        "loss": last.replayed.get("loss"),
        "figures": len(last.replayed),
        "differing": [f"{each.step}: {key}" for each in every for key in each.differing],
        "identical": all(each.identical for each in every),
    }


def shown(rows: list[dict[str, Any]]) -> Table:
    """One row a step."""
    table = Table(title="steps taken again")
    names = ("run", "attempt", "step", "from checkpoint", "weights", "replayed", "loss")
    for name in (*names, "figures", "equal"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for row in rows:
        short = (row["recorded"][:12], row["replayed"][:12])
        equal = "yes" if row["identical"] else f"no: {', '.join(row['differing'][:3])}"
        counted = (str(row[name]) for name in ("attempt", "step", "from"))
        loss = "no signal" if row["loss"] is None else f"{row['loss']:.7g}"
        table.add_row(row["run"], *counted, *short, loss, str(row["figures"]), equal)
    return table


if __name__ == "__main__":
    main()
