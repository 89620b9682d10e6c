"""Messages between the trainer and a worker process, each with an optional payload of bytes.

The message is pickled. The payload lies in memory without a name, which goes over as a file
descriptor: the receiver maps it instead of copying it, and the memory is freed when both processes
have let go of it, even if they are killed. A message queue such as pyzmq would copy every payload
twice and would not report the death of the other process, which the end of a pipe does.
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
    """The error that another process raised; a UserError stays one."""
    if name == "UserError":
        return UserError(text)
    return EngineError(text if name == "EngineError" else f"{name}: {text}")


def memory_of(parts: Iterable[bytes | memoryview]) -> BinaryIO:
    """A file without a name that holds the parts, in memory where the system supports it."""
    if hasattr(os, "memfd_create"):
        file: Any = io.FileIO(os.memfd_create("rollouts"), "r+")
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (the caller closes it)
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            view = view[file.write(view) :]
    return file


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Any, payload: BinaryIO | None = None) -> None:
        """Send a message and the content of the file. OSError: the other process has ended."""
        with self._sending:
            kind = _NONE if payload is None else _MAPPED if payload.tell() else _EMPTY
            self._connection.send((kind, message))
            if payload is not None and kind == _MAPPED:
                send_handle(self._connection, payload.fileno(), 0)

    def receive(self) -> tuple[Any, Payload]:
        """The next message and its payload, b"" without one. EOFError, OSError: no more."""
        kind, message = self._connection.recv()
        if kind != _MAPPED:
            return message, b""
        descriptor = recv_handle(self._connection)
        try:
            return message, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close this end; the other one gets an EOFError."""
        self._connection.close()
