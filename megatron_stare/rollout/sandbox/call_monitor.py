"""A call while it runs, seen from the guard: its output, its use of time and disk, and its end.

Standard library only: this file runs inside the sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import time
from dataclasses import dataclass
from typing import Any

TICK_SECONDS = 0.05


@dataclass
class Runner:
    """A child that waits for requests, and the guard's ends of its pipes."""

    pid: int
    output: dict[int, str]  # descriptor -> stdout or stderr
    request: int
    report: int

    def close(self) -> None:
        for descriptor in (*self.output, self.request, self.report):
            os.close(descriptor)


class CallMonitor:
    """Collects a running call's output, and decides when and why the call is over."""

    def __init__(
        self, runner: Runner, request: dict[str, Any], settings: dict[str, Any], control_fd: int
    ) -> None:
        self.runner = runner
        self.settings = settings
        self.keep: bool = request["keep"]
        self.limit: int = settings["output_bytes"]
        # A view: cutting what is sent off a long text would copy the rest each time.
        self.outgoing = memoryview(json.dumps(request).encode() + b"\n")
        self.control_fd = control_fd
        self.collected = {"stdout": bytearray(), "stderr": bytearray()}
        self.report = bytearray()
        self.value: str | None = None
        self.wall_seconds: float = request["wall_seconds"]
        self.deadline = time.monotonic() + self.wall_seconds
        self.processor_start = processor_seconds(runner.pid)
        self.poll = select.poll()
        for descriptor in (*runner.output, runner.report, control_fd):
            self.poll.register(descriptor, select.POLLIN)
        self.poll.register(runner.request, select.POLLOUT)

    def until_done(self) -> tuple[str, str]:
        """(reason, detail for the user)."""
        while True:
            for descriptor, _ in self.poll.poll(TICK_SECONDS * 1000):
                self._handle(descriptor)
            if self.exceeded:
                return "output limit", self.excess
            if b"\n" in self.report or len(self.report) > 16 * (self.limit + 64):
                return self._reported()
            over = self._over()
            if over:
                return over

    @property
    def exceeded(self) -> bool:
        return any(len(data) > self.limit for data in self.collected.values())

    @property
    def excess(self) -> str:
        return f"more than {self.limit} bytes were printed"

    def _handle(self, descriptor: int) -> None:
        if descriptor == self.control_fd:
            raise EOFError  # no request comes during a call, so this is the end of the client
        if descriptor == self.runner.request:
            try:
                self.outgoing = self.outgoing[os.write(descriptor, self.outgoing) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.outgoing = memoryview(b"")
            if not self.outgoing:
                self.poll.unregister(descriptor)
        else:
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:  # closed; only the end of the process ends the call
                self.poll.unregister(descriptor)
            elif descriptor == self.runner.report:
                self.report += chunk
            else:
                self.collected[self.runner.output[descriptor]] += chunk

    def _reported(self) -> tuple[str, str]:
        """The runner's own report. It may be false, about its own result only."""
        try:
            report = json.loads(bytes(self.report).split(b"\n")[0])
            reason, value = report["reason"], report["value"]
            if reason not in ("ok", "error", "memory") or not isinstance(value, str | None):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            return (
                "error",
                "the result could not be read: the code wrote into the channel that carries it",
            )
        if value is not None:
            # Halves of surrogate pairs are no text: every encoder would refuse them.
            value = value.encode("utf-8", "replace").decode()
            self.value = self._cut(value, len(value) > self.limit)
        return reason, "out of memory" if reason == "memory" else ""

    def _over(self) -> tuple[str, str] | None:
        settings = self.settings
        ended, status = os.waitpid(self.runner.pid, os.WNOHANG)
        if ended:
            if os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                if number == signal.SIGXCPU:
                    return (
                        "timeout",
                        f"more than {settings['cpu_seconds']:g} s of processor time were used",
                    )
                return "killed", f"the process was ended by {signal_name(number)}"
            if not status and not self.keep:  # os._exit(0), a usual end of scripts
                return "ok", ""
            return (
                "killed",
                f"the process ended itself (status {os.WEXITSTATUS(status)}) before the code was "
                "done",
            )
        if time.monotonic() > self.deadline:
            return "timeout", f"not done after {self.wall_seconds:g} s"
        if processor_seconds(self.runner.pid) - self.processor_start > settings["cpu_seconds"]:
            return "timeout", f"more than {settings['cpu_seconds']:g} s of processor time were used"
        excess = disk_excess(
            settings["directory"],
            settings["watch_disk"],
            settings["disk_bytes"],
            settings["disk_entries"],
        )
        if excess:
            return "killed", excess
        return None

    def drain(self) -> None:
        """Read the output that was written before the end."""
        for descriptor, name in self.runner.output.items():
            with contextlib.suppress(BlockingIOError):
                while len(self.collected[name]) <= self.limit and (
                    chunk := os.read(descriptor, 1 << 16)
                ):
                    self.collected[name] += chunk

    def text(self, name: str) -> str:
        """The output, cut visibly where it is longer than allowed."""
        data = bytes(self.collected[name])
        return self._cut(data[: self.limit].decode("utf-8", "replace"), len(data) > self.limit)

    def _cut(self, text: str, too_long: bool) -> str:
        return f"{text[: self.limit]}\n[output cut after {self.limit} bytes]" if too_long else text


def processor_seconds(pid: int) -> float:
    """CPU time of a process of this namespace, all threads; -1 if it has ended."""
    try:
        # The id of another process's CPU clock; see clock_getcpuclockid(3).
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return -1.0


def signal_name(number: int) -> str:
    """SIGKILL, or a number: real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def empty_directory(top: str) -> None:
    """Remove everything in a directory, at any depth and with any permissions. OSError: it fails.

    It works on open directories and follows no link, so a process that still runs cannot lead it
    elsewhere.
    """
    number = 0
    place = _opened(top)
    try:
        while names := os.listdir(place):
            for name in names:
                if not _is_directory(name, place):
                    os.unlink(name, dir_fd=place)
                    continue
                inside = _opened(name, place)
                try:
                    for child in os.listdir(inside):
                        if not _is_directory(child, inside):
                            os.unlink(child, dir_fd=inside)
                            continue
                        # brought up, so that no path grows too long to be named
                        number += 1
                        moved = f".removed-{os.getpid()}-{number}"
                        os.close(_opened(child, inside))  # one that is closed cannot be moved
                        os.rename(child, moved, src_dir_fd=inside, dst_dir_fd=place)
                finally:
                    os.close(inside)
                os.rmdir(name, dir_fd=place)
    finally:
        os.close(place)


def _is_directory(name: str, place: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=place, follow_symlinks=False).st_mode)


def _opened(name: str, place: int | None = None) -> int:
    """A directory to list and to change, whatever its permissions were."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        path = f"/proc/self/fd/{found}"
        os.chmod(path, 0o700)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(found)


def disk_excess(top: str, how: str, most_bytes: int, most_entries: int) -> str:
    """The limit that the files under `top` exceed, in words; empty: none.

    `how`: "walk"; "entries", for a file system of its own that bounds its size but not the number
    of its entries; empty if it bounds both. An entry counts as 4 KiB at least.
    """
    too_many = f"more than {most_entries} files were made"
    if how == "entries":
        system = os.statvfs(top)
        return too_many if system.f_files - system.f_ffree > most_entries + 1 else ""
    if how != "walk":
        return ""
    total, entries, waiting = 0, 0, [top]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as listing:
                for entry in listing:
                    entries += 1
                    with contextlib.suppress(FileNotFoundError):
                        total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                    if entries > most_entries:
                        return too_many
                    if total > most_bytes:
                        return f"files of more than {most_bytes} bytes were written"
        except (FileNotFoundError, NotADirectoryError):  # gone meanwhile
            continue
        except OSError as error:  # closed to the guard, or too deep to be measured
            return f"a directory was made that cannot be measured ({error.strerror})"
    return ""
