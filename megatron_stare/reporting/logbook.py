"""The run's record: metrics.jsonl, one JSON object per step, its copies in trackers, and
alarms.jsonl, one JSON object per alarm.

metrics.jsonl survives a kill at any moment: a line is written and flushed whole, `read_metrics`
ignores a torn last line, and a resumed run removes it, together with the lines of the steps it is
about to repeat. Lines that a full disk refuses are kept in memory and written with a later one. The
trackers of run.logbooks (trackers.py) get the same lines; if one fails, a warning is printed once
and the run continues without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from megatron_stare.config import RunConfig, UserError
from megatron_stare.reporting.trackers import Row, Tracker, trackers_of
from megatron_stare.system import BestEffort, atomic_write

METRICS_NAME, ALARMS_NAME = "metrics.jsonl", "alarms.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in file order.

    A last line without its line feed that is not JSON was torn by a kill and is left out; anything
    else that is not a JSON object with an integer `step` raises UserError naming the line.
    """
    try:
        return read_rows(path, _row, "not a JSON object with an integer step")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}; a run directory holds a {METRICS_NAME}"
        ) from None


def read_rows[Kind](path: Path, made: Callable[[Any], Kind], fault: str) -> list[Kind]:
    """The lines of a .jsonl file, each made by `made` from its value; a last line torn by a kill is
    left out. UserError names any other line that is not JSON or that `made` refuses by a ValueError
    or TypeError. OSError: the file cannot be read.
    """
    lines = Path(path).read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(made(json.loads(line)))
        except (ValueError, TypeError):
            if number < len(lines):
                raise UserError(f"{path}:{number}: {fault}; remove the line") from None
    return found


def _row(value: Any) -> dict[str, Any]:
    """ValueError: it is no row of a metrics.jsonl."""
    if isinstance(value, dict) and type(value.get("step")) is int:
        return value
    raise ValueError("it needs an integer step")


