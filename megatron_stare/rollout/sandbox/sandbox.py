"""Run Python that a model wrote, in processes that can harm nothing.

Every call has an interpreter of its own (forked from a warmed-up one, so it starts in
milliseconds), none of the trainer's environment variables, an empty directory that is removed
after it, and limits on CPU and wall time, memory, processes, files and output (`sandbox.*`). When
it is over, every process that it started is dead.

Nothing that a call does or leaves reaches the next one. An interpreter reports when it is ready
again. If the processes or files of its last call cannot be removed, it is dropped, and the next
call gets another. A call is reported as lost only if its own code ends its interpreter, twice.
SandboxError: no interpreter can be started, `sandbox.max_attempts` times, which is a fault of this
machine and of no code.

`sandbox.isolation=bubblewrap`: bwrap builds a root of the system's and the interpreter's
directories, read-only, an empty /tmp of bounded size, and namespaces of its own for processes,
network, IPC and host name. `sandbox.isolation=limits` needs no program and no rights. It takes what
the kernel grants. `Sandbox.held` says what that was:
    processes   a process namespace: nothing outside is signalled, nothing survives
    network     an empty network namespace
    mounts      a mount namespace (Linux 5.12): all but the call's directory is read-only, and
                /dev/shm is its own and empty
    disk        a file system of `disk_mib`, and of as many files as that holds at 4 KiB each;
                without it the directory is measured 20 times a second
    user        root only: the code runs as a user of its own, which owns nothing
    files       Landlock (Linux 5.13): only the system's and the interpreter's directories can be
                read (of /dev five devices, of /proc its own), only the call's directory written
    signals     a signal reaches only processes of the same call: Landlock (Linux 6.12), or the
                filter of system calls
    attributes  mode, owner, times and attributes of files outside cannot be changed: by user,
                mounts or the filter
    calls       seccomp (x86-64, aarch64): no sockets but pairs of streams, no ptrace, no System V
                IPC, no mounts, no namespaces, no io_uring; no limits, priorities or processor sets
                of other processes
`auto` is bubblewrap where it works, else, except for root, limits; root has to ask for limits by
name.

The filter has to refuse more where code runs as the trainer's own user and has neither "processes"
nor "mounts" (a container without user namespaces, and no root): chmod, chown, utime and extended
attributes altogether (so shutil.copy fails there, shutil.copyfile works), and before Linux 6.12
signals but to the first process and its group (so subprocess's time-out fails), and before Linux
6.2 truncate by name.

docs/security.md says what no isolation stops, docs/tools.md what limits does not. Besides, without
"disk" a file that is deleted while it is open is not measured; without "user", as root,
`max_processes` does not bind root. The code shares its process with what reports `value` and `ok`,
so that a verifier must not trust them (scoring/programs/ does not). What is missing is logged once
per process, as a warning.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from megatron_stare.config import SandboxConfig, UserError
from megatron_stare.rollout.sandbox.interpreter import (
    NEWEST_LANDLOCK,
    Execution,
    Interpreter,
    InterpreterNotReady,
    Isolation,
    SandboxError,
)

log = logging.getLogger(__name__)

OnStart = Callable[[], None] | None

_REMEDY = (
    "install it (Debian, Ubuntu: apt-get install bubblewrap) and allow user namespaces "
    "(sysctl user.max_user_namespaces, docker run --security-opt seccomp=unconfined), or ask for "
    "the weaker sandbox.isolation=limits by name (docs/tools.md says what it does not stop)"
)


class CodeRunner(Protocol):
    """The interface of local and remote sandboxes. Thread-safe."""

    def run(self, code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        """Run code in a fresh interpreter; `wall_seconds` can only lower the configured limit."""
        ...

    async def run_async(self, code: str, on_start: OnStart = None) -> Execution:
        """`run` for coroutines. `on_start` is called, in any thread, when the wait for a free place
        is over.
        """
        ...

    def close(self) -> None:
        """End every process and connection."""
        ...


class Sandbox:
    """A pool of interpreters on this machine. At most `max_concurrency` calls run at once;
    further ones wait.
    """

    def __init__(
        self, config: SandboxConfig, namespaces: bool = True, landlock: int = NEWEST_LANDLOCK
    ) -> None:
        """`namespaces` False: leave them out of isolation=limits,
        as a container that forbids them would. `landlock`: no newer ABI, as of an older kernel.
        """
        self.config = config
        self._namespaces, self._landlock = namespaces, landlock
        self._guard = threading.Lock()
        self._idle: deque[Interpreter] = deque()
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        # Idle sessions that keep a process, the one that was idle for longest first.
        self._keeping: dict[Session, Interpreter] = {}
        self._closed = False
        # An interpreter ends with the thread that started it: one thread, which lasts, starts all.
        self._starter = ThreadPoolExecutor(1, "sandbox-starter")
        # A call runs in one of these threads: their number bounds the calls.
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
        return self._callers.submit(self._fresh, code, stdin, wall_seconds).result()

    async def run_async(self, code: str, on_start: OnStart = None) -> Execution:
        """`run` for coroutines; `on_start` is called when the wait for a free place is over."""
        return await self.in_thread(self._fresh, code, on_start=on_start)

    def session(self) -> Session:
        """An interpreter that keeps its variables from call to call;
        it takes a process from its first call on. Of idle ones sandbox.max_sessions keep theirs.
        """
        session = Session(self)
        self._sessions.add(session)
        return session

    async def in_thread[**P, T](self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """The result of a function that blocks, as soon as one of the sandbox's threads is free."""
        return await asyncio.wrap_future(self._callers.submit(work, *args, **more))

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

    def _fresh(
        self,
        code: str,
        stdin: str = "",
        wall_seconds: float | None = None,
        on_start: OnStart = None,
    ) -> Execution:
        """A call in a fresh interpreter; in one of the sandbox's threads."""
        if on_start is not None:
            on_start()
        for last in (False, True):
            interpreter = self._take()
            try:
                execution = interpreter.call(code, stdin, self._seconds(wall_seconds), keep=False)
            except SandboxError as error:  # once may be an accident
                interpreter.stop()
                if last:
                    return _lost(error)
                continue
            except BaseException:
                interpreter.stop()
                raise
            self._give_back(interpreter)
            return execution
        raise AssertionError("unreachable")

    def _seconds(self, asked: float | None) -> float:
        limit = self.config.wall_seconds
        return limit if asked is None else min(limit, max(asked, 0.0))

    def _take(self) -> Interpreter:
        """An interpreter without processes or files of earlier calls. If it then ends without an
        answer, the call's own code is at fault. SandboxError: none can be started.
        """
        while (idle := self._idle_interpreter()) is not None:
            try:
                idle.prepare()
                return idle
            except InterpreterNotReady as error:
                log.info("sandbox: an interpreter is given up (%s)", error)
                idle.stop()
        attempts = self.config.max_attempts
        for attempt in range(attempts):
            try:
                return self._starter.submit(self._start, self.isolation).result()
            except SandboxError as error:
                failure = error
                time.sleep(0.1 * 2**attempt)
        raise SandboxError(f"no interpreter could be started, {attempts} times: {failure}")

    def _idle_interpreter(self) -> Interpreter | None:
        with self._guard:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            return self._idle.popleft() if self._idle else None

    def _give_back(self, interpreter: Interpreter) -> None:
        with self._guard:
            if not self._closed and len(self._idle) < self.config.warm_workers:
                self._idle.append(interpreter)
                return
        interpreter.stop()

    def _kept(self, session: Session) -> Interpreter | None:
        """The process of an idle session, which is busy or closed from now on; None: there is
        none.
        """
        with self._guard:
            return self._keeping.pop(session, None)

    def _keep(self, session: Session, interpreter: Interpreter) -> None:
        """The session is idle again; the longest idle one may lose its process for it."""
        given_up: list[Interpreter] = []
        with self._guard:
            self._keeping[session] = interpreter
            while len(self._keeping) > self.config.max_sessions:
                oldest = next(iter(self._keeping))
                oldest.given_up = True
                given_up.append(self._keeping.pop(oldest))
        for other in given_up:
            self._reset(other)

    def _reset(self, interpreter: Interpreter) -> None:
        """End a session's processes and files, for the next call."""
        try:
            interpreter.reset()
        except SandboxError:
            interpreter.stop()
            return
        self._give_back(interpreter)

    def _start(self, isolation: Isolation) -> Interpreter:
        return Interpreter(self.config, isolation, self._namespaces, self._landlock)

    def _first(self) -> Interpreter:
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
                if os.geteuid() == 0:  # a weaker isolation is root's own decision
                    raise UserError(
                        "sandbox.isolation=auto takes bubblewrap alone where model code would run "
                        f"as root's child, and it does not work here: {error}; {_REMEDY}, or run "
                        "as another user"
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
        except SandboxError as error:  # a call that needs one starts it, and reports a failure
            log.warning("sandbox: an interpreter did not start: %s", error)


class Session:
    """Calls that share variables, files and processes; frozen between them. One call at a time."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._turn = threading.Lock()
        self.given_up = False  # its process went to other sessions since the last call

    def run(self, code: str, stdin: str = "", wall_seconds: float | None = None) -> Execution:
        """Run code after the earlier calls' code. After timeout, killed or output limit the
        variables are gone (`alive` False), and the next call starts without them; so it does if
        the idle session lost them to others (`restarted`)."""
        return self._sandbox._callers.submit(self._next, code, stdin, wall_seconds).result()

    async def run_async(self, code: str, on_start: OnStart = None) -> Execution:
        """`run` for coroutines; `on_start` is called when the wait for a free place is over."""
        return await self._sandbox.in_thread(self._next, code, on_start=on_start)

    async def close_async(self) -> None:
        """`close` for coroutines; it waits for no place of a call."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """End the session's processes and remove its files."""
        with self._turn:
            interpreter = self._sandbox._kept(self)
            if interpreter is not None:
                self._sandbox._reset(interpreter)

    def _next(
        self,
        code: str,
        stdin: str = "",
        wall_seconds: float | None = None,
        on_start: OnStart = None,
    ) -> Execution:
        """The session's next call; in one of the sandbox's threads."""
        sandbox = self._sandbox
        with self._turn:
            if on_start is not None:
                on_start()
            interpreter = sandbox._kept(self) or sandbox._take()
            restarted, self.given_up = self.given_up, False
            try:
                execution = interpreter.call(code, stdin, sandbox._seconds(wall_seconds), keep=True)
            except SandboxError as error:
                interpreter.stop()
                return _lost(error)
            if execution.alive:
                sandbox._keep(self, interpreter)
            else:
                sandbox._give_back(interpreter)
            return dataclasses.replace(execution, restarted=restarted)


def _lost(error: SandboxError) -> Execution:
    return Execution("", "", None, "killed", 0.0, str(error), lost=True)


def _refuse_preload(config: SandboxConfig, error: SandboxError) -> None:
    if str(error).startswith("cannot import"):
        raise UserError(
            f"sandbox.preload={config.preload}: {error}; install it for sandbox.python, or leave "
            "it out"
        ) from None


@functools.cache
def _warn(isolation: str, held: frozenset[str]) -> None:
    """Print once what this isolation cannot stop on this machine."""
    gaps = missing(held)
    if gaps:
        log.warning(
            "sandbox: isolation=%s here does not stop everything: %s", isolation, "; ".join(gaps)
        )


def missing(held: frozenset[str]) -> list[str]:
    """The acts that missing protections allow to code, in words; empty: none that another isolation
    would stop.
    """
    gaps = []
    if "files" not in held:
        reach = (
            "files that all users may read or write"
            if "user" in held
            else "every file that you can read"
            if "mounts" in held
            else "every file that you can read or write"
        )
        gaps.append(f"it reaches {reach} (Landlock, Linux 5.13, is missing)")
    if "attributes" not in held and "user" not in held:
        gaps.append("it can change mode, owner and times of your files (seccomp is missing)")
    if not held & {"user", "processes", "signals"}:
        gaps.append("it can send signals to your processes (Landlock of Linux 6.12 is missing)")
    if "calls" not in held:
        gaps.append("it meets the whole of the kernel, other processes' limits too (no seccomp)")
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
