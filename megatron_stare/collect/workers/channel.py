"""Messages between the trainer and a worker process, each with an optional payload of bytes.

The message is pickled. The payload lies in memory without a name, which goes over as a file
descriptor: the receiver maps it, and the memory is freed when both processes have let go of it,
even if they are killed. A message queue such as pyzmq would copy every payload twice and would not
report the death of the other process, which the end of a pipe does.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import queue
import tempfile
import threading
from collections.abc import Buffer, Iterable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any, BinaryIO

from megatron_stare.config import EngineError, UserError

CLOSE_SECONDS = 10.0
Payload = mmap.mmap | bytes


def described(error: BaseException) -> tuple[str, str]:
    """An error for another process: its type's name and its text."""
    return type(error).__name__, str(error)


def error_of(name: str, text: str) -> Exception:
    """The error that another process has `described`; a UserError stays one."""
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
    """One end of a connection. Any thread may send; one thread receives.

    A thread of its own writes the messages, so that no caller waits for the other process: two
    processes that both wait until the other one reads would wait for ever.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[tuple[Buffer, BinaryIO | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="channel", daemon=True)
        self._thread.start()

    def send(self, message: Any, payload: BinaryIO | None = None) -> None:
        """Send a message and the content of the file, which no caller closes or changes afterwards.
        A message to a process that has ended is dropped: `receive` reports the end.
        """
        mapped = payload if payload is not None and payload.tell() else None
        self._queue.put((ForkingPickler.dumps((mapped is not None, message)), mapped))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the other process has ended
            while (sent := self._queue.get()) is not None:
                content, mapped = sent
                self._connection.send_bytes(content)
                if mapped is not None:
                    send_handle(self._connection, mapped.fileno(), 0)

    def poll(self, seconds: float | None) -> bool:
        """Whether there is a message, or the end of the connection, within this time; None: wait
        until there is.
        """
        return self._connection.poll(seconds)

    def receive(self) -> tuple[Any, Payload]:
        """The next message and its payload (b"" without one). EOFError, OSError: the connection has
        ended.
        """
        is_mapped, message = self._connection.recv()
        if not is_mapped:
            return message, b""
        descriptor = recv_handle(self._connection)
        try:
            return message, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close this end; the other one gets an EOFError. Messages that it does not read in
        CLOSE_SECONDS are dropped.
        """
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._connection.close()
