"""Finished rollouts on disk, so that a killed run does not sample them again.

One file per step under run.dir/rollouts (of a worker process: in a folder of its own below), a
frame per rollout (frames.py), handed to the operating
system as soon as it is there and flushed to the disk once per step: what a kill can cost is the
frame it falls into, what a power cut can cost is a step. A rollout is found again by its prompt's
index and its number. Version 0.1.0 wrote a line of JSON per rollout, which is read too.

Every frame names the *life* of the run that wrote it, and lives.json has the step at which each
life began. Weights are numbered by their steps: a run that goes back to step 3 makes weights 4 and
5 of its own, and what an earlier life sampled with its 4 and 5 is of other weights for this life
and for every later one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy

from megatron_stare.collect.frames import Spoilt, frame, read_frames
from megatron_stare.config import Config
from megatron_stare.records import Rollout
from megatron_stare.system import atomic_write, sync_directory

log = logging.getLogger(__name__)

Key = tuple[int, int]  # the prompt's index, the rollout's number
LIVES_NAME = "lives.json"
_BEFORE_LIVES = ""  # the life of lines from before lines named one
_UNSOUND = "a log-prob is no finite number"
_Entry = tuple[str, Key, Rollout]  # with the life that wrote it


class Journal:
    """Written by one process: into `folder` of the directory, where there is one. It reads what
    all have written of the rollouts that are `mine`, by their keys.
    `found` is what an earlier life of the run left and no one has asked for yet; `skipped` counts
    the stretches of the files that were not used: torn, spoilt, or with numbers that are none.
    """

    def __init__(
        self,
        directory: Path,
        folder: str = "",
        mine: Callable[[Key], bool] = lambda key: True,
        lives: dict[str, int] | None = None,
    ) -> None:
        """`lives`: those of the run, where another process has begun the last of them."""
        self.directory, self.folder, self.mine = directory, directory / folder, mine
        self._lives = lives
        self.found: dict[Key, Rollout] = {}
        self.skipped = 0
        self._life = ""
        self._file: FileIO | None = None
        self._step = -1
        self._warned = False
        self._unwritten = b""  # what a full disk did not take; tried again with the next rollout

    def open(self, step: int) -> None:
        """Begin a life at `step`, or go on with one that another process began. Rollouts of steps
        that the run has lost are kept, and count as one step older than the last weights that both
        lives share.

        Their weights are gone, and those that will come under the same number are others; the
        log-probs they were sampled with are still true.
        """
        lives = self._lives or begin_life(self.directory, step)
        self._life = next(reversed(lives))
        self.folder.mkdir(parents=True, exist_ok=True)
        order = {life: place for place, life in enumerate(lives)}
        newest: dict[Key, int] = {}
        for file in _files(self.directory):
            for life, key, rollout in self._read(file):
                # A later life sampled it again where this one was too old for it.
                if self.mine(key) and order.get(life, -1) >= newest.get(key, -1):
                    newest[key] = order.get(life, -1)
                    self.found[key] = _of_known_weights(rollout, _shared(lives, life))
        self.turn(step)

    def turn(self, step: int) -> None:
        """Write to the file of `step` from now on; what was written before is on the disk then."""
        if step != self._step:
            self.close()
            self._step = step
            self._file = self._path(step).open("ab", buffering=0)
            self._safely(lambda: sync_directory(self.folder))

    def write(self, key: Key, rollout: Rollout) -> None:
        """Note a finished rollout. Where the disk is full that is a warning:
        the run needs no journal to go on.

        One with a verdict already is an engine's failure, and better sampled again.
        """
        assert self._file is not None, "the journal is open"
        if rollout.verdict:
            return
        self._unwritten += frame(rollout, key=key, life=self._life)
        self._safely(self._write_out)

    def take(self, key: Key, oldest: int) -> Rollout | None:
        """The rollout that an earlier life of the run finished,
        if there is one that is not too old.
        """
        rollout = self.found.pop(key, None)
        return rollout if rollout is not None and rollout.oldest_version >= oldest else None

    def close(self) -> None:
        """Flush to the disk what was written, and let go of the file."""
        if self._file is not None:
            number = self._file.fileno()
            self._safely(lambda: os.fsync(number))
            self._file.close()
            self._file, self._unwritten = None, b""

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.frames"

    def _write_out(self) -> None:
        assert self._file is not None, "the journal is open"
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _safely(self, work: Any) -> None:
        """Do what a full or broken disk may refuse: a warning, once."""
        try:
            work()
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s: %s; a kill would cost the rollouts that are finished meanwhile",
                    self.directory,
                    error,
                )
            self._warned = True

    def _read(self, file: Path) -> list[_Entry]:
        """All that is whole; what is not is counted, and reported once per file."""
        found: list[_Entry] = []
        spoilt: list[Spoilt] = []
        for entry in (_lines if file.suffix == ".jsonl" else _frames)(file.read_bytes()):
            (spoilt if isinstance(entry, Spoilt) else found).append(entry)  # type: ignore[arg-type]
        if spoilt:
            self.skipped += len(spoilt)
            log.warning(
                "%s: %d of %d entries cannot be used (the first: at byte %d, %s); they are "
                "skipped, and their rollouts sampled again",
                file,
                len(spoilt),
                len(spoilt) + len(found),
                *spoilt[0],
            )
        return found


def journal_directory(config: Config) -> Path:
    """Of a run's training rollouts."""
    return Path(config.run.dir) / "rollouts"


