"""The heartbeat of a rank: its place in the program, and the seconds since it last moved.

A rank moves when it enters a phase, starts a step or calls `moved`, and when a look at its threads
finds them at another place of the program than the look before, or that they have read or written
bytes since: every look at a long write of a checkpoint finds the same line. So loops need no extra
calls. A rank that waits in C, for a collective or a GPU, stays at one place; a loop that only waits
is `waiting`.

Every process is one rank, so this state is global to the process, as signal handlers are.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megatron_stare.system import atomic_write

# Threads that do a rank's work; all others wait for requests or for a clock.
WORKERS = ("MainThread", "embedded-engine", "checkpoint", "judge")
_UNKNOWN = "autograd"  # torch's own threads, when they run Python
_MOST_FRAMES = 60

_moves = itertools.count(1)


@dataclasses.dataclass
class _Place:
    phase: str = "start"
    step: int = 0
    moves: int = 0
    waits: bool = False


_here = _Place()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """This rank is in the phase `name` until the block ends; after an exception it stays there."""
    before, _here.phase = _here.phase, name
    moved()
    yield
    _here.phase = before
    moved()


def start_step(step: int) -> None:
    """This rank starts step `step`, counted from 1."""
    _here.step = step
    moved()


def moved() -> None:
    """Count as movement: something has come that this rank waits for."""
    _here.moves = next(_moves)


@contextmanager
def waiting() -> Iterator[None]:
    """Until the block ends the main thread waits in a loop, whose turns are no movement: only
    calls of `moved`, and other threads, are.
    """
    before, _here.waits = _here.waits, True
    try:
        yield
    finally:
        _here.waits = before


def place() -> str:
    """The step and phase of this rank, e.g. "step 3, update"."""
    return f"step {_here.step}, {_here.phase}" if _here.step else _here.phase


@dataclasses.dataclass(frozen=True)
class Beat:
    """The content of a rank's file."""

    attempt: str  # id of this start of the run
    rank: int
    host: str
    pid: int
    place: str
    still: float  # seconds without movement
    stacks: dict[str, list[str]]  # frames of each working thread, the innermost first
    ended: str = ""  # how the rank ended; "" while it runs

    @property
    def collective(self) -> str:
        """The torch.distributed or Megatron call that the rank is in, or ""."""
        for part in ("/torch/distributed/", "/megatron/core/pipeline_parallel/"):
            for frames in self.stacks.values():
                inside = [frame for frame in frames if part in frame and "c10d_logger" not in frame]
                if inside and frames.index(inside[0]) < 3:
                    return _outermost(inside, frames, part).rsplit(" in ", 1)[1]
        return ""

    def write(self, file: Path) -> None:
        """Replace the file atomically; on a full disk only its modification time is updated."""
        try:
            atomic_write(file, json.dumps(dataclasses.asdict(self)))
        except OSError:
            with suppress(OSError):
                os.utime(file)


def read_beat(file: Path, attempt: str) -> Beat | None:
    """A rank's beat; None if this start of the run has not written one yet."""
    try:
        beat = Beat(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return beat if beat.attempt == attempt else None


class Motion:
    """Detects whether this process has moved since the last look."""

    def __init__(self) -> None:
        self._seen: object = None
        self._since = time.monotonic()

    def look(self) -> tuple[float, dict[str, list[str]]]:
        """Seconds without movement, and the working threads' stacks."""
        frames = _working_frames()
        places = {
            name: ([(id(frame.f_code), frame.f_lasti) for frame in _outwards(innermost)], _io(name))
            for name, innermost in frames.items()
            if not (_here.waits and name == "MainThread")
        }
        seen = (_here.moves, _here.phase, places)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        stacks = {name: _described(innermost) for name, innermost in frames.items()}
        return time.monotonic() - self._since, stacks


def _working_frames() -> dict[str, FrameType]:
    named = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        name: frame
        for ident, frame in sys._current_frames().items()
        if (name := named.get(ident, _UNKNOWN)).startswith((*WORKERS, _UNKNOWN, "Dummy"))
    }


def _io(name: str) -> str:
    """The system's counts of the bytes that a thread has read and written; "" if it has none."""
    for thread in threading.enumerate():
        if thread.name == name:
            with suppress(OSError):
                return Path(f"/proc/self/task/{thread.native_id}/io").read_text()
    return ""


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _described(frame: FrameType) -> list[str]:
    return [
        f"{each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_name}"
        for each in itertools.islice(_outwards(frame), _MOST_FRAMES)
    ]


def _outermost(inside: list[str], frames: list[str], part: str) -> str:
    """The outermost of the nested calls: all_gather_object, not the all_gather inside it."""
    found = inside[0]
    for frame in frames[frames.index(found) :]:
        if part not in frame:
            break
        if "c10d_logger" not in frame:
            found = frame
    return found
