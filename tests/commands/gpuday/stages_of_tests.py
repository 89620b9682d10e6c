"""A stage that ends in the way that the day's overrides name. Its process and its ranks import this
module, which imports nothing large.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_stare.commands.gpuday.rows import Day, Measurement, Skipped, at_least, holds
from megatron_stare.commands.gpuday.stages import Stage, checked, on_ranks, run_stages

MODULE = "tests.commands.gpuday.stages_of_tests:run"
FIRST, SECOND = (Stage(name, MODULE, (2, 2), 0, "a test") for name in ("K0", "K1"))
CABLE = os.environ.get("CABLE", "there")


def run_first(day: Day) -> None:
    list(run_stages(day, [FIRST]))


def run(day: Day) -> Iterator[Measurement]:
    (way,) = day.overrides
    yield at_least("rate", 3.0, 4.0, "GB/s", "node_rate")
    if way == "raises":
        raise ValueError("the cable is loose")
    if way == "skips":
        raise Skipped("no second node")
    if way == "hangs":
        time.sleep(600)
    if way == "hangs below":  # torchrun, too, starts its ranks in sessions of their own
        checked(["bash", "-c", f"setsid sleep 600 & echo $! > {day.path}/rank; wait"])
    if way == "hangs in a call":  # no handler of a signal runs, as in one of a GPU
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        (day.path / "rank").write_text(str(os.getpid()))
        time.sleep(600)
    if way == "fails on a rank":
        on_ranks(1, {"CABLE": "loose"}, rank)
    if way == "hangs on a rank":
        on_ranks(1, {}, hang, day.path)
    yield holds("statement", way == "true")


def rank() -> None:
    raise ValueError(f"when this rank was loaded, the cable was {CABLE}")


def hang(directory: Path) -> None:
    """Python's handler of SIGINT does not run, as in a collective that waits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (directory / "rank").write_text(str(os.getpid()))
    time.sleep(600)
