"""Rollouts as bytes, and the journal: finished rollouts on disk, which a killed run does not sample
again.

A frame is MAGIC, the lengths of its two parts, their CRC-32, a line of JSON with every field that
is not an array, and then the arrays, little-endian, one after another. Frames follow each other
without a gap; a torn or damaged one does not hide the next. Checkpoints hold rollouts in the same
form.

Each step has one file under run.dir/rollouts, with one frame per rollout. A frame goes to the
operating system as soon as the rollout is finished and is flushed to the disk once per step: a kill
costs at most the frame being written, a power cut at most one step. A rollout's key is its prompt's
index and its number.

Every frame names the *attempt* that wrote it: each start or resume of a run is one. attempts.json
holds the step at which each attempt began. Weights are numbered by step, so a run that goes back to
step 3 makes new weights 4 and 5; rollouts that an earlier attempt sampled with its own weights 4
and 5 come from other weights than those of this and every later attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import struct
import sys
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from megatron_stare.config import Config
from megatron_stare.records import ROLLOUT_ARRAYS, Group, Prompt, Rollout
from megatron_stare.system import atomic_write, sync_directory

log = logging.getLogger(__name__)

Key = tuple[int, int]  # the prompt's index, the rollout's number
# Of prompts that are not judged, by index and number: the finished rollouts, and the unfinished
# ones that can be continued (status "aborted").
PartialRollouts = Mapping[int, Mapping[int, Rollout]]
ATTEMPTS_NAME = "attempts.json"
MOST_UNWRITTEN = 64 << 20  # bytes
_Entry = tuple[str, Key, Rollout]  # with the attempt that wrote it
MAGIC = b"\xf5STARE\r\n"  # no byte 0xf5 in UTF-8
_LENGTHS = struct.Struct("<IQI")  # of the line, of the arrays; checksum of both
_ARRAYS: dict[type, Mapping[str, type[numpy.generic]]] = {
    Prompt: {"token_ids": numpy.int32},
    Rollout: ROLLOUT_ARRAYS,
}


class Frame(NamedTuple):
    """A record that was read."""

    start: int  # the frame's first byte
    record: Prompt | Rollout
    extra: dict[str, Any]  # values that were written along with the record


class InvalidBytes(NamedTuple):
    """Bytes from `start` on that are not a frame."""

    start: int
    reason: str


def frame(record: Prompt | Rollout, **extra: Any) -> bytes:
    """The frame of a record. `extra`: plain values to write along with it."""
    kinds = _ARRAYS[type(record)]
    stored = [each.name for each in dataclasses.fields(record) if each.init]
    plain = {name: getattr(record, name) for name in stored}
    arrays = [plain.pop(name).astype(_on_disk(kind), copy=False) for name, kind in kinds.items()]
    head = {"is": type(record).__name__, "lengths": [len(array) for array in arrays]}
    line = json.dumps([head, extra, plain]).encode() + b"\n"
    body = b"".join([line, *(array.tobytes() for array in arrays)])
    return MAGIC + _LENGTHS.pack(len(line), len(body) - len(line), zlib.crc32(body)) + body


def read_frames(content: bytes) -> Iterator[Frame | InvalidBytes]:
    """Every frame and every stretch that is not a frame, in order. Arrays are copied: a view would
    keep the whole content in memory.
    """
    place = 0
    while place < len(content):
        try:
            found, end = _frame_at(content, place)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            end = content.find(MAGIC, place + 1)
            yield InvalidBytes(place, str(error))
            end = len(content) if end < 0 else end
        else:
            yield found
        place = end


def group_frames(groups: Iterable[tuple[int, Group]]) -> Iterator[bytes]:
    """The frames of judged groups, each given with its place among those of all ranks. Prompts are
    stored without metadata, messages and tools, which training does not need.
    """
    for place, group in groups:
        prompt = dataclasses.replace(group.prompt, metadata={}, messages=(), tools=())
        yield frame(prompt, place=place)
        for rollout in group.rollouts:
            assert isinstance(rollout, Rollout), "only the holder of a group stores it"
            yield frame(rollout)


def groups_in(content: bytes) -> list[Group]:
    """The groups of `group_frames`, of any number of ranks, in the order of their places.
    ValueError: a frame is damaged.
    """
    found: list[tuple[int, Prompt, list[Rollout]]] = []
    for _, record, extra in whole_frames(content):
        if isinstance(record, Prompt):
            found.append((extra["place"], record, []))
        else:
            found[-1][2].append(record)
    found.sort(key=lambda entry: entry[0])
    return [Group(prompt, tuple(rollouts)) for _, prompt, rollouts in found]


def partial_frames(partial: PartialRollouts) -> Iterator[bytes]:
    """A frame for each of these rollouts, with its key."""
    for index, rollouts in partial.items():
        for number, rollout in rollouts.items():
            yield frame(rollout, key=(index, number))


def partial_in(content: bytes) -> PartialRollouts:
    """The rollouts of `partial_frames`. ValueError: a frame is damaged."""
    found: dict[int, dict[int, Rollout]] = {}
    for _, rollout, extra in whole_frames(content):
        index, number = extra["key"]
        assert isinstance(rollout, Rollout), "prompts have no key"
        found.setdefault(index, {})[number] = rollout
    return found


def whole_frames(content: bytes) -> Iterator[Frame]:
    """The frames of these bytes. ValueError: one is damaged."""
    for found in read_frames(content):
        if isinstance(found, InvalidBytes):
            raise ValueError(f"a frame at byte {found.start} is damaged: {found.reason}")
        yield found


def _frame_at(content: bytes, place: int) -> tuple[Frame, int]:
    """The frame at `place`, and its end. ValueError, TypeError, KeyError, RecursionError: no valid
    frame begins there.
    """
    start = place + len(MAGIC) + _LENGTHS.size
    if content[place : place + len(MAGIC)] != MAGIC or start > len(content):
        raise ValueError("no frame begins here")
    line, size, checksum = _LENGTHS.unpack_from(content, place + len(MAGIC))
    end = start + line + size
    with memoryview(content) as view:
        if end > len(content) or zlib.crc32(view[start:end]) != checksum:
            raise ValueError("torn, or its checksum does not match")
    head, extra, plain = json.loads(content[start : start + line])
    made = {kind.__name__: kind for kind in _ARRAYS}[head["is"]]
    arrays, at = {}, start + line
    for (name, kind), length in zip(_ARRAYS[made].items(), head["lengths"], strict=True):
        values = numpy.frombuffer(content, _on_disk(kind), length, at).astype(kind)
        values.flags.writeable = False
        arrays[name], at = values, at + length * _on_disk(kind).itemsize
    if at != end:
        raise ValueError("its arrays are not as long as it says")
    tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
    return Frame(place, made(**tuples, **arrays), extra), end


def _on_disk(kind: type[numpy.generic]) -> numpy.dtype:
    return numpy.dtype(kind).newbyteorder("<")


class Journal:
    """One process writes it, into `folder` of the directory. It reads the frames of all folders
    whose key `mine` accepts.
    """

    def __init__(
        self,
        directory: Path,
        folder: str = "",
        mine: Callable[[Key], bool] = lambda key: True,
        attempts: dict[str, int] | None = None,
    ) -> None:
        """`attempts`: given where another part of the program has started the last of them."""
        self.directory, self.folder, self.mine = directory, directory / folder, mine
        self._attempts = attempts
        self.found: dict[Key, Rollout] = {}  # of earlier attempts, not used yet
        self.skipped = 0  # stretches of the files that are torn, damaged or hold no finite numbers
        self._attempt = ""
        self._file: FileIO | None = None
        self._step = -1
        self._warned = False
        # frames that a full disk refused, tried again with the next rollout; the newest ones
        self._unwritten: deque[bytes] = deque()

    def open(self, step: int, oldest: int | None = None) -> None:
        """Start an attempt at `step`, or join the last of those given, and read what earlier
        attempts finished, without rollouts that have a token of weights before version `oldest`.

        Rollouts of weights that this attempt has lost are kept and count as one step older than
        the newest weights that both attempts share: the log-probs they were sampled with are still
        true, but their version number now belongs to other weights.
        """
        attempts = self._attempts or start_attempt(self.directory, step)
        self._attempt = next(reversed(attempts))
        order = {attempt: place for place, attempt in enumerate(attempts)}
        newest: dict[Key, int] = {}
        for file in _files(self.directory):
            if oldest is not None and _step_of(file) < oldest:
                continue  # its rollouts finished before those weights
            for attempt, key, rollout in self._read(file):
                # A later attempt samples a rollout again where the earlier one was too old for it.
                if self.mine(key) and order.get(attempt, -1) >= newest.get(key, -1):
                    newest[key] = order.get(attempt, -1)
                    self.found[key] = _of_known_weights(rollout, _shared(attempts, attempt))
            self._forget(oldest)
        self.start_step(step)

    def start_step(self, step: int, oldest: int | None = None) -> None:
        """Write to the file of `step` from now on; earlier files are flushed to the disk. Found
        rollouts with a token of weights before version `oldest` are forgotten.
        """
        self._forget(oldest)
        if step != self._step:
            self.close()
            self._step = step
            self._safely(self._write_out)

    def write(self, key: Key, rollout: Rollout) -> None:
        """Write a finished rollout. A full disk is a warning: the run does not need the journal.

        A rollout that has a verdict already is an engine's failure, and better sampled again.
        """
        assert self._attempt, "the journal is open"
        if rollout.verdict:
            return
        self._unwritten.append(frame(rollout, key=key, attempt=self._attempt))
        self._safely(self._write_out)
        while sum(map(len, self._unwritten)) > MOST_UNWRITTEN:
            self._unwritten.popleft()

    def pop(self, key: Key, oldest: int) -> Rollout | None:
        """The rollout that an earlier attempt finished, unless it has a token of weights before
        version `oldest`. Each is returned once.
        """
        rollout = self.found.pop(key, None)
        return rollout if rollout is not None and rollout.oldest_version >= oldest else None

    def close(self) -> None:
        """Flush the file to the disk and close it."""
        file, self._file = self._file, None
        if file is not None:
            self._safely(lambda: os.fsync(file.fileno()))
            self._safely(file.close)

    def _forget(self, oldest: int | None) -> None:
        if oldest is not None:
            self.found = {
                key: each for key, each in self.found.items() if each.oldest_version >= oldest
            }

    def _write_out(self) -> None:
        """Open the file, if it is not open, and write all frames that wait. OSError: the disk is
        full or broken; a frame is in the file as a whole or not at all.
        """
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / f"step_{self._step:08d}.frames").open("ab", buffering=0)
            sync_directory(self.folder)
        while self._unwritten:
            size, rest = os.fstat(self._file.fileno()).st_size, memoryview(self._unwritten[0])
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(size)
                raise
            self._unwritten.popleft()

    def _safely(self, work: Callable[[], object]) -> None:
        """Run `work`; an OSError, of a full or broken disk, is a warning once."""
        try:
            work()
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s: %s; a kill would lose the rollouts that finish from now on",
                    self.directory,
                    error,
                )
            self._warned = True

    def _read(self, file: Path) -> list[_Entry]:
        """All valid entries; one warning per file counts the others."""
        contents: list[bytes] = []
        self._safely(lambda: contents.append(file.read_bytes()))
        entries = [entry for content in contents for entry in _entries(content)]
        found = [entry for entry in entries if not isinstance(entry, InvalidBytes)]
        invalid = [entry for entry in entries if isinstance(entry, InvalidBytes)]
        if invalid:
            self.skipped += len(invalid)
            log.warning(
                "%s: %d of %d entries cannot be used (the first: at byte %d, %s); they are "
                "skipped, and their rollouts sampled again",
                file,
                len(invalid),
                len(entries),
                *invalid[0],
            )
        return found


def journal_directory(config: Config) -> Path:
    """The journal of a run's training rollouts."""
    return Path(config.run.dir) / "rollouts"


