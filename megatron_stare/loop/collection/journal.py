"""Finished rollouts on disk, so that a killed run does not sample them again.

One file per step under run.dir/rollouts, a line per rollout, handed to the operating system as soon
as it is there and flushed to the disk once per step: what a kill can cost is the line it falls
into, what a power cut can cost is a step. A rollout is found again by its prompt's index and its
number.

Every line names the *life* of the run that wrote it, and lives.json has the step at which each life
began. Weights are numbered by their steps: a run that goes back to step 3 makes weights 4 and 5 of
its own, and what an earlier life sampled with its 4 and 5 is of other weights for this life and for
every later one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import uuid
from io import FileIO
from pathlib import Path
from typing import Any

from megatron_stare.policy.manifest import sync_directory
from megatron_stare.records import Rollout

log = logging.getLogger(__name__)

Key = tuple[int, int]  # the prompt's index, the rollout's number
LIVES_NAME = "lives.json"
_BEFORE_LIVES = ""  # the life of lines from before lines named one


class Journal:
    """Written and read by one rank.
    `found` is what an earlier life of the run left and no one has asked for yet; `skipped` counts
    the lines that were not used: torn, not text, or with numbers that are none.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found: dict[Key, Rollout] = {}
        self.skipped = 0
        self._life = uuid.uuid4().hex[:12]
        self._file: FileIO | None = None
        self._step = -1
        self._warned = False
        self._unwritten = b""  # what a full disk did not take; tried again with the next rollout

    def open(self, step: int) -> None:
        """Begin a life at `step`. Rollouts of steps that the run has lost are kept, and count as
        one step older than the last weights that both lives share.

        Their weights are gone, and those that will come under the same number are others; the
        log-probs they were sampled with are still true.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lives = {**_read_lives(self.directory / LIVES_NAME), self._life: step}
        order = {life: place for place, life in enumerate(lives)}
        newest: dict[Key, int] = {}
        for file in sorted(self.directory.glob("step_*.jsonl")):
            for life, key, rollout in self._read(file):
                # A later life sampled it again where this one was too old for it.
                if order.get(life, -1) >= newest.get(key, -1):
                    newest[key] = order.get(life, -1)
                    self.found[key] = _of_known_weights(rollout, _shared(lives, life))
        # Before the first line of this life: without it, the line could not be told from others.
        self._safely(lambda: _write_lives(self.directory / LIVES_NAME, lives))
        self.turn(step)

    def turn(self, step: int) -> None:
        """Write to the file of `step` from now on; what was written before is on the disk then."""
        if step != self._step:
            self.close()
            self._step = step
            self._file = _whole_lines(self._path(step)).open("ab", buffering=0)
            self._safely(lambda: sync_directory(self.directory))

    def write(self, key: Key, rollout: Rollout) -> None:
        """Note a finished rollout. Where the disk is full that is a warning:
        the run needs no journal to go on.

        One with a verdict already is an engine's failure, and better sampled again.
        """
        assert self._file is not None, "the journal is open"
        if rollout.verdict:
            return
        line = json.dumps([*key, self._life, dataclasses.asdict(rollout)])
        self._unwritten += (line + "\n").encode()
        self._safely(self._write_out)

    def take(self, key: Key, oldest: int) -> Rollout | None:
        """The rollout that an earlier life of the run finished,
        if there is one that is not too old.
        """
        rollout = self.found.pop(key, None)
        return rollout if rollout is not None and rollout.oldest_version >= oldest else None

    def forget(self, before: int) -> None:
        """Remove the files of steps before `before`.
        A run that goes back further than that samples again.
        """
        for file in self.directory.glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) < before:
                file.unlink()

    def close(self) -> None:
        """Flush to the disk what was written, and let go of the file."""
        if self._file is not None:
            number = self._file.fileno()
            self._safely(lambda: os.fsync(number))
            self._file.close()
            self._file, self._unwritten = None, b""

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.jsonl"

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

    def _read(self, file: Path) -> list[tuple[str, Key, Rollout]]:
        """Every whole line; the others are counted, and reported once per file."""
        found, spoilt = [], []
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
            try:
                if line:
                    found.append(_parsed(line))
            except (ValueError, TypeError, RecursionError) as error:
                spoilt.append((number, error))
        if spoilt:
            self.skipped += len(spoilt)
            log.warning(
                "%s: %d of %d lines cannot be used (the first: line %d, %s); they are skipped, and "
                "their rollouts sampled again",
                file,
                len(spoilt),
                len(spoilt) + len(found),
                *spoilt[0],
            )
        return found


def _parsed(line: bytes) -> tuple[str, Key, Rollout]:
    """The life, the key and the rollout of a line. ValueError, TypeError: it is torn or spoilt."""
    fields = json.loads(line.decode("utf-8"), parse_constant=_refused)
    if (
        not isinstance(fields, list)
        or len(fields) not in (3, 4)
        or not isinstance(fields[-1], dict)
    ):
        raise ValueError("not the line of a rollout")
    life = fields[2] if len(fields) == 4 else _BEFORE_LIVES
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields[-1].items()
    }
    rollout = Rollout(**values)
    whole = (*fields[:2], rollout.weight_version, *rollout.response_ids, *rollout.versions)
    if not isinstance(life, str) or not all(type(number) is int for number in whole):
        raise ValueError("the name of a life or a whole number is neither")
    if not all(math.isfinite(logprob) for logprob in rollout.logprobs):
        raise ValueError("a log-prob is no finite number")
    return life, (fields[0], fields[1]), rollout


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number to train on")


def _shared(lives: dict[str, int], life: str) -> int:
    """The newest weights of `life` that the last life descends from: every life between them began
    with those of its first step, and knows nothing of what had come after. -1 for an unknown life.
    """
    if life not in lives and life != _BEFORE_LIVES:
        return -1
    steps = list(lives.values())
    return min(steps[list(lives).index(life) + 1 if life in lives else 0 :], default=-1)


def _of_known_weights(rollout: Rollout, shared: int) -> Rollout:
    """The rollout; tokens of weights that are lost count as older than the last shared ones."""
    if max(rollout.versions, default=rollout.weight_version) <= shared:
        return rollout
    versions = tuple(version if version <= shared else shared - 1 for version in rollout.versions)
    return dataclasses.replace(
        rollout,
        weight_version=versions[-1] if versions else shared - 1,
        token_versions=versions if len(set(versions)) > 1 else (),
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
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(lives, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def _whole_lines(path: Path) -> Path:
    """The path; a torn last line of its file is ended, so that the next one stands alone."""
    if path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return path