class Tail:
    """Reads a metrics.jsonl that another process writes, each byte and each step once.

    If a resumed run has shortened the file, it is read from its start and steps that were returned
    before are left out. So are damaged lines: the run itself refuses them, with their number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = 0  # the last one returned
        self._file = -1  # its inode
        self._bytes = 0  # already read

    def read(self) -> list[dict[str, Any]]:
        """The rows of the steps since the last call; an unfinished line waits for the next one."""
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._file or state.st_size < self._bytes:
                    self._file, self._bytes = state.st_ino, 0
                file.seek(self._bytes)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        if not whole:
            return []
        self._bytes += len(whole) + 1
        fresh = []
        for line in whole.split(b"\n"):
            with contextlib.suppress(ValueError):
                row = _row(json.loads(line))
                fresh += [row] if row["step"] > self.step else []
        if fresh:
            self.step = fresh[-1]["step"]
        return fresh


class Logbook:
    """Appends to `directory`/metrics.jsonl.

    `done` is the last step to keep: later lines, and a torn last one, are cut off before anything
    is appended. `trackers` get every line too.
    """

    def __init__(self, directory: Path, done: int = 0, trackers: Sequence[Tracker] = ()) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / METRICS_NAME
        self.last_step = self._cut(done)
        self._file = self.path.open("ab", buffering=0)
        self._size = self._file.tell()  # of the whole lines in the file
        self._queue: list[bytes] = []  # lines that are not in the file yet
        self._best_effort = BestEffort(
            f"metrics wait in memory until {self.path} can be written, and the run continues"
        )
        self._left_out: set[str] = set()
        self._trackers = list(trackers)
        for tracker in trackers:
            self._open(tracker)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step. Values are numbers, strings or booleans, or tensors of one element.

        A value that is not finite is left out, with one warning for its key. ValueError, with the
        key: a value of another type; or a step that is not later than the last one written. Nothing
        is written then.
        """
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(
                f"logbook: step {step} is not after step {self.last_step}, the last one in "
                f"{self.path}"
            )
        if metrics.get("step", step) != step:
            raise ValueError(
                f"logbook: metrics['step'] is {metrics['step']!r} in a line for step {step}"
            )
        row: dict[str, Any] = {"step": int(step)} | {
            key: _plain(key, value) for key, value in metrics.items() if key != "step"
        }
        row = self._finite(row)
        self._queue.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._best_effort(self._write_out)
        self.last_step = row["step"]
        for tracker in [*self._trackers]:
            self._copy(tracker, row)

    def close(self) -> None:
        self._best_effort(self._write_out)
        if self._queue:
            print(f"warning: {self.path} lacks {len(self._queue)} steps", file=sys.stderr)
        self._file.close()
        while self._trackers:
            tracker = self._trackers.pop()
            try:
                tracker.close()
            except Exception as error:
                _warn(tracker, "could not be closed", error)

    def _write_out(self) -> None:
        while self._queue:
            self._size = _append(self._file, self._size, self._queue[0])
            self._queue.pop(0)

    def _finite(self, row: dict[str, Any]) -> dict[str, Any]:
        odd = {key for key, value in row.items() if isinstance(value, float)}
        odd = {key for key in odd if not math.isfinite(row[key])}
        for key in sorted(odd - self._left_out):
            text = f"step {row['step']}: {key} is {row[key]}; rows of {METRICS_NAME} leave it out"
            print(f"warning: {text} where it is not finite", file=sys.stderr, flush=True)
        self._left_out |= odd
        return {key: value for key, value in row.items() if key not in odd}

    def _open(self, tracker: Tracker) -> None:
        """A UserError ends the run at once; after another fault the run continues without it."""
        try:
            tracker.open(self.last_step)
        except UserError:
            raise
        except Exception as error:
            self._trackers.remove(tracker)
            _warn(tracker, "gets nothing", error)

    def _copy(self, tracker: Tracker, row: Row) -> None:
        """A tracker that fails, for any reason, is dropped; the run continues."""
        try:
            tracker.write(row)
        except Exception as error:
            self._trackers.remove(tracker)
            _warn(tracker, f"gets nothing from step {row['step']} on", error)

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _cut(self, done: int) -> int | None:
        """Rewrite the file with the steps up to `done`; the last of them, or None."""
        if not self.path.exists():
            return None
        kept = [row for row in read_metrics(self.path) if row["step"] <= done]
        atomic_write(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        return kept[-1]["step"] if kept else None


def open_logbook(
    run: RunConfig, done: int, *, enabled: bool
) -> AbstractContextManager[Logbook | None]:
    """The run's logbook without the lines after step `done`; None in processes not `enabled`."""
    if not enabled:
        return nullcontext()
    return Logbook(Path(run.dir), done, trackers_of(run))


def _append(file: FileIO, size: int, line: bytes) -> int:
    """Write a line after the whole lines, `size` bytes, in place of what a failed attempt left of
    one; their new size. OSError: the disk is full.
    """
    file.truncate(size)
    size += len(line)
    while line:
        line = line[file.write(line) :]
    return size


def _warn(tracker: Tracker, what: str, error: Exception) -> None:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    print(f"warning: {tracker.name} {what}: {first}", file=sys.stderr, flush=True)


def _plain(key: str, value: Any) -> float | int | str | bool:
    """`value` as what JSON can hold exactly; ValueError naming `key` otherwise."""
    if not isinstance(value, (bool, int, float, str)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            raise ValueError(f"logbook: {key!r} is a tensor of more than one element") from None
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(
            f"logbook: {key!r} is a {type(value).__name__}; numbers, strings and booleans can be "
            "logged"
        )
    return value


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


def append_alarm(directory: Path, alarm: Alarm) -> None:
    """Append one line. OSError: the disk is full."""
    with (Path(directory) / ALARMS_NAME).open("ab+", buffering=0) as file:
        file.seek(0)
        _append(file, file.read().rfind(b"\n") + 1, _alarm_line(alarm).encode())


def read_alarms(directory: Path) -> list[Alarm]:
    """A run directory's alarms in their order; a last line torn by a kill is left out. UserError
    names any other line that is not an alarm.
    """
    path = Path(directory) / ALARMS_NAME
    return read_rows(path, lambda row: Alarm(**row), "no alarm") if path.is_file() else []


def cut_alarms(directory: Path, step: int) -> None:
    """Keep the alarms up to `step`; a run resumed from there raises the later ones again."""
    path = Path(directory) / ALARMS_NAME
    if not path.is_file():
        return
    kept = [alarm for alarm in read_alarms(directory) if alarm.step <= step]
    atomic_write(path, "".join(map(_alarm_line, kept)))


def _alarm_line(alarm: Alarm) -> str:
    return json.dumps(dataclasses.asdict(alarm)) + "\n"