def start_attempt(directory: Path, step: int) -> dict[str, int]:
    """Record that an attempt begins at `step`; returns the first step of every attempt so far, the
    new one last. This must happen before the attempt's first frame is written.
    """
    path = directory / ATTEMPTS_NAME
    attempts = {**_read_attempts(path), uuid.uuid4().hex[:12]: step}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(attempts), durable=True)
    except OSError as error:
        log.warning("%s: %s; later attempts of the run could not use its rollouts", path, error)
    return attempts


def forget(directory: Path, before: int) -> None:
    """Remove the files of steps before `before`. A run that goes back further samples again."""
    for file in _files(directory):
        if _step_of(file) < before:
            with contextlib.suppress(OSError):  # a disk that cannot be written now
                file.unlink()


def _files(directory: Path) -> list[Path]:
    """All files of all folders, in the order of their steps."""
    return sorted(directory.rglob("step_*.frames"), key=lambda file: (file.stem, file))


def _step_of(file: Path) -> int:
    return int(file.stem.removeprefix("step_"))


def _entries(content: bytes) -> Iterator[_Entry | InvalidBytes]:
    for found in read_frames(content):
        if isinstance(found, InvalidBytes):
            yield found
        elif (
            not isinstance(found.record, Rollout) or not numpy.isfinite(found.record.logprobs).all()
        ):
            yield InvalidBytes(found.start, "a log-prob is not a finite number")
        else:
            match found.extra:
                case {"key": [int() as prompt, int() as number], "attempt": str() as attempt}:
                    yield attempt, (prompt, number), found.record
                case _:
                    yield InvalidBytes(found.start, "it names no prompt, number and attempt")


def _shared(attempts: dict[str, int], attempt: str) -> int:
    """The newest weights of `attempt` that the last attempt descends from: every attempt after it
    began with the weights of its own first step and never had later ones. All of the last attempt's
    own weights; -1 for an unknown attempt.
    """
    if attempt not in attempts:
        return -1
    steps = list(attempts.values())
    return min(steps[list(attempts).index(attempt) + 1 :], default=sys.maxsize)


def _of_known_weights(rollout: Rollout, shared: int) -> Rollout:
    """The rollout; tokens of lost weights count as older than the newest shared weights."""
    versions = numpy.append(rollout.versions, rollout.weight_version)
    if versions.max() <= shared:
        return rollout
    versions = numpy.where(versions <= shared, versions, shared - 1)
    return dataclasses.replace(
        rollout, weight_version=int(versions[-1]), token_versions=versions[:-1]
    )


def _read_attempts(path: Path) -> dict[str, int]:
    """The first step of each attempt, in order. An unreadable file gives none, so that all earlier
    rollouts count as too old.
    """
    try:
        attempts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(attempts, dict) or any(type(s) is not int for s in attempts.values()):
            raise ValueError("not a table of steps")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s: %s; rollouts of earlier attempts are not used", path, error)
        return {}
    return attempts
