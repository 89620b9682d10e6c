"""Ctrl-C, SIGTERM and SIGUSR1 end a run, with a checkpoint of the last finished step.

A step that is sampling is left at once: launchers kill what is still there half a minute after
their signal (torchrun: 30 s). An optimizer update under way is finished first. On the command line
a second Ctrl-C or SIGTERM ends the process at once, whatever hangs in it.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
POLL_SECONDS = 0.25
# Launchers may deliver one request twice: a signal so soon after the first one is the same request.
SAME_REQUEST_SECONDS = 1.0


class Interrupted(Exception):
    """A signal ended a step before it changed anything."""


class Interrupt:
    """While entered, the first signal asks for a stop. A second Ctrl-C raises KeyboardInterrupt;
    with `exits`, it or a second SIGTERM ends the process, whatever its threads wait for.

    Python gives signals to the main thread alone: entered in another one, only `ask` works. Its
    handlers wait for that thread to leave C code; so a thread of ours reads what came (`exits`).
    """

    def __init__(self, exits: bool = False) -> None:
        self.exits = exits
        self.noted: int = 0  # the signal this process got, 0 for none
        self._previous: dict[int, object] = {}
        self._arrivals: socket.socket | None = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
            if self.exits:
                arrived, self._arrivals = socket.socketpair()
                self._arrivals.setblocking(False)
                signal.set_wakeup_fd(self._arrivals.fileno(), warn_on_full_buffer=False)
                threading.Thread(target=self._listen, args=[arrived], daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()
        if self._arrivals:
            signal.set_wakeup_fd(-1)
            self._arrivals.close()

    def ask(self) -> None:
        """Ask for a stop, as SIGTERM does; from any thread."""
        self.noted = self.noted or signal.SIGTERM

    def asked(self) -> bool:
        """Whether any rank was signalled; the same answer on every rank. Collective."""
        asked = torch.tensor([int(bool(self.noted))], dtype=torch.int32)
        if dist.get_world_size() > 1:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())

    def check(self) -> None:
        """Interrupted, on every rank, if any rank was signalled. Collective."""
        if self.asked():
            raise Interrupted

    @contextmanager
    def ending(self, work: Callable[[], None]) -> Iterator[None]:
        """While entered, `work` is called from another thread once this process is signalled, and
        again until this is left: it ends what would keep the process waiting.
        """
        left = threading.Event()

        def watch() -> None:
            while not left.wait(POLL_SECONDS):
                if self.noted:
                    work()

        thread = threading.Thread(target=watch, name="interrupt", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted and number == signal.SIGINT and not self.exits:
            raise KeyboardInterrupt
        self.noted = number

    def _listen(self, arrived: socket.socket) -> None:
        """Read every signal as it comes; the second request ends the process. SIGUSR1 does
        not ask to end at once: it may come before a launcher's first SIGTERM.
        """
        first = math.inf  # [s] of the monotonic clock
        with arrived:
            while number := int.from_bytes(arrived.recv(1)):
                if number not in SIGNALS:
                    continue
                self.noted = self.noted or number
                if time.monotonic() - first > SAME_REQUEST_SECONDS:
                    # Past the buffer of stderr, which may be in use.
                    os.write(2, b"stopped at once; the same command resumes from a checkpoint\n")
                    os._exit(128 + number)
                if number != signal.SIGUSR1:
                    first = min(first, time.monotonic())
