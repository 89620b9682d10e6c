"""`<run.dir>/alarms.jsonl`: one line of JSON for each alarm of a run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.config import UserError
from megatron_stare.system import atomic_write

NAME = "alarms.jsonl"


@dataclass(frozen=True)
class Alarm:
    """`step` is the one at whose end it was raised, `first_step` the first of those that led to it.
    `rollouts` are some of those concerned, as [index of the prompt, number of the sample]; none
    where no single rollout is.
    """

    step: int
    alarm: str
    message: str
    first_step: int
    remedy: str
    rollouts: list[list[int]] = field(default_factory=list)


def append(directory: Path, alarm: Alarm) -> None:
    """One line more."""
    with (Path(directory) / NAME).open("a", encoding="ascii") as file:
        file.write(json.dumps(dataclasses.asdict(alarm)) + "\n")


def read_alarms(directory: Path) -> list[Alarm]:
    """A run directory's alarms in their order; a last line that a kill tore is left out. UserError
    names another line that is none.
    """
    path = Path(directory) / NAME
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(Alarm(**json.loads(line)))
        except (ValueError, TypeError):
            if number < len(lines):
                raise UserError(f"{path}:{number}: no alarm; remove the line") from None
    return found


def cut(directory: Path, step: int) -> None:
    """Keep those up to `step`: later ones are raised again by the run that goes on from there."""
    path = Path(directory) / NAME
    if not path.is_file():
        return
    kept = [alarm for alarm in read_alarms(directory) if alarm.step <= step]
    atomic_write(path, "".join(json.dumps(dataclasses.asdict(alarm)) + "\n" for alarm in kept))
