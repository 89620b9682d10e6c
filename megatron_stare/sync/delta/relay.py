"""A copy of the trainer's weights next to servers, which load it from their disk.

    <directory>/.written_by_megatron_stare  whose it is; locked while a relay works there
    <directory>/weights/                    a whole model: the directory that servers load
    <directory>/incomplete/                 the same while it is written

An update renames `weights` to `incomplete`, changes it and renames it back, so that whenever the
relay is killed, nothing half written is called `weights`. What a relay holds it only knows while
it runs: one that starts again empties its directory, and is sent everything. Every tensor is read
and hashed before and after an update. All other bytes (headers, index, config.json, tokenizer) and
the names of the files are hashed when they are written, and compared at each update and, with the
times of writing, whenever the trainer asks what the relay holds. So a file that something else
changed is noticed before a server loads it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import torch

from megatron_stare.config import UserError
from megatron_stare.policy.huggingface.files import COMPANIONS, read_header
from megatron_stare.rollout.sglang.weights import results
from megatron_stare.sync.delta.encoding import (
    BLOCK_WORDS,
    SIZES,
    Damaged,
    Table,
    TensorEntry,
    apply,
    digest,
    unpacked,
    words_in,
)
from megatron_stare.sync.disk import INDEX, OWN_MARKER, check_own, save_for_servers
from megatron_stare.system import try_lock

EXTRA_FILES = ("config.json", *COMPANIONS)  # files of a model that are no weights
_HASHED_AT_ONCE = 4  # tensors in memory next to a message
_SILENCE_SECONDS = 600.0  # of a trainer in the middle of a request


class Refused(Exception):
    """An update that does not fit what the relay holds; all of the weights must be sent."""


@dataclass(frozen=True)
class TensorLocation:
    """The file and the range of a tensor's bytes."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


