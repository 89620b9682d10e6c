"""K6: the weights of the kit's model to servers, over every transport, with checksums."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_stare.commands.gpuday.results import Day, Measured, at_most, holds
from megatron_stare.commands.gpuday.runs import ShortRun, median
from megatron_stare.planning.machine import H100

STEPS = 3
# transport: servers with GPUs of their own, and the figure of the planner that a bucket gives
TRANSPORTS = {"broadcast": (2, "bucket_seconds"), "tensor": (0, "handle_seconds"), "disk": (2, "")}
PARTS = ("gather", "send", "load", "hash", "verify")


def run(day: Day) -> Iterator[Measured]:
    """Seconds of a sync, by part; a run whose checksums differ repeats the sync, then fails."""
    for method, (apart, figure) in TRANSPORTS.items():
        if apart and day.gpus < 2 and not day.rehearsal:
            continue
        servers = 1 if day.rehearsal else min(apart, day.gpus // 2)
        method_key = f"sglang.sync_method={method}"
        short = ShortRun(day, f"sync_{method}", STEPS, method_key, servers=servers)
        rows = short.finish()[1:]  # the first sync opens the connections
        wrong = sum(row.get("engine_corrupt_syncs", 0) for row in rows)
        yield holds(f"{method}: checksums are equal", wrong == 0, f"{wrong:g} corrupt syncs")
        gloo = "gloo" in (short.directory.parent / "K6.log").read_text(errors="replace")
        if apart and not day.rehearsal and method == "broadcast":
            yield holds("broadcast: over NCCL, not gloo", not gloo)
        serving = short.plan(median(rows, "response_length")).serving
        assert serving is not None
        spent, buckets = median(rows, "seconds_sync"), _buckets(serving.sync_bytes, short)
        yield at_most(f"{method}: seconds of a sync", spent, serving.sync_seconds, "s")
        for part in PARTS:
            seconds = median(rows, f"sync_seconds_{part}")
            yield Measured(f"{method}: seconds of {part}", seconds, "", "s")
        if figure:
            each = (spent - median(rows, "sync_seconds_gather")) / buckets
            expected = getattr(H100, figure)
            yield at_most(f"{method}: seconds of a bucket", max(each, 1e-6), expected, "s", figure)


def _buckets(whole: float, short: ShortRun) -> int:
    return math.ceil(whole / (short.config.sglang.sync_bucket_mib << 20))
