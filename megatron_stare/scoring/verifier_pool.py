"""A pool of verifier processes with hard deadlines.

Each verifier process has a thread here that starts it, sends it one call after the other and
receives the verdicts. If a verdict does not come within the deadline, or the process dies, the
process is killed and counted, and the sample is tried once more in a new one; then it is
unverifiable. There is no second try if the verifier set a provisional verdict
(`verdict.provisionally`) and the response itself used up time or memory: that verdict holds, so a
response gains nothing by being a bomb. A crash, and a process that got no processor time, are
faults of the machine. The first sample starts the processes. They end with `close`, or with this
process, also if it is killed.

The thread that started a process must outlive it: PR_SET_PDEATHSIG is sent when that thread ends.

A verifier process runs `main` of this module. So the module imports neither torch nor, at its top,
the configuration. The process ends with its parent: by PR_SET_PDEATHSIG on Linux, by the socket's
end elsewhere. RLIMIT_AS limits its memory: a verifier that reaches the limit ends the process, and
the pool starts a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import math
import os
import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_stare.scoring.verdict import (
    Called,
    Sample,
    Verdict,
    adapted,
    announce_with,
    as_verdict,
    groups_of,
    printable,
    unverifiable,
)
from megatron_stare.system import end_with_parent

Spec = tuple[str, dict[str, Any]]  # dotted path of a verifier, and its settings

_ATTEMPTS = 2
_STARTS = 3  # of a process that a signal ends before its first sample
# A verifier that computed for a smaller part of its deadline was kept from working by others.
_BUSY_FRACTION = 0.2
_LONGEST = 5  # deadlines: a process with less than _BUSY_FRACTION of a processor has as many
_START_SECONDS = 120.0
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from megatron_stare.scoring.verifier_pool import main; main(*map(int, sys.argv[2:]))"
)


class _Fault(Exception):
    """The process did not answer, for the reason given. `exhausted`: for want of time or memory,
    not by a crash. `signalled`: a signal ended it, as where the machine's memory runs out.
    `provisional`: the verdict that holds without another attempt.
    """

    def __init__(self, reason: str, exhausted: bool = False) -> None:
        super().__init__(reason)
        self.exhausted, self.signalled = exhausted, False
        self.provisional: Verdict | None = None


class VerifierPool:
    """Judges samples with the verifiers of `specs` in `processes` worker processes.
    Safe to use from many threads.

    deadline: seconds for one sample, and `setting`, which sets it. memory_mib: address space of one
    process; 0: no limit.
    """

    def __init__(
        self,
        specs: Mapping[str, Spec],
        processes: int,
        deadline: float,
        memory_mib: int,
        setting: str = "",
    ) -> None:
        self.specs, self.processes = dict(specs), processes
        self.deadline, self.memory_mib = deadline, memory_mib
        self.setting = setting and f"; {setting} sets this limit"
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._keepers: list[_ProcessKeeper] = []
        self.failure = ""  # why no process can work; nothing is tried again

    def judge(self, name: str, samples: Sequence[Sample], grouped: bool = False) -> list[Verdict]:
        """One Verdict per sample, in order. `grouped`: the verifier is called with all responses to
        a prompt, which have the deadline of one response times their number. UserError: the workers
        cannot start.
        """
        if not samples:
            return []
        groups = groups_of(samples, grouped)
        calls = [_Call(name, [samples[place] for place in places]) for places in groups]
        with self._lock:
            self._start()
            for call in calls:
                self.calls.put(call)
        answers = [call.verdicts.result() for call in calls]
        if self.failure:
            raise _user_error(
                f"the verifier processes of {', '.join(self.specs)} do not work: {self.failure}"
            )
        verdicts: dict[int, Verdict] = {}
        for places, found in zip(groups, answers, strict=True):
            verdicts |= zip(places, found, strict=True)
        return [verdicts[place] for place in range(len(samples))]

    def pids(self) -> list[int]:
        """The ids of the processes that are running."""
        return [keeper.worker.process.pid for keeper in self._keepers if keeper.worker is not None]

    def close(self) -> None:
        """End every process, also in the middle of a sample; samples still waiting become
        unverifiable.
        """
        with self._lock:
            self.closing.set()
            for _ in self._keepers:
                self.calls.put(None)
            for keeper in self._keepers:
                worker = keeper.worker
                if worker is not None:
                    worker.end()  # its thread notices, and collects it
            for keeper in self._keepers:
                keeper.join()
            self._keepers = []

    def _start(self) -> None:
        if self.closing.is_set():
            raise RuntimeError("this verifier pool has been closed")
        while len(self._keepers) < self.processes:
            keeper = _ProcessKeeper(self)
            keeper.start()
            self._keepers.append(keeper)


@dataclass(frozen=True)
class _Call:
    """One call of a verifier. `verdicts`: one for each sample; none if no process can work."""

    name: str
    samples: list[Sample]
    verdicts: Future[list[Verdict]] = field(default_factory=Future)


class _ProcessKeeper(threading.Thread):
    """The thread of one verifier process: starts it, sends it samples, ends it."""

    def __init__(self, pool: VerifierPool) -> None:
        super().__init__(name="verifier", daemon=True)
        self.pool = pool
        self.worker: _VerifierProcess | None = None

    def run(self) -> None:
        while (call := self.pool.calls.get()) is not None:
            verdicts: list[Verdict] = []
            try:
                if not self.pool.failure:
                    verdicts = self._judged(call)
            except Exception as error:  # no process can start, or metadata cannot be pickled
                self.pool.failure = str(error) or type(error).__name__
            call.verdicts.set_result(verdicts)
        self._end_process()

    def _judged(self, call: _Call) -> list[Verdict]:
        """The verdicts of a call. Its first sample has the processes that the call cost."""
        size, kills = len(call.samples), 0
        verdicts: list[Verdict] = []
        while not verdicts and not self.pool.closing.is_set():
            try:
                if self.worker is None:
                    self.worker = self._begun()
                if self.pool.closing.is_set():
                    break
                self.worker.send((call.name, call.samples))
                verdicts = self.worker.verdicts(self.pool.deadline * size, size)
            except _Fault as fault:
                self._end_process()
                kills += 1
                if fault.provisional is not None:
                    verdicts = [dataclasses.replace(fault.provisional, reason=str(fault))] * size
                elif kills == _ATTEMPTS:
                    verdicts = [unverifiable(str(fault))] * size
        first, *others = verdicts or [unverifiable("the verifier pool was closed")] * size
        return [dataclasses.replace(first, kills=kills), *others]

    def _begun(self) -> _VerifierProcess:
        """A process that has loaded the verifiers. UserError: it cannot."""
        for start in range(1, _STARTS + 1):
            try:
                return _VerifierProcess(self.pool)
            except _Fault as fault:
                if fault.signalled and start < _STARTS and not self.pool.closing.is_set():
                    continue
                low = "; raise scoring.verifier_memory_mib if it is low"
                hint = low if self.pool.memory_mib else ""
                raise _user_error(f"{fault} before the first sample{hint}") from None
        raise AssertionError("the last start returns or raises")

    def _end_process(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


def _user_error(message: str) -> Exception:
    """A UserError. Its import is here because verifier processes import this module, and need no
    configuration.
    """
    from megatron_stare.config import UserError

    return UserError(message)


class _VerifierProcess:
    """One process and the socket to it. Started with the verifiers loaded, or UserError."""

    def __init__(self, pool: VerifierPool) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A process that stops within a message must not block this thread for ever.
            limit = struct.pack("ll", int(max(1, pool.deadline)), 0)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            arguments = [
                json.dumps(sys.path),
                str(theirs.fileno()),
                str(os.getpid()),
                str(pool.memory_mib),
            ]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,  # so that what a verifier starts can be killed with it
            )
        self.connection = Connection(ours.detach())
        self.setting = ""  # until the verifiers are loaded
        try:
            self.send(pool.specs)
            state, detail = self._started()
        except _Fault as fault:
            fault.signalled = (self.process.poll() or 0) < 0
            self.kill()
            raise
        if state == FAILED:
            self.kill()
            raise _user_error(detail)
        self.setting = pool.setting

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise _Fault(self._death()) from None

    def receive(self, seconds: float, deadline: float) -> Any:
        """The next message; _Fault when it does not come within `seconds`, the last of a
        `deadline`, or the process has died.
        """
        try:
            if not self.connection.poll(seconds):
                raise _Fault(f"no verdict within {deadline:g} s{self.setting}", exhausted=True)
            return self.connection.recv()
        except (EOFError, OSError):
            raise _Fault(self._death(), self.process.poll() == OUT_OF_MEMORY) from None

    def _started(self) -> tuple[str, str]:
        """The first message of the process, once its verifiers are loaded. _Fault: none comes, in
        _LONGEST times _START_SECONDS if it waits for a processor or a disk.
        """
        for _ in range(_LONGEST):
            if self.connection.poll(_START_SECONDS) or not self._is_runnable():
                break
        found: tuple[str, str] = self.receive(0.0, _START_SECONDS)
        return found

    def verdicts(self, deadline: float, size: int) -> list[Verdict]:
        """The verdicts of a call of `size` samples. _Fault: none came; with the provisional verdict
        if the response itself used up time or memory. A process that waits for a processor most of
        the time has up to _LONGEST deadlines.
        """
        end, used = time.monotonic() + deadline, self._processor_seconds()
        further = _LONGEST - 1  # deadlines
        provisional: Verdict | None = None
        while True:
            try:
                message = self.receive(max(0.0, end - time.monotonic()), deadline)
            except _Fault as fault:
                late = fault.exhausted and self.process.poll() is None
                starved = late and self._processor_seconds() - used < _BUSY_FRACTION * deadline
                # A process that has answered since then sleeps: look at its socket last.
                if starved and further and (self._is_runnable() or self.connection.poll()):
                    end, further = end + deadline, further - 1
                    continue
                if fault.exhausted and not starved:
                    fault.provisional = provisional
                raise
            if isinstance(message, list):
                return message
            (provisional,) = message

    def _is_runnable(self) -> bool:
        """Whether the process computes, or waits for a processor or a disk: it neither sleeps nor
        stops.
        """
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_bytes()
            return stat.rpartition(b")")[2].split()[0] in (b"R", b"D")
        return False

    def _processor_seconds(self) -> float:
        """Processor time of the process, all its threads; infinite if the system has no figure."""
        try:
            # The id of another process's processor clock; see clock_getcpuclockid(3).
            return time.clock_gettime((~self.process.pid << 3) | 2)
        except (OSError, AttributeError):
            return math.inf

    def kill(self) -> None:
        """End the process and whatever it started; returns when it is gone."""
        self.end()
        self.process.wait()
        self.connection.close()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _death(self) -> str:
        try:
            return f"the verifier process ended (exit code {self.process.wait(1.0)})"
        except subprocess.TimeoutExpired:
            return "the verifier process closed its socket"


OUT_OF_MEMORY = 77  # exit code
READY, FAILED = "ready", "failed"


def main(descriptor: int, parent: int, memory_mib: int) -> None:
    """Serve until the socket ends. `memory_mib` 0: no limit."""
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mib:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    os.dup2(2, 1)  # what a verifier prints must not look like the run's own output
    connection = Connection(descriptor)
    try:
        specs = connection.recv()
        try:
            verifiers = {name: load(path, settings) for name, (path, settings) in specs.items()}
            for path, _ in specs.values():
                _warm_up(path)
        except Exception as error:  # whatever a user's module does on import
            connection.send((FAILED, f"{type(error).__name__}: {error}"))
            return
        connection.send((READY, ""))
        announce_with(lambda verdict: connection.send((verdict,)))
        while True:
            name, samples = connection.recv()
            connection.send(_judge(verifiers[name], samples))
    except (EOFError, OSError):
        return  # the pool has closed
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def load(path: str, settings: dict[str, Any]) -> Called:
    """The function at a dotted path, its settings bound."""
    module, _, attribute = path.rpartition(".")
    function = getattr(importlib.import_module(module), attribute)
    return adapted(functools.partial(function, **settings) if settings else function)


def _warm_up(path: str) -> None:
    """Call the module's `warm_up`, if it has one, so that the first sample's deadline does not pay
    for caches and imports.
    """
    getattr(importlib.import_module(path.rpartition(".")[0]), "warm_up", lambda: None)()


def _judge(verifier: Called, samples: Sequence[Sample]) -> list[Verdict]:
    try:
        return [as_verdict(result) for result in verifier(samples)]
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:  # the verifier's own fault, of this call alone
        return [unverifiable(printable(f"{type(error).__name__}: {error}"))] * len(samples)


def _end_with(parent: int) -> None:
    end_with_parent()
    if os.getppid() != parent:  # it died before this line
        os._exit(1)
