"""A copy of the trainer's weights beside servers, which load it from their disk.

    <directory>/.written_by_megatron_stare  whose it is; locked while a mirror works there
    <directory>/weights/                    a whole model: what servers are told to load
    <directory>/incomplete/                 the same while it is written

An update renames `weights` to `incomplete`, changes it and renames it back, so that whenever the
mirror is killed, nothing half written is called `weights`. What a mirror holds it only knows while
it lives: one that starts again empties its directory, and is sent everything. Every tensor that an
update touches or leaves alone is read and hashed by it, before and after: a file that somebody or
something changed is noticed before a server loads it.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_stare.config import UserError
from megatron_stare.policy.huggingface.files import COMPANIONS, read_header
from megatron_stare.rollout.sglang.weights import results
from megatron_stare.sync.delta.encoding import (
    BLOCK_WORDS,
    Damaged,
    apply,
    digest,
    words_in,
)
from megatron_stare.sync.delta.message import SIZES, Entry, Table, unpacked
from megatron_stare.sync.disk import INDEX, OWN_MARKER, check_own, save_for_servers

BESIDE = ("config.json", *COMPANIONS)  # files of a model that are no weights
_HASHED_AT_ONCE = 4  # tensors in memory beside a message


class Refused(Exception):
    """An update that does not fit what the mirror holds; all of the weights must be sent."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Mirror:
    """`held`: the update whose weights lie in `path`, whole; "" where none do.

    Not for two threads at once.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.path = self.directory / "weights"
        self.held = ""
        self._incomplete = self.directory / "incomplete"
        self._places: dict[str, Place] = {}
        self._under_way, self._next, self._seen = "", 0, set[str]()
        self._closing = ExitStack()
        check_own(self.directory, "give the mirror another directory")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            marker = self._closing.enter_context((self.directory / OWN_MARKER).open("a"))
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another mirror works in {self.directory}; end it, or give this one a directory of"
                " its own"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.directory} cannot be written ({error.strerror}); give the mirror another "
                "directory"
            ) from None
        self._workers = self._closing.enter_context(ThreadPoolExecutor(_HASHED_AT_ONCE))
        self._clear()

    def close(self) -> None:
        """Remove the weights, and give the directory back."""
        self._clear()
        self._closing.close()

    def take(self, content: bytes) -> float:
        """Take one message; with the last of an update `held` becomes that one. Returns seconds.

        Refused: it changes other weights than those that lie here, comes out of turn or is damaged.
        Nothing is held then but what is sent whole. OSError: that cannot be written.
        """
        begun = time.perf_counter()
        base = ""
        try:
            table, blocks = unpacked(content)
            base = table.base
            self._begin(table)
            if base:
                self._each(self._change, table, blocks)
            else:
                self._write(table, blocks)
            self._seen.update(entry.name for entry in table.entries)
            self._next += 1
            if table.last:
                self._end(table)
        except Exception as error:
            self.held = self._under_way = ""
            if isinstance(error, Damaged) or (base and isinstance(error, OSError)):
                raise Refused(str(error)) from error
            raise
        return time.perf_counter() - begun

    def _begin(self, table: Table) -> None:
        """Check that it is this message's turn; with the first one, take back that `path` is a
        model.
        """
        if table.number:
            if (table.update, table.number) != (self._under_way, self._next):
                due = f"part {self._next} of {self._under_way}" if self._under_way else "nothing"
                raise Refused(f"part {table.number} of {table.update} came, and {due} is due")
            return
        if table.base and table.base != self.held:
            raise Refused(f"it changes {table.base}, and here is {self.held or 'nothing'}")
        self.held, self._under_way, self._next, self._seen = "", table.update, 0, set()
        if table.base:
            self.path.rename(self._incomplete)
            return
        self._clear()
        self._places = {}
        self._incomplete.mkdir()
        for name, text in table.files.items():
            if name not in BESIDE:
                raise Refused(f"{name!r} is no file that lies beside weights")
            (self._incomplete / name).write_bytes(base64.b64decode(text))

    def _end(self, table: Table) -> None:
        """All has come: it is a model again."""
        if missing := self._places.keys() - self._seen:
            raise Refused(f"the update has no {min(missing)}")
        if not table.base:
            index = {name: place.file.name for name, place in self._places.items()}
            (self._incomplete / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
        self._incomplete.rename(self.path)
        self.held, self._under_way = table.update, ""

    def _write(self, table: Table, blocks: Sequence[Sequence[memoryview]]) -> None:
        """A part of all the weights, as a file of its own."""
        file = self._incomplete / f"model-{table.number:05d}.safetensors"
        self._each(_check_whole, table, blocks)
        tensors = {
            entry.name: torch.frombuffer(of_entry[0], dtype=getattr(torch, entry.dtype)).reshape(
                entry.shape
            )
            for entry, of_entry in zip(table.entries, blocks, strict=True)
        }
        save_for_servers(tensors, file)
        infos, _ = read_header(file)
        begin = file.stat().st_size - max((info.end for info in infos), default=0)
        entries = {entry.name: entry for entry in table.entries}
        for info in infos:
            entry = entries[info.name]
            self._places[info.name] = Place(file, begin + info.begin, entry.dtype, entry.shape)

    def _change(self, entry: Entry, blocks: Sequence[memoryview]) -> None:
        """One tensor of the weights here: read, checked, changed, checked, written."""
        place = self._places.get(entry.name)
        if place is None or (place.dtype, place.shape) != (entry.dtype, entry.shape):
            raise Refused(f"{entry.name} is not here as {entry.dtype} {list(entry.shape)}")
        with place.file.open("r+b") as file:
            file.seek(place.offset)
            content = bytearray(file.read(entry.nbytes))
            words = words_in(content, SIZES[entry.dtype])
            if len(content) != entry.nbytes or digest(words) != entry.before:
                raise Refused(f"{entry.name} is not here as it was sent")
            if all(coding == "same" for coding, _ in entry.blocks) and entry.before == entry.after:
                return
            if len(entry.blocks) != -(-len(words) // BLOCK_WORDS):
                raise Refused(f"{entry.name} comes in {len(entry.blocks)} blocks")
            for number, ((coding, _), payload) in enumerate(zip(entry.blocks, blocks, strict=True)):
                start = number * BLOCK_WORDS
                apply(coding, payload, words[start : start + BLOCK_WORDS])
            if digest(words) != entry.after:
                raise Refused(f"{entry.name} did not become what it should")
            file.seek(place.offset)
            file.write(content)

    def _each(
        self,
        work: Callable[[Entry, Sequence[memoryview]], None],
        table: Table,
        blocks: Sequence[Sequence[memoryview]],
    ) -> None:
        """Some at a time; all have ended when it returns or raises."""
        pairs = zip(table.entries, blocks, strict=True)
        results([self._workers.submit(work, *pair) for pair in pairs])

    def _clear(self) -> None:
        for place in (self.path, self._incomplete):
            if os.path.lexists(place):
                shutil.rmtree(place)


def _check_whole(entry: Entry, blocks: Sequence[memoryview]) -> None:
    """Refused where a tensor that was sent whole is not what it should be."""
    if [coding for coding, _ in entry.blocks] != ["full"] or len(blocks[0]) != entry.nbytes:
        raise Refused(f"{entry.name} is not whole")
    if digest(words_in(blocks[0], SIZES[entry.dtype])) != entry.after:
        raise Refused(f"{entry.name} did not arrive as it was sent")
