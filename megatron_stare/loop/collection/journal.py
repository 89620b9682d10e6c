"""Finished rollouts on disk, so that a killed run does not sample them again.

One file per step under run.dir/rollouts, a line per rollout, handed to the operating system as soon
as it is there:
what a kill can cost is the line it falls into. A rollout is found again by its prompt's index and
its number.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from io import FileIO
from pathlib import Path
from typing import Any

from megatron_stare.records import Rollout

log = logging.getLogger(__name__)

Key = tuple[int, int]  # the prompt's index, the rollout's number


class Journal:
    """Written and read by one rank.
    `found` is what an earlier life of the run left and nobody has asked for yet.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found: dict[Key, Rollout] = {}
        self._file: FileIO | None = None
        self._step = -1
        self._warned = False
        self._unwritten = b""  # what a full disk did not take; tried again with the next rollout

    def open(self, step: int) -> None:
        """Go on at `step`. Rollouts of steps that the run has lost are kept,
        and count as one step old.

        Their weights are gone, and those that will come under the same number are others; the
        log-probs they were sampled with are still true.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(self.directory.glob("step_*.jsonl")):
            for key, rollout in _read(file):
                self.found[key] = _not_newer(rollout, step)
        self.turn(step)

    def turn(self, step: int) -> None:
        """Write to the file of `step` from now on."""
        if step != self._step:
            self.close()
            self._step = step
            self._file = _whole_lines(self._path(step)).open("ab", buffering=0)

    def write(self, key: Key, rollout: Rollout) -> None:
        """Note a finished rollout. Where the disk is full that is a warning:
        the run needs no journal to go on.
        """
        assert self._file is not None, "the journal is open"
        self._unwritten += (json.dumps([*key, dataclasses.asdict(rollout)]) + "\n").encode()
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s: %s; a kill would cost the rollouts that are finished meanwhile",
                    self.directory,
                    error,
                )
            self._warned = True

    def take(self, key: Key, oldest: int) -> Rollout | None:
        """The rollout that an earlier life of the run finished,
        if there is one that is not too old.
        """
        rollout = self.found.pop(key, None)
        return rollout if rollout is not None and rollout.oldest_version >= oldest else None

    def forget(self, before: int) -> None:
        """Remove the files of steps before `before`.
        A run that goes back further than that samples anew.
        """
        for file in self.directory.glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) < before:
                file.unlink()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file, self._unwritten = None, b""

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.jsonl"


def _read(file: Path) -> list[tuple[Key, Rollout]]:
    """Every whole line; a torn one is reported."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            index, place, fields = json.loads(line)
            lists: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in fields.items()
            }
            found.append(((index, place), Rollout(**lists)))
        except (ValueError, TypeError):
            log.warning("%s, line %d: torn by a kill; its rollout is sampled again", file, number)
    return found


def _not_newer(rollout: Rollout, step: int) -> Rollout:
    if max(rollout.versions, default=rollout.weight_version) <= step:
        return rollout
    versions = tuple(version if version <= step else step - 1 for version in rollout.versions)
    return dataclasses.replace(
        rollout,
        weight_version=versions[-1] if versions else step - 1,
        token_versions=versions if len(set(versions)) > 1 else (),
    )


def _whole_lines(path: Path) -> Path:
    """The path; a torn last line of its file is ended, so that the next one stands alone."""
    if path.is_file() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return path
