"""What went wrong and was survived: the engine's faults, steps without an update, alarms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_stare.config import UserError
from megatron_stare.reporting.page.runs import Run
from megatron_stare.reporting.page.sampling import Point

ALARMS_NAME = "alarms.jsonl"
# Counters that count from the start of a process; they fall back to zero where a run is resumed.
COUNTERS = {
    "engine_fault_connection": "servers that could not be reached",
    "engine_fault_timeout": "requests that took too long",
    "engine_fault_status": "requests that a server refused",
    "engine_fault_garbage": "answers that made no sense",
    "engine_restarts": "servers restarted",
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
_ALARM = {"step": int, "alarm": str, "message": str}


def faults_of(run: Run) -> dict[str, Any]:
    """{"counts": what happened, how often and when, "watched": whether anything was counted,
    "alarms": of alarms.jsonl}.
    """
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
    return {"counts": counts, "alarms": alarms_of(run)}


def increases(points: Sequence[Point]) -> list[Point]:
    """(step, how many more) of a counter; one that fell began again from zero."""
    found, before = [], 0.0
    for step, value in points:
        more = value - before if value >= before else value
        if more > 0:
            found.append((step, more))
        before = value
    return found


def alarms_of(run: Run) -> list[dict[str, Any]]:
    """The lines of alarms.jsonl, in order. A last line that a kill tore is left out; UserError
    names any other that is no alarm.
    """
    path = run.directory / ALARMS_NAME
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        alarm = _parsed(line)
        if alarm is not None:
            found.append(alarm)
        elif number < len(lines):
            raise UserError(f"{path}:{number}: not an alarm; remove the line")
    return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        alarm = json.loads(line)
    except ValueError:
        return None
    fits = isinstance(alarm, dict) and all(
        isinstance(alarm.get(name), kind) for name, kind in _ALARM.items()
    )
    return alarm if fits else None