def begin_life(directory: Path, step: int, life: str = "", noted: bool = True) -> dict[str, int]:
    """Note that a life of the run begins at `step`; the step of every life so far, the new one
    last. To be written before its first frame: without it, that could not be told from others'.
    Where several processes begin one `life`, one of them notes it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lives = {**_read_lives(directory / LIVES_NAME), life or uuid.uuid4().hex[:12]: step}
    try:
        if noted:
            _write_lives(directory / LIVES_NAME, lives)
    except OSError as error:
        log.warning("%s: %s; a later life of the run would not use its rollouts", directory, error)
    return lives


def forget(directory: Path, before: int) -> None:
    """Remove the files of steps before `before`.
    A run that goes back further than that samples again.
    """
    for file in _files(directory):
        if int(file.stem.removeprefix("step_")) < before:
            file.unlink()


def _files(directory: Path) -> list[Path]:
    """In the order of their steps; those of lines before those of frames."""
    found = [*directory.glob("step_*.jsonl"), *directory.rglob("step_*.frames")]
    return sorted(found, key=lambda file: (file.stem, file.suffix == ".frames", file))


def _frames(content: bytes) -> Iterator[_Entry | Spoilt]:
    for found in read_frames(content):
        if isinstance(found, Spoilt):
            yield found
        elif not isinstance(found.record, Rollout) or not _is_finite(found.record):
            yield Spoilt(found.start, _UNSOUND)
        else:
            prompt, number = found.beside["key"]
            yield found.beside["life"], (prompt, number), found.record


def _lines(content: bytes) -> Iterator[_Entry | Spoilt]:
    """Of a file of version 0.1.0."""
    start = 0
    for line in content.split(b"\n"):
        try:
            if line:
                yield _parsed(line)
        except (ValueError, TypeError, RecursionError) as error:
            yield Spoilt(start, str(error))
        start += len(line) + 1


def _parsed(line: bytes) -> _Entry:
    """The life, the key and the rollout of a line. ValueError, TypeError: it is torn or spoilt."""
    fields = json.loads(line.decode("utf-8"), parse_constant=_refused)
    if (
        not isinstance(fields, list)
        or len(fields) not in (3, 4)
        or not isinstance(fields[-1], dict)
    ):
        raise ValueError("not the line of a rollout")
    life = fields[2] if len(fields) == 4 else _BEFORE_LIVES
    rollout = Rollout(**fields[-1])
    whole = (*fields[:2], rollout.weight_version)
    if not isinstance(life, str) or not all(type(number) is int for number in whole):
        raise ValueError("the name of a life or a whole number is neither")
    if not _is_finite(rollout):
        raise ValueError(_UNSOUND)
    return life, (fields[0], fields[1]), rollout


def _is_finite(rollout: Rollout) -> bool:
    return bool(numpy.isfinite(rollout.logprobs).all())


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number to train on")


def _shared(lives: dict[str, int], life: str) -> int:
    """The newest weights of `life` that the last life descends from: every life between them began
    with those of its first step, and knows nothing of what had come after. All of the last life's
    own; -1 for an unknown life.
    """
    if life not in lives and life != _BEFORE_LIVES:
        return -1
    steps = list(lives.values())
    return min(steps[list(lives).index(life) + 1 if life in lives else 0 :], default=sys.maxsize)


def _of_known_weights(rollout: Rollout, shared: int) -> Rollout:
    """The rollout; tokens of weights that are lost count as older than the last shared ones."""
    versions = numpy.append(rollout.versions, rollout.weight_version)
    if versions.max() <= shared:
        return rollout
    versions = numpy.where(versions <= shared, versions, shared - 1)
    return dataclasses.replace(
        rollout, weight_version=int(versions[-1]), token_versions=versions[:-1]
    )


def _read_lives(path: Path) -> dict[str, int]:
    """The step at which each life of the run began, in their order. Unreadable: none is known, and
    all that they sampled counts as too old.
    """
    try:
        lives = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(lives, dict) or not all(type(step) is int for step in lives.values()):
            raise ValueError("not a table of steps")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s: %s; rollouts of earlier lives of the run are not used", path, error)
        return {}
    return lives


def _write_lives(path: Path, lives: dict[str, int]) -> None:
    """At once or not at all."""
    atomic_write(path, json.dumps(lives), durable=True)
