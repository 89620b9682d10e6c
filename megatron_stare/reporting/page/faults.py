"""What went wrong and was survived: the engine's faults, steps without an update, alarms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_stare.reporting.alarms import read_alarms
from megatron_stare.reporting.page.runs import Run
from megatron_stare.reporting.page.sampling import Point

# Counters that count from the start of a process; they fall back to zero where a run is resumed.
COUNTERS = {
    "engine_fault_connection": "servers that could not be reached",
    "engine_fault_timeout": "requests that took too long",
    "engine_fault_status": "requests that a server refused",
    "engine_fault_garbage": "answers that made no sense",
    "engine_restarts": "servers restarted",
    "engine_corrupt_syncs": "weights that arrived wrong and were sent again",
    "engine_recoveries": "recoveries",
    "engine_continued": "rollouts continued elsewhere",
    "engine_begun_anew": "rollouts begun anew",
    "engine_invalid_rollouts": "rollouts given up",
    "stale_groups_dropped": "groups dropped as too old",
}
# Of one step each.
EVENTS = {
    "nonfinite": "steps left out: not finite",
    "skipped": "steps without a signal",
    "verifier_kills": "verifiers killed",
}


def faults_of(run: Run) -> dict[str, Any]:
    """{"counts": what happened, how often and when, "alarms": of alarms.jsonl}."""
    counts = []
    for key, text in (COUNTERS | EVENTS).items():
        points = run.series(key)
        steps = increases(points) if key in COUNTERS else [each for each in points if each[1] > 0]
        if steps:
            total = sum(count for _, count in steps)
            counts.append(
                {"text": text, "key": key, "count": total, "first": steps[0][0]}
                | {"last": steps[-1][0]}
            )
    alarms = [dataclasses.asdict(alarm) for alarm in read_alarms(run.directory)]
    return {"counts": counts, "alarms": alarms}


def increases(points: Sequence[Point]) -> list[Point]:
    """(step, how many more) of a counter; one that fell began again from zero."""
    found, before = [], 0.0
    for step, value in points:
        more = value - before if value >= before else value
        if more > 0:
            found.append((step, more))
        before = value
    return found
