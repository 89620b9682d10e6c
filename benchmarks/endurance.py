"""Fully asynchronous runs of a tiny model, killed at random, or long.

`kills`: each run gets SIGKILLs at random moments (while it starts, samples, trains or saves) and
is resumed by the same command. When it has ended, every step is replayed in this process. Exit
code 1: a step differs, or a run does not end.

`steps`: one run; its memory, descriptors and threads, and those of its processes, ten times.

    python benchmarks/endurance.py kills --runs 4 --kills 5
    python benchmarks/endurance.py steps --steps 10000
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.replay import process, replayed
from megatron_stare.config import Config, dump
from megatron_stare.policy import topology as topologies
from megatron_stare.reporting.logbook import METRICS_NAME, Tail
from tests.small_run import small_config

STEPS, SAVES = 24, 4  # of a run that is killed
START_SECONDS = 30.0  # a kill comes at most this long after the start, where no step is done


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "steps"))
    parser.add_argument("--directory", type=Path, default=Path("runs/endurance"))
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5, help="of each run")
    parser.add_argument("--steps", type=int, default=10_000, help="of the long run")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; else a random one")
    options = parser.parse_args()
    place = options.directory / f"{options.what}_{time.time_ns()}"
    place.mkdir(parents=True)
    if options.what == "steps":
        sys.exit(long_run(place, options.steps))
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}")
    chance, steps = random.Random(seed), options.runs * STEPS
    places = [place / str(number) for number in range(options.runs)]
    same = sum(sum(killed_run(each, options.kills, chance)) for each in places)
    print(f"{options.runs * options.kills} kills, {same} of {steps} steps are identical")
    sys.exit(same < steps)


def config_of(place: Path, *options: str) -> Path:
    """The file of a fully asynchronous run."""
    settings = ("rollout.asynchrony=fully_async", "rollout.max_staleness=2")
    settings += ("rollout.engine_batch_size=8", "rollout.dynamic_sampling=false")
    place.mkdir(parents=True, exist_ok=True)
    dump(small_config(place.resolve(), *settings, *options), place / "run.yaml")
    return place / "run.yaml"


def killed_run(place: Path, kills: int, chance: random.Random) -> list[bool]:
    """For each step whether its replay is identical."""
    every = STEPS // SAVES
    file = config_of(
        place,
        *(f"train.num_rollout={STEPS}", "run.record=all"),
        *(f"run.save_interval={every}", f"run.keep_every={every}"),
    )
    tail = Tail(place / "run" / METRICS_NAME)
    for _ in range(kills):
        more = chance.randrange(STEPS // kills)
        child, begun, reached = process(file), time.monotonic(), tail.step
        delay = START_SECONDS * chance.random()
        while child.poll() is None and tail.step < reached + more:
            tail.read()
            if more == 0 and time.monotonic() - begun > delay:
                break
            time.sleep(0.02)
        time.sleep(chance.random())
        child.kill()
        tail.read()
        print(f"{place.name}: killed at step {tail.step}, exit code {child.wait()}", flush=True)
    if process(file).wait() != 0:
        sys.exit(f"the run does not end: {file.with_suffix('.log')}")
    with topologies.session(Config().policy) as topology:
        rows = [
            replayed("killed", place / "run", step, topology)
            for step in range(every, STEPS + 1, every)
        ]
    differing = {int(each.split(":")[0]) for row in rows for each in row["differing"]}
    for row in rows:
        print(f"{place.name}: up to step {row['step']} from {row['from']}: {row['identical']}")
    return [step not in differing for step in range(1, STEPS + 1)]


def long_run(place: Path, steps: int) -> int:
    """The exit code of the run."""
    options = ("run.save_interval=200", "run.keep_last=2", "evaluation.eval_interval=0")
    options += ("optimizer.lr=1e-8",)  # a policy that learns solves the task, which ends the run
    file = config_of(place, f"train.num_rollout={steps}", *options)
    child, tail, shown = process(file), Tail(place / "run" / METRICS_NAME), 0
    print("step  process  MiB  descriptors  threads", flush=True)
    while child.poll() is None:
        tail.read()
        if tail.step >= max(1, shown * steps // 10):
            shown += 1
            show(child, tail.step)
        time.sleep(0.2)
    tail.read()
    if tail.step < steps:
        sys.exit(f"the run ended at step {tail.step}: {file.with_suffix('.log')}")
    return child.returncode


def show(child: subprocess.Popen[bytes], step: int) -> None:
    """A line for each process of the run: the trainer, and all that it started."""
    pids = [child.pid]
    for pid in pids:
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        pids += [int(each) for file in lists for each in file.read_text().split()]
    for number, pid in enumerate(pids):
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        memory = int(status["VmRSS"].split()[0]) >> 10
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        name = "trainer" if number == 0 else f"child {number}"
        print(f"{step:5}  {name:8} {memory:5} {descriptors:6} {status['Threads'].strip():>4}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
