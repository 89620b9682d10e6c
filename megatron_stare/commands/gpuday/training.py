"""K9: a short run from sampling to weight sync, killed and resumed, against its plan."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import psutil

from megatron_stare.commands.gpuday.results import Day, Measured, holds
from megatron_stare.commands.gpuday.runs import ShortRun, against_plan
from megatron_stare.commands.gpuday.stages import checked


def run(day: Day) -> Iterator[Measured]:
    """Train, kill a rank with SIGKILL at half of the steps, resume, replay a step."""
    steps = 4 if day.rehearsal else 20
    kept = ("run.save_interval=1", "run.record=all")
    short = ShortRun(day, "run", steps, *kept, servers=None if day.rehearsal else 0)
    killed = _killed(short, steps // 2)
    yield holds(f"a rank is killed at step {killed}", bool(killed), str(killed))
    rows = short.finish()
    found = [row["step"] for row in rows]
    yield holds("every step once, after the resume", found == list(range(1, steps + 1)), str(found))
    yield from against_plan(short, rows[1:])
    if short.ranks == 1:  # raises where a figure differs
        replay = [sys.executable, "-m", "megatron_stare", "train", str(short.directory)]
        checked([*replay, "--replay", str(steps - 1)])
        yield holds(f"replay of step {steps - 1}", True, "the same figures")
    alarms = [key for row in rows for key in row if key.startswith("alarm")]
    yield holds("no alarm", not alarms, ", ".join(sorted(set(alarms))) or "none", "WARN")


def _killed(short: ShortRun, step: int) -> int:
    """Start the run and kill its last rank after `step`; the step that was written last."""
    process = short.start()
    try:
        last = short.reach(process, step)
        ranks = psutil.Process(process.pid).children() if short.ranks > 1 else []
        os.kill(max((rank.pid for rank in ranks), default=process.pid), signal.SIGKILL)
        process.wait(120.0)
    finally:
        process.kill()
        process.wait()
    return last
