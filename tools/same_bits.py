"""Metrics of this checkout and of an older one, compared to the last bit.

    python -m tools.same_bits ../before
    python -m tools.same_bits ../before --runs compare tp2_pp2 --set cold_start.steps=50

A change that only simplifies code leaves every figure as it is. Both checkouts train the runs of
RUNS with the same commands, in this Python's environment, and every figure of their metrics.jsonl
is compared, except those that measure time or memory. The fully asynchronous run depends on timing:
the older checkout trains and records it, and this one replays its last step. Exit code 1: a figure
or a key differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
MEASURED = ("seconds", "memory", "per_second", "time", "cpu", "utilization")
COMMAND = ("-m", "megatron_stare", "train", "quickstart")
FOUR_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
LAYOUT = ("policy.tensor_model_parallel_size=2", "policy.pipeline_model_parallel_size=2")
STALE = "rollout.max_staleness"


@dataclass(frozen=True)
class Run:
    """Commands with the same run.dir, one after the other; `launcher` are arguments of Python."""

    settings: Sequence[str] = ()
    launcher: Sequence[str] = ()
    parts: Sequence[float] = (1.0,)  # of --steps, where each command ends
    replayed: bool = False


RUNS = {
    "compare": Run(),
    "resumed": Run(parts=(0.5, 1.0)),
    "tp2_pp2": Run(settings=LAYOUT, launcher=FOUR_RANKS),
    "one_step_off": Run(settings=("rollout.asynchrony=one_step_off", f"{STALE}=1")),
    "fully_async": Run(settings=("rollout.asynchrony=fully_async", f"{STALE}=2"), replayed=True),
}


def main() -> None:
    """Train in both checkouts, and print a line for every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the older checkout")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--steps", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument("--directory", type=Path, default=Path("runs/same_bits"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for every run")
    options = parser.parse_args()
    before, directory = options.before.resolve(), options.directory.resolve()
    differing = 0
    for name in options.runs:
        run = dataclasses.replace(RUNS[name], settings=(*RUNS[name].settings, *options.set))
        found = compared(run, before, directory / name, options.steps)
        print(f"{name}: {found or 'identical'}", flush=True)
        differing += bool(found)
    sys.exit(differing > 0)


def compared(run: Run, before: Path, directory: Path, steps: int) -> str:
    """What differs between the runs of both checkouts, or nothing."""
    old, new = directory / "before", directory / "now"
    trained(run, before, old, steps)
    if run.replayed:
        arm = next(path.parent for path in sorted(old.rglob("records")))
        ended = python(HERE, ["-m", "megatron_stare", "train", str(arm), "--replay", str(steps)])
        return "" if ended.returncode == 0 else f"the replay differs:\n{ended.stdout}"
    trained(run, HERE, new, steps)
    files = {path.relative_to(old) for path in old.rglob("metrics.jsonl")}
    if not files or files != {path.relative_to(new) for path in new.rglob("metrics.jsonl")}:
        return f"the runs below {old} and {new} wrote different files"
    return "; ".join(filter(None, (difference(old / file, new / file) for file in sorted(files))))


def trained(run: Run, checkout: Path, directory: Path, steps: int) -> None:
    """Train one run with the code of a checkout."""
    for part in run.parts:
        step = round(part * steps)
        settings = [
            f"run.dir={directory}",
            f"train.num_rollout={step}",
            f"run.save_interval={max(1, steps // 4)}",
            "run.record=all",
            *run.settings,
        ]
        ended = python(checkout, [*run.launcher, *COMMAND, *settings])
        if ended.returncode:
            sys.exit(f"{checkout}: {' '.join(ended.args)} failed:\n{ended.stdout[-4000:]}")


def python(checkout: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python on the code of a checkout; the output is text."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def difference(old: Path, new: Path) -> str:
    """The first figure that differs between two metrics files, or nothing."""
    pairs = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (old, new)
    ]
    if len(pairs[0]) != len(pairs[1]):
        return f"{new}: {len(pairs[1])} lines in place of {len(pairs[0])}"
    for before, now in zip(*pairs, strict=True):
        if names := unequal(before, now):
            was = {name: (before.get(name), now.get(name)) for name in names[:3]}
            return f"{new}, step {now.get('step')}: {len(names)} figures differ: {was}"
    return ""


def unequal(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """The keys that one of two lines lacks, or whose values differ, measurements aside."""
    keys = sorted(before.keys() | now.keys())
    exact = [key for key in keys if not any(word in key for word in MEASURED)]
    return [key for key in exact if repr(before.get(key)) != repr(now.get(key))]


if __name__ == "__main__":
    main()