class WeightRelay:
    """`held`: the update whose weights lie in `path`, whole; "" where none do.

    Not for two threads at once.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.path = self.directory / "weights"
        self.held = ""
        self._incomplete = self.directory / "incomplete"
        self._places: dict[str, TensorLocation] = {}
        self._frame = ""  # digest of all bytes that are no tensor's
        self._times: list[int] = []
        self._inflight, self._next, self._seen = "", 0, set[str]()
        self._closing = ExitStack()
        check_own(self.directory, "give the relay another directory")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            marker = self._closing.enter_context((self.directory / OWN_MARKER).open("a"))
            is_own = try_lock(marker)
        except OSError as error:
            raise UserError(
                f"{self.directory} cannot be written ({error.strerror}); give the relay another "
                "directory"
            ) from None
        if not is_own:
            raise UserError(
                f"another relay works in {self.directory}; end it, or give this one a directory of"
                " its own"
            )
        self._workers = self._closing.enter_context(ThreadPoolExecutor(_HASHED_AT_ONCE))
        self._clear()

    def close(self) -> None:
        """Remove the weights, and give the directory back."""
        self._clear()
        self._closing.close()

    def apply(self, content: bytes) -> float:
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
            self.held = self._inflight = ""
            if isinstance(error, Damaged) or (base and isinstance(error, OSError)):
                raise Refused(str(error)) from error
            raise
        return time.perf_counter() - begun

    def check(self) -> None:
        """Hold nothing if a file was written since, or has another header or content."""
        if self.held and not (self._is_intact(self.path) and _times(self.path) == self._times):
            self.held = ""

    def _begin(self, table: Table) -> None:
        """Check that it is this message's turn. The first message of an update ends the use of
        `path` as a model.
        """
        if table.number:
            if (table.update, table.number) != (self._inflight, self._next):
                due = f"part {self._next} of {self._inflight}" if self._inflight else "nothing"
                raise Refused(f"part {table.number} of {table.update} came, and {due} is due")
            return
        if table.base and table.base != self.held:
            raise Refused(f"it changes {table.base}, and here is {self.held or 'nothing'}")
        self.held, self._inflight, self._next, self._seen = "", table.update, 0, set()
        if table.base:
            self.path.rename(self._incomplete)
            return
        self._clear()
        self._places = {}
        self._incomplete.mkdir()
        for name, text in table.files.items():
            if name not in EXTRA_FILES:
                raise Refused(f"{name!r} is not a file of a model")
            (self._incomplete / name).write_bytes(base64.b64decode(text))

    def _end(self, table: Table) -> None:
        """All parts have come: mark `path` as a model again."""
        if missing := self._places.keys() - self._seen:
            raise Refused(f"the update has no {min(missing)}")
        if not table.base:
            index = {name: place.file.name for name, place in self._places.items()}
            (self._incomplete / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
            self._frame = _frame_digest(self._incomplete)
        elif not self._is_intact(self._incomplete):
            raise Refused("a file here was added or removed, or changed outside of its tensors")
        self._incomplete.rename(self.path)
        self._times = _times(self.path)
        self.held, self._inflight = table.update, ""

    def _is_intact(self, directory: Path) -> bool:
        try:
            return _frame_digest(directory) == self._frame
        except (OSError, ValueError):  # gone, or no header
            return False

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
            self._places[info.name] = TensorLocation(
                file, begin + info.begin, entry.dtype, entry.shape
            )

    def _change(self, entry: TensorEntry, blocks: Sequence[memoryview]) -> None:
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
        work: Callable[[TensorEntry, Sequence[memoryview]], None],
        table: Table,
        blocks: Sequence[Sequence[memoryview]],
    ) -> None:
        """Do the work for several tensors at a time; all have ended when it returns or raises."""
        pairs = zip(table.entries, blocks, strict=True)
        results([self._workers.submit(work, *pair) for pair in pairs])

    def _clear(self) -> None:
        for place in (self.path, self._incomplete):
            if os.path.lexists(place):
                shutil.rmtree(place)


def _frame_digest(directory: Path) -> str:
    """SHA-256 over each file's name, size, and content without the tensors of a safetensors file.
    OSError: a file cannot be read.
    """
    found = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = size
            if file.suffix == ".safetensors":  # 8 bytes with the header's length, the header
                length = min(size, 8 + int.from_bytes(stream.read(8), "little"))
                stream.seek(0)
            content = stream.read(length)
        found.update(orjson.dumps([file.name, size, length]) + content)
    return found.hexdigest()


def _times(directory: Path) -> list[int]:
    """The time at which each file was last written."""
    return [file.stat().st_mtime_ns for file in sorted(directory.iterdir())]


def _check_whole(entry: TensorEntry, blocks: Sequence[memoryview]) -> None:
    """Refused where a tensor that was sent whole is not what it should be."""
    if [coding for coding, _ in entry.blocks] != ["full"] or len(blocks[0]) != entry.nbytes:
        raise Refused(f"{entry.name} is not whole")
    if digest(words_in(blocks[0], SIZES[entry.dtype])) != entry.after:
        raise Refused(f"{entry.name} did not arrive as it was sent")


class RelayServer(ThreadingHTTPServer):
    """Serves one relay at host:port (0: a free one), which it closes with itself. UserError: the
    directory or the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, directory: Path, host: str, port: int, key: str = "") -> None:
        self.relay, self.key, self.turn = WeightRelay(directory), key, threading.Lock()
        self.closed = False
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            self.relay.close()
            raise UserError(
                f"--host {host} --port {port}: {error.strerror or error}; give another one"
            ) from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def state(self) -> dict[str, Any]:
        """The answer to the trainer: the update that it holds, and where."""
        return {"held": self.relay.held, "path": str(self.relay.path)}

    def look(self) -> tuple[int, dict[str, Any]]:
        """Status and answer for a question, after a check of the files."""
        with self.turn:
            self.relay.check()
            return 200, self.state()

    def receive(self, content: bytes) -> tuple[int, dict[str, Any]]:
        """Status and answer for a message."""
        with self.turn:
            try:
                seconds = self.relay.apply(content)
            except Refused as error:
                return 409, {"error": str(error)}
            except OSError as error:
                return 507, {"error": str(error)}
            return 200, self.state() | {"seconds": seconds}

    def server_close(self) -> None:
        """Give the port and the directory back."""
        self.closed = True
        super().server_close()
        with self.turn:
            self.relay.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "megatron_stare", ""
    timeout = _SILENCE_SECONDS
    wbufsize = 1 << 16  # an answer in two packets would wait for the first one's acknowledgement
    server: RelayServer

    def do_GET(self) -> None:
        self._serve("/state", lambda _: self.server.look())

    def do_POST(self) -> None:
        self._serve("/update", self.server.receive)

    def _serve(self, path: str, work: Callable[[bytes], tuple[int, dict[str, Any]]]) -> None:
        """Answer the one path of a method. The body is read only if the sender may ask."""
        if self.server.closed:  # a connection from before
            self.close_connection = True
            return None
        given = self.headers.get("authorization", "")
        if self.server.key and not hmac.compare_digest(
            given.encode(), f"Bearer {self.server.key}".encode()
        ):
            return self._refuse(401, "another key than the relay's")
        if self.path != path:
            return self._refuse(404, f"no {self.command} {self.path} here")
        length = self.headers.get("content-length", "0" if self.command == "GET" else "")
        if not length.isdecimal():
            return self._refuse(411, f"content-length is {length!r}")
        content = self.rfile.read(int(length))
        if len(content) == int(length):  # else the trainer is gone
            self._answer(*work(content))
        return None

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True  # whatever follows is not read
        self._answer(status, {"error": reason})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        content = orjson.dumps(answer)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log no requests."""
