"""K7: a server that dies while weights are sent, and memory that servers give back and take."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_stare.commands.gpuday.results import Day, Measured, at_most, holds
from megatron_stare.commands.gpuday.runs import ShortRun, family, median

SYNC_TIMEOUT, AFTER = 30, 60  # seconds; NCCL's watchdog would end the trainer after the first
BUCKET_MIB = 16  # small, so that a sync lasts long enough to be interrupted
RECEIVED = '"POST /update_weights_from_distributed'
CYCLES = 20
MOST_GROWTH = 256.0  # MiB


def run(day: Day) -> Iterator[Measured]:
    """kill -9 of a server in a sync; then cycles of release and resume."""
    if day.gpus >= 3 or day.rehearsal:
        yield from _killed_in_a_sync(day)
    yield from _cycles(day)


def _killed_in_a_sync(day: Day) -> Iterator[Measured]:
    options = (f"sglang.sync_timeout={SYNC_TIMEOUT}", f"sglang.sync_bucket_mib={BUCKET_MIB}")
    short = ShortRun(day, "killed", 10_000, *options, servers=2)
    logs, after = short.directory / "servers", 3 if day.rehearsal else AFTER
    process = short.start()
    try:
        short.reach(process, 2)
        before = _received(logs)
        short.wait(process, lambda: _received(logs) > before, "bucket of the next sync")
        os.killpg(os.getpgid(family(process, "--model-path")[-1]), signal.SIGKILL)
        killed, step = time.monotonic(), len(short.rows())
        short.reach(process, step + 2)
        spent = time.monotonic() - killed
        yield at_most(
            "seconds from kill -9 to the second next step", spent, 2.0 * SYNC_TIMEOUT, "s"
        )
        last = SYNC_TIMEOUT + after
        short.wait(process, lambda: time.monotonic() - killed > last, f"{last} s after the kill")
        rows = short.rows()
        yield holds(f"the trainer lives {last} s after the kill", True, f"{len(rows)} steps")
        restarts = rows[-1].get("engine_restarts", 0)
        yield holds("the server is started again", restarts >= 1, f"{restarts:g} restarts")
        peak, later = (median(part, "gpu_memory_peak") for part in (rows[:step], rows[step + 2 :]))
        if peak:
            yield at_most("rank 0's memory after the kill", later, peak, "GiB")
        process.send_signal(signal.SIGTERM)
        process.wait(120.0)
    finally:
        process.kill()
        process.wait()


def _received(logs: Path) -> int:
    """Buckets that servers have answered, by their logs."""
    texts = (log.read_text(errors="replace") for log in logs.glob("*.log"))
    return sum(text.count(RECEIVED) for text in texts)


def _cycles(day: Day) -> Iterator[Measured]:
    """Free memory of the first GPU after every step, in which its server released and resumed."""
    cycles, free = 3 if day.rehearsal else CYCLES, list[float]()
    short = ShortRun(day, "cycles", cycles, "rollout.rollout_max_response_len=16")
    process = short.start()
    try:
        for step in range(1, cycles + 1):
            short.reach(process, step)
            free.append(torch.cuda.mem_get_info()[0] / 2**20 if torch.cuda.is_available() else 0.0)
        process.wait(120.0)
    finally:
        process.kill()
        process.wait()
    lost = max(free[1:3]) - min(free[-3:])
    yield holds(f"{cycles} cycles of release and resume", process.returncode == 0)
    yield holds("memory stays flat", lost < MOST_GROWTH, f"{lost:.0f} MiB lost after step 2")
