"""The trusted process inside a sandbox: keeps a runner ready, watches it while it works, and ends
every process that it started.

One line of JSON in, one out. The guard imports what should be preloaded and forks each runner, so a
call begins in milliseconds. It is process 1 of its own process namespace where it can be (in
bubblewrap always); then its end is the end of every process in there. Elsewhere it finds
descendants by their user, by their process group, and by adopting orphans. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from megatron_stare.rollout.sandbox import kernel
from megatron_stare.rollout.sandbox import runner as sandbox_runner
from megatron_stare.rollout.sandbox.call_monitor import CallMonitor, Runner, empty_directory

CLEANUP_SECONDS = 5.0


class Dirty(Exception):
    """Something could not be ended or removed; the sandbox must not be used again."""


class Guard:
    """Serves requests until its input ends. Each is answered by its result, and then by
    {"ready": true}, when every process and file that it left is gone."""

    def __init__(self, settings: dict[str, Any], request_fd: int, answer_fd: int) -> None:
        self.settings = settings
        self.request_fd = request_fd
        self.answer_fd = answer_fd
        self.held: set[str] = set(settings["held"])
        self.path_fds: dict[str, int] = {}
        self.runner: Runner | None = None

    def start(self) -> None:
        """Preload, fork the first runner, and say what protects this sandbox."""
        settings = self.settings
        for name in settings["preload"]:
            try:
                __import__(name)
            except Exception as error:
                self._answer({"error": f"cannot import {name!r} ({error})"})
                os._exit(1)
        if not settings["confined"]:
            for place in sys.path:
                with contextlib.suppress(OSError):
                    self.path_fds[place] = os.open(place, os.O_PATH | os.O_DIRECTORY)
        settings["user_id"] = kernel.usable_user(settings["user_id"]) if os.geteuid() == 0 else 0
        if settings["user_id"]:
            os.chown(settings["directory"], settings["user_id"], settings["user_id"])
        settings["keep_group"] = not self.is_first and not self.has_own_user
        self.runner = self._fork()
        self._answer({"held": sorted(self.held)})

    @property
    def is_first(self) -> bool:
        """Process 1 of a process namespace: `kill -1` reaches exactly this sandbox's processes."""
        return os.getpid() == 1

    @property
    def has_own_user(self) -> bool:
        """The code runs as a user of its own: `kill -1` as that user reaches exactly the processes
        of this sandbox.
        """
        return self.settings["user_id"] not in (0, kernel.NOBODY)

    def serve(self) -> None:
        """Answer requests, one at a time."""
        for request in self._requests():
            if request["do"] == "run":
                self._answer(self._call(request))
            if request["do"] == "reset" or self.runner is None:
                self._renew()  # while no caller waits
            # A message of its own: if cleaning up fails, the next call gets another interpreter.
            self._answer({"ready": True})

    def finish(self) -> None:
        """End every process and remove the directory."""
        with contextlib.suppress(Dirty, OSError):
            self._end_processes()
            self._empty_directory()
            os.rmdir(self.settings["directory"])

    def _requests(self) -> Iterator[dict[str, Any]]:
        pieces: list[bytes] = []  # of a line; joined once, for a request may be long
        while chunk := os.read(self.request_fd, 1 << 16):
            *lines, rest = chunk.split(b"\n")
            for line in lines:
                yield json.loads(b"".join([*pieces, line]))
                pieces = []
            pieces.append(rest)

    def _answer(self, message: dict[str, Any]) -> None:
        sandbox_runner.send(self.answer_fd, message)

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        """One call: feed, watch, judge, stop. Returns the fields of interpreter.Execution."""
        runner = self.runner
        assert runner is not None
        if request["keep"]:
            self._signal_all(signal.SIGCONT)
            self._discard(runner)
        started = time.monotonic()
        monitor = CallMonitor(runner, request, self.settings, self.request_fd)
        reason, detail = monitor.until_done()
        seconds = time.monotonic() - started
        if request["keep"] and reason in ("ok", "error", "memory"):
            monitor.drain()
            self._signal_all(signal.SIGSTOP)  # nothing of a session runs between its calls
        else:
            self._end_processes()
            monitor.drain()
            runner.close()
            self.runner = None
        return {
            "reason": "output limit" if monitor.exceeded else reason,
            "detail": monitor.excess if monitor.exceeded else detail,
            "seconds": seconds,
            "value": monitor.value,
            "stdout": monitor.text("stdout"),
            "stderr": monitor.text("stderr"),
            "alive": self.runner is not None,
        }

    def _discard(self, runner: Runner) -> None:
        """Drop what was written between two calls of a session."""
        for descriptor in (*runner.output, runner.report):
            with contextlib.suppress(BlockingIOError):
                while os.read(descriptor, 1 << 16):
                    pass

    def _renew(self) -> None:
        """A fresh runner in an empty directory; an untouched one stays."""
        if self.runner is not None:
            self._end_processes()
            self.runner.close()
            self.runner = None
        self._empty_directory()
        self.runner = self._fork()

    def _fork(self) -> Runner:
        limits = dict(self.settings["limits"])
        if not self.has_own_user and not self.is_first:
            limits["NPROC"] += tasks_of(self.settings["user_id"] or os.geteuid())
        pipes = [os.pipe() for _ in range(4)]
        (out, out_end), (err, err_end), (request_end, request), (report, report_end) = pipes
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                quiet = os.open(os.devnull, os.O_RDONLY)
                for source, target in ((quiet, 0), (out_end, 1), (err_end, 2)):
                    os.dup2(source, target)
                keep = {0, 1, 2, request_end, report_end, *self.path_fds.values()}
                for descriptor in range(3, max(keep) + 64):
                    if descriptor not in keep:
                        with contextlib.suppress(OSError):
                            os.close(descriptor)
                sandbox_runner.run(
                    {**self.settings, "limits": limits}, request_end, report_end, self.path_fds
                )
            finally:
                os._exit(1)
        for descriptor in (out_end, err_end, request_end, report_end):
            os.close(descriptor)
        runner = Runner(pid, {out: "stdout", err: "stderr"}, request, report)
        greeting = b""
        while not greeting.endswith(b"\n"):
            chunk = os.read(report, 1 << 12)
            if not chunk:
                said = os.read(err, 1 << 14).decode(errors="replace")
                self._answer({"error": f"the runner did not start: {said}"})
                os._exit(1)
            greeting += chunk
        self.held |= set(json.loads(greeting)["held"])
        for descriptor in (out, err, request, report):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)
        return runner

    def _signal_all(self, number: int) -> None:
        """Send a signal to every process of this sandbox at once, so that none can escape by a
        fork.
        """
        with contextlib.suppress(ProcessLookupError):
            if self.is_first:
                os.kill(-1, number)
            elif self.has_own_user:
                child = os.fork()
                if child == 0:
                    with contextlib.suppress(BaseException):
                        kernel.become(self.settings["user_id"])
                        os.kill(-1, number)
                    os._exit(0)
                os.waitpid(child, 0)
            elif self.runner is not None:
                os.killpg(self.runner.pid, number)

    def _end_processes(self) -> None:
        """Kill until no child is left, orphans included."""
        deadline = time.monotonic() + CLEANUP_SECONDS
        while time.monotonic() < deadline:
            self._signal_all(signal.SIGKILL)
            if not self.is_first and not self.has_own_user:
                for child in children_of(os.getpid()):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
            for _ in range(100):  # ended processes take a moment to be collected
                try:
                    if not os.waitpid(-1, os.WNOHANG)[0]:
                        time.sleep(0.0005)
                except ChildProcessError:
                    return
        raise Dirty("processes are left")

    def _empty_directory(self) -> None:
        try:
            empty_directory(self.settings["directory"])
        except OSError as error:
            raise Dirty(f"the directory cannot be emptied: {error}") from None


