"""`<run.dir>/alarms.jsonl`: one line of JSON for each alarm of a run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.reporting.logbook import read_rows
from megatron_stare.system import atomic_write

NAME = "alarms.jsonl"


@dataclass(frozen=True)
class Alarm:
    """One alarm."""

    step: int  # it was raised at the end of this step
    alarm: str
    message: str
    first_step: int  # the first of the steps that caused it
    remedy: str
    # Examples as [prompt index, sample number]; empty if no single rollout caused it.
    rollouts: list[list[int]] = field(default_factory=list)


def append(directory: Path, alarm: Alarm) -> None:
    """Append one line."""
    with (Path(directory) / NAME).open("a", encoding="ascii") as file:
        file.write(json.dumps(dataclasses.asdict(alarm)) + "\n")


def read_alarms(directory: Path) -> list[Alarm]:
    """A run directory's alarms in their order; a last line torn by a kill is left out. UserError
    names any other line that is not an alarm.
    """
    path = Path(directory) / NAME
    return read_rows(path, lambda row: Alarm(**row), "no alarm") if path.is_file() else []


def cut(directory: Path, step: int) -> None:
    """Keep the alarms up to `step`; a run resumed from there raises the later ones again."""
    path = Path(directory) / NAME
    if not path.is_file():
        return
    kept = [alarm for alarm in read_alarms(directory) if alarm.step <= step]
    atomic_write(path, "".join(json.dumps(dataclasses.asdict(alarm)) + "\n" for alarm in kept))
