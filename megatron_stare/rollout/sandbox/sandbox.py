"""Run Python that a model wrote, in processes that can harm nothing.

Every call has an interpreter of its own (forked from a warmed-up one, so it starts in
milliseconds), no environment variables of ours, an empty directory that is removed after it, and
limits on CPU and wall time, memory, processes, files and output (`sandbox.*`). When it is over,
every process that it started is dead.

`sandbox.isolation=bubblewrap`: bwrap builds a root of the system's and the interpreter's
directories, read-only, an empty /tmp of bounded size, and namespaces of its own for processes,
network, IPC and host name. `sandbox.isolation=limits` needs no program and no rights. It takes what
the kernel grants; `held` says what that was:
    processes   a process namespace: nothing outside is seen or signalled, nothing survives
    network     an empty network namespace
    disk        a file system of `disk_mib`; without it the directory is measured 20 times a second
    user        root only: the code runs as a user that owns nothing and is nobody else
    files       Landlock (Linux 5.13): only the system's and the interpreter's directories can be
                read (and not /proc), only the call's own directory written
    signals     Landlock (Linux 6.12): signals reach only processes of the same call
    calls       seccomp (x86-64): no sockets, no ptrace, no System V IPC, no mounts, no namespaces,
                no io_uring
Both isolations use all of these that they can; `auto` is bubblewrap where it works.

What they do not stop:
- Either: bugs of the kernel; time and memory channels; reading the interpreter's packages, and what
  of /usr all users may read; `max_processes` processes that use `memory_mib` each (no control group
  is made); a call that uses the whole of a core until its time is over. The code shares its process
  with what reports `value` and `ok`: it can fake both, its own only. A verifier must therefore not
  trust `ok` (scoring/programs/ does not).
- limits without "processes": names and command lines in /proc where "files" is missing; a
  descendant may live until the call is over.
- limits without "files": reading every file that its user may read, and writing those, /tmp and
  /dev/shm included; such files stay. Where "user" is missing too, that user is ours, and /proc
  tells it our environment.
- limits without "user" and "signals", outside a process namespace: signals to our processes.
- limits without "network" and "calls": the network.
- limits without "user", as root: `max_processes` does not bind root.
What is missing of these is logged once per process, as a warning.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron_stare.config import SandboxConfig, UserError
from megatron_stare.rollout.sandbox.process import Isolation, SandboxError, Worker

log = logging.getLogger(__name__)

Reason = Literal["ok", "error", "timeout", "memory", "killed", "output limit"]
_REMEDY = (
    "install it (Debian, Ubuntu: apt-get install bubblewrap) and allow user namespaces "
    "(sysctl user.max_user_namespaces, docker run --security-opt seccomp=unconfined), or set "
    "sandbox.isolation=auto"
)


@dataclass(frozen=True)
class Execution:
    """What one call did. `value` is the repr of a last expression that is not None,
    as a REPL shows it.

    `reason`: ok; error (an exception, or an exit status other than 0; stderr has it); timeout;
    memory; killed (by a signal, or the process ended itself before the code was done); output
    limit. `detail` says more where it is none of the first two. `seconds` is wall time. `alive`:
    the session has kept its variables. `lost`: the sandbox itself ended without an answer, so
    nobody knows what the code did (`reason` is then killed).
    """

    stdout: str
    stderr: str
    value: str | None
    reason: Reason
    seconds: float
    detail: str = ""
    alive: bool = False
    lost: bool = False

    @property
    def ok(self) -> bool:
        return self.reason == "ok"

    def message(self) -> str:
        """What a model is shown: output, errors, value, and why it ended early."""
        parts = [self.stdout, self.stderr, self.value or ""]
        if self.reason not in ("ok", "error"):
            parts.append(f"[{self.reason}: {self.detail}]")
        text = "\n".join(part.rstrip("\n") for part in parts if part)
        return text or "[no output]"


class CodeRunner(Protocol):
    """What local and remote sandboxes have in common. Thread-safe."""

    def run(self, code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        """Run code in a fresh interpreter; `wall_seconds` can only lower the configured limit."""
        ...

    async def run_async(
        self, code: str, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """The same for coroutines."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class Sandbox:
    """A pool of interpreters on this machine. At most `max_concurrency` calls run at once;
    further ones wait.
    """

    def __init__(self, config: SandboxConfig, namespaces: bool = True) -> None:
        """`namespaces` False: leave them out of isolation=limits,
        as a container that forbids them would.
        """
        self.config = config
        self._namespaces = namespaces
        self._guard = threading.Lock()
        self._idle: deque[Worker] = deque()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False
        self._slots = threading.BoundedSemaphore(config.max_concurrency)
        # A worker ends with the thread that started it, so one thread that lasts starts them all.
        self._starter = ThreadPoolExecutor(1, "sandbox-starter")
        self._callers = ThreadPoolExecutor(config.max_concurrency, "sandbox")
        try:
            first = self._starter.submit(self._first).result()
        except BaseException:
            self._starter.shutdown()
            raise
        self.isolation: Isolation = first.isolation
        self.held = first.held
        _warn(self.isolation, self.held)
        self._give_back(first)
        for _ in range(min(config.warm_workers, config.max_concurrency) - 1):
            self._starter.submit(self._warm_up)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        """Run code in a fresh interpreter; `wall_seconds` can only lower the configured limit."""
        with self._slots:
            for last in (False, True):
                worker = self._take()
                try:
                    execution = _execution(
                        worker.call(code, stdin, self._seconds(wall_seconds), keep=False)
                    )
                except (
                    SandboxError
                ) as error:  # an idle worker may have died; a second one that dies, the code killed
                    worker.stop()
                    if last:
                        return _lost(error)
                    continue
                except BaseException:
                    worker.stop()
                    raise
                self._give_back(worker)
                return execution
        raise AssertionError("unreachable")

    async def run_async(
        self, code: str, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """The same for coroutines."""
        return await self.in_thread(functools.partial(self.run, code, stdin, wall_seconds))

    def session(self) -> Session:
        """An interpreter that keeps its variables from call to call;
        it takes a process from its first call on.
        """
        session = Session(self)
        self._sessions.add(session)
        return session

    async def in_thread[T](self, function: Callable[[], T]) -> T:
        """A blocking call, in one of the sandbox's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._callers, function)

    def close(self) -> None:
        """Wait for calls in flight, then end every interpreter, those of open sessions too."""
        with self._guard:
            self._closed = True
        for session in list(self._sessions):
            session.close()
        self._callers.shutdown()
        self._starter.shutdown()
        while self._idle:
            self._idle.popleft().stop()

    def _seconds(self, asked: float | None) -> float:
        limit = self.config.wall_seconds
        return limit if asked is None else min(limit, max(asked, 0.0))

    def _take(self) -> Worker:
        with self._guard:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            if self._idle:
                return self._idle.popleft()
        return self._starter.submit(self._start, self.isolation).result()

    def _give_back(self, worker: Worker) -> None:
        with self._guard:
            if not self._closed and len(self._idle) < self.config.warm_workers:
                self._idle.append(worker)
                return
        worker.stop()

    def _start(self, isolation: Isolation) -> Worker:
        return Worker(self.config, isolation, self._namespaces)

    def _first(self) -> Worker:
        """Starting one is the probe: only a bubblewrap that really ran an interpreter works."""
        asked = self.config.isolation
        if asked in ("auto", "bubblewrap"):
            try:
                return self._start("bubblewrap")
            except SandboxError as error:
                _refuse_preload(self.config, error)
                if asked == "bubblewrap":
                    raise UserError(
                        f"sandbox.isolation=bubblewrap does not work here: {error}; {_REMEDY}"
                    ) from None
                log.info("sandbox: bubblewrap does not work here (%s); isolation=limits", error)
        try:
            return self._start("limits")
        except SandboxError as error:
            _refuse_preload(self.config, error)
            if self._namespaces:
                log.info("sandbox: namespaces do not work here (%s)", error)
                self._namespaces = False
                return self._first()
            raise UserError(
                f"sandbox.python={self.config.python!r} cannot start under sandbox.memory_mib="
                f"{self.config.memory_mib}, open_files={self.config.open_files}: {error}; raise "
                "them"
            ) from None

    def _warm_up(self) -> None:
        try:
            if not self._closed:
                self._give_back(self._start(self.isolation))
        except (
            SandboxError
        ) as error:  # a call that needs one starts it, and says so where that fails too
            log.warning("sandbox: an interpreter did not start: %s", error)


class Session:
    """Calls that share variables, files and processes; frozen between them. One call at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._worker: Worker | None = None
        self._turn = threading.Lock()

    def run(self, code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        """Run code after the earlier calls' code. After timeout, killed or output limit the
        variables are gone (`alive` False), and the next call begins anew."""
        with self._turn, self._sandbox._slots:
            if self._worker is None:
                self._worker = self._sandbox._take()
            try:
                answer = self._worker.call(
                    code, stdin, self._sandbox._seconds(wall_seconds), keep=True
                )
                return _execution(answer)
            except SandboxError as error:
                self._worker.stop()
                self._worker = None
                return _lost(error)

    async def run_async(
        self, code: str, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """The same for coroutines."""
        return await self._sandbox.in_thread(functools.partial(self.run, code, stdin, wall_seconds))

    async def close_async(self) -> None:
        """`close` for coroutines."""
        await self._sandbox.in_thread(self.close)

    def close(self) -> None:
        """End the session's processes and remove its files."""
        with self._turn:
            worker, self._worker = self._worker, None
            if worker is None:
                return
            try:
                worker.reset()
            except SandboxError:
                worker.stop()
                return
            self._sandbox._give_back(worker)


def _execution(answer: dict[str, Any]) -> Execution:
    return Execution(
        answer["stdout"],
        answer["stderr"],
        answer["value"],
        answer["reason"],
        answer["seconds"],
        answer["detail"],
        answer["alive"],
    )


def _lost(error: SandboxError) -> Execution:
    return Execution("", "", None, "killed", 0.0, str(error), lost=True)


def _refuse_preload(config: SandboxConfig, error: SandboxError) -> None:
    if str(error).startswith("cannot import"):
        raise UserError(
            f"sandbox.preload={config.preload}: {error}; install it for sandbox.python, or leave "
            "it out"
        ) from None


@functools.cache
def _warn(isolation: Isolation, held: frozenset[str]) -> None:
    """Say once what this isolation cannot stop here."""
    gaps = missing(held)
    if gaps:
        log.warning(
            "sandbox: isolation=%s here does not stop everything: %s", isolation, "; ".join(gaps)
        )


def missing(held: frozenset[str]) -> list[str]:
    """What code can do for want of protections, in words;
    empty: nothing beyond what the module's docstring says.
    """
    gaps = []
    if "files" not in held:
        reach = (
            "files that all users may read or write"
            if "user" in held
            else "every file that you can read or write"
        )
        gaps.append(f"it reaches {reach} (Landlock, Linux 5.13, is missing)")
    if not held & {"user", "processes", "signals"}:
        gaps.append(
            "it can send signals to your processes (Landlock of Linux 6.12, or root, is missing)"
        )
    if not held & {"network", "calls"}:
        gaps.append("it reaches the network (namespaces and seccomp are missing)")
    if "processes" not in held:
        gaps.append(
            "it has no process namespace: its processes are found by their user or group when a "
            "call ends"
        )
    if "disk" not in held:
        gaps.append("disk_mib is only measured 20 times a second")
    return gaps
