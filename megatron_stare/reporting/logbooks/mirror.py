"""What gets the lines of metrics.jsonl too, and how none of them gets a step twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron_stare.config import UserError
from megatron_stare.system import atomic_write

Row = Mapping[str, float | int | str | bool]
NAME = "logbooks.json"


class Mirror(Protocol):
    """One place beside metrics.jsonl. What it raises but for UserError costs this place, and not
    the run.
    """

    name: str

    def open(self, last_step: int | None) -> None:
        """Begin, behind step `last_step` of metrics.jsonl. UserError: its package is missing."""
        ...

    def write(self, row: Row) -> None:
        """One line, whose numbers are finite."""
        ...

    def close(self) -> None:
        """Send what was not sent yet."""
        ...


class Sent:
    """What a place that cannot be cut was sent: its own id of the run, and the last step.

    `<run.dir>/logbooks.json`. The step is noted before it is sent, so that a kill in between leaves
    one out rather than in twice; a run that goes on from an older checkpoint repeats its steps to
    the bit, and they are not sent again.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._path, self._name = Path(directory) / NAME, name
        found = self._read().get(name, {})
        self.id: str = found.get("id", "")
        self.step: int = found.get("step", -1)

    def note(self, *, id: str | None = None, step: int | None = None) -> None:
        """Keep either, whole or not at all."""
        self.id = self.id if id is None else id
        self.step = self.step if step is None else step
        everyone = self._read() | {self._name: {"id": self.id, "step": self.step}}
        atomic_write(self._path, json.dumps(everyone))

    def begin(self, step: int) -> bool:
        """Note a step that is about to be sent; False where it has been."""
        if step <= self.step:
            return False
        self.note(step=step)
        return True

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            return dict(json.loads(self._path.read_text())) if self._path.is_file() else {}
        except ValueError:
            raise UserError(f"{self._path}: no JSON; remove it") from None


def numbers(row: Row) -> dict[str, float]:
    """The row's numbers without its step."""
    return {k: float(v) for k, v in row.items() if k != "step" and not isinstance(v, str)}


def missing(option: str, package: str) -> UserError:
    """What to install for it."""
    return UserError(f"{option} needs {package}; pip install 'megatron-stare[tracking]'")
