"""Messages between the trainer and a worker process: small ones as they are, and beside them bytes
in memory that both share, which the receiver maps and does not copy.

The memory has no name: it is handed over as a file descriptor and ends with whoever maps it last,
however that dies.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, BinaryIO

from megatron_stare.config import EngineError, UserError

_NONE, _EMPTY, _MAPPED = range(3)
Payload = mmap.mmap | bytes


def error_of(name: str, text: str) -> Exception:
    """What another process raised, as there: a UserError with its remedy stays one."""
    if name == "UserError":
        return UserError(text)
    return EngineError(text if name == "EngineError" else f"{name}: {text}")


def memory_of(parts: Iterable[bytes | memoryview]) -> BinaryIO:
    """A file without a name that holds the parts, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        file: Any = io.FileIO(os.memfd_create("rollouts"), "r+")
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the caller's to close)
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            view = view[file.write(view) :]
    return file


class Channel:
    """One end of a pair. Any thread may send; one receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any, payload: BinaryIO | None = None) -> None:
        """The message, pickled, and what the file holds. OSError: nobody is there any more."""
        with self._sending:
            kind = _NONE if payload is None else _MAPPED if payload.tell() else _EMPTY
            self._connection.send((kind, message))
            if payload is not None and kind == _MAPPED:
                send_handle(self._connection, payload.fileno(), 0)

    def receive(self) -> tuple[Any, Payload]:
        """The next message; b"" where it comes without bytes. EOFError, OSError: there is none."""
        kind, message = self._connection.recv()
        if kind != _MAPPED:
            return message, b""
        descriptor = recv_handle(self._connection)
        try:
            return message, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """The other end hears of it."""
        self._connection.close()