def _processes() -> Iterator[int]:
    yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def tasks_of(user_id: int) -> int:
    """The number of threads that the user runs: RLIMIT_NPROC counts them all."""
    total = 0
    for pid in _processes():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == user_id:
                total += len(os.listdir(f"/proc/{pid}/task"))
    return total


def children_of(parent: int) -> list[int]:
    """The direct children, zombies included."""
    found = []
    for pid in _processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                found.append(pid)
    return found


def main() -> None:
    """Started by rollout/sandbox/sandbox.py:
    settings in argv, requests on stdin, answers on stdout.
    """
    settings = json.loads(sys.argv[1])
    request_fd, answer_fd = os.dup(0), os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)
    if settings["namespaces"]:
        settings["held"] = _enter_namespaces(settings)
    kernel.set_readable(False)
    guard = Guard(settings, request_fd, answer_fd)
    try:
        try:
            # The kernel keeps signals without a handler from process 1, also those of the code.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if os.getpid() != 1:
                # By default the signal ends the guard before it has removed anything.
                signal.signal(signal.SIGTERM, _leave)
                kernel.die_with_parent(signal.SIGTERM)
                kernel.adopt_orphans()
            guard.start()
            os.dup2(quiet, 2)
            guard.serve()
        # The parent's end shows twice, by the end of input and by the signal: once is enough.
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except (EOFError, BrokenPipeError, Dirty):
        pass
    finally:
        guard.finish()
        os._exit(0)


def _leave(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise EOFError


def _enter_namespaces(settings: dict[str, Any]) -> list[str]:
    """Continue as process 1 of new namespaces, if they are allowed. The protections they give."""
    had = kernel.unshare()
    if not had:
        return []
    child = os.fork()
    if child:
        _wait_outside(child, settings["directory"])
    kernel.die_with_parent()
    had |= kernel.private_view(
        settings["directory"], settings["disk_bytes"], settings["disk_entries"]
    )
    if "disk" in had:
        settings["watch_disk"] = ""
    return sorted(had)


def _wait_outside(child: int, directory: str) -> NoReturn:
    """The first process, outside the new process namespace: each of the two ends with the other."""

    def end(*_: object) -> None:
        # The guard may have seen the end of its input first. This signal then arrives while the
        # directory is removed, and must not stop that.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    kernel.die_with_parent(signal.SIGTERM)
    os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        empty_directory(directory)
        os.rmdir(directory)
    os._exit(0)
