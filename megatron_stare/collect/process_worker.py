"""The trainer's end of the worker processes.

A ProcessWorker is a RolloutWorker whose work is done in another process. It keeps the prompts that
are in flight and their partial rollouts. A process that dies is started again, reads its journal
and gets these prompts again; the futures of their groups just take longer. A process that stands
still, and owes an answer for half of run.hang_timeout, is killed, and so started again.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_stare.collect.journal import (
    PartialRollouts,
    journal_directory,
    partial_frames,
    partial_in,
    start_attempt,
    whole_frames,
)
from megatron_stare.collect.rollout_worker import Resampling, added, resolve, running_future
from megatron_stare.collect.rounds import RolloutWorkers, decoded_together
from megatron_stare.collect.worker_main import (
    BEAT,
    DONE,
    FATAL,
    GROUP,
    Channel,
    Payload,
    WorkerParts,
    WorkerSettings,
    error_of,
    main,
    memory_of,
)
from megatron_stare.config import Config, EngineError
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.sglang.pool import Report, Snapshot
from megatron_stare.rollout.sglang.weights import bytes_of

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0  # for a process to end
BEAT_SECONDS = 1.0  # between two looks at a process
STALL_FRACTION = 0.5  # of run.hang_timeout: the replacement comes before the watchdog ends the run
START_SECONDS = 600.0  # at least, for the first answer
MOST_DEATHS = 3  # in a row, without a single group in between
_REMEDY = "sample in the trainer's process with rollout.workers_per_node=0"

# Weights for embedded engines: their version; name, dtype and shape of each; their bytes in the
# same order, in an open file of shared memory.
Weights = tuple[int, list[tuple[str, torch.dtype, tuple[int, ...]]], BinaryIO]


@dataclass
class _InFlight:
    """A prompt that the process samples."""

    prompt: Prompt
    partial: Mapping[int, Rollout]  # from before it was started, by number
    group: Future[Group]
    resampling: Resampling | None


class ProcessWorker:
    """Implements RolloutWorker. A thread starts the process, receives its messages, and starts it
    again when it dies.
    """

    def __init__(self, settings: WorkerSettings, attempts: Callable[[int], dict[str, int]]) -> None:
        """`attempts`: the run's (journal.py), given the step at which the last one begins."""
        self.settings, self._start_attempt = settings, attempts
        self.starts = 0
        self.process: Any = None
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._in_flight: dict[int, _InFlight] = {}
        self._calls: dict[int, tuple[str, tuple[Any, ...], Future[Any]]] = {}
        self._numbers = itertools.count()
        self._counts: dict[int, Mapping[str, int]] = {}  # by the number of the process's start
        self._attempts: dict[str, int] | None = None
        self._highest = -1  # index of a prompt so far
        self._weights: Weights | None = None
        self._snapshot: Snapshot | None = None
        self._step, self._paused, self._stopped, self._closed = -1, False, False, False
        self._held: Collection[int] = ()
        self._failure: Exception | None = None
        self._is_up, self._asked = False, False  # the process has answered; it owes a beat
        self._thread = threading.Thread(target=self._keep_alive, name="process-worker", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # multiprocessing would wait for the process for ever

    # --- what the trainer calls

    def set_step(self, step: int, held: Collection[int] = ()) -> None:
        """The first call starts an attempt of the run in the journal."""
        with self._lock:
            if self._attempts is None:
                self._attempts = self._start_attempt(step)
                self._open()
            self._step, self._paused, self._held = step, self._stopped, held
            self._send("set_step", step, held)

    def start(
        self,
        prompts: Sequence[Prompt],
        partial: PartialRollouts | None = None,
        resampling: Resampling | None = None,
    ) -> list[Future[Group]]:
        """Send the prompts to the process; if it is down, the next process gets them."""
        known = partial or {}
        started = [
            _InFlight(prompt, known.get(prompt.index, {}), running_future(), resampling)
            for prompt in prompts
        ]
        with self._lock:
            if self._failure is None:
                self._in_flight |= {each.prompt.index: each for each in started}
                self._highest = max([self._highest, *(each.prompt.index for each in started)])
                self._send_prompts(started)
        if self._failure is not None:
            for each in started:
                resolve(each.group, self._failure)
        return [each.group for each in started]

    def pause(self) -> Future[None]:
        """Pause the process, or the one that is started meanwhile."""
        with self._lock:
            self._paused = True
            return self._call("pause")

    def stop(self) -> None:
        """`partial_rollouts` can still be called."""
        with self._lock:
            self._paused = self._stopped = True
            self._send("stop")
            in_flight = list(self._in_flight.values())
        for each in in_flight:
            resolve(each.group, EngineError("sampling was stopped"))

    def partial_rollouts(self) -> PartialRollouts:
        """Waits for the process's answer. EngineError: none came, from its replacement either."""
        patience = max(START_SECONDS, self.settings.config.run.hang_timeout)
        with self._lock:
            answer = self._call("partial_rollouts")
        try:
            return partial_in(answer.result(patience))
        except TimeoutError:
            raise EngineError(
                f"worker process {self.settings.number} has not sent its unfinished rollouts for "
                f"{patience:g} s, so that no checkpoint can be saved; the run resumes from the "
                "last one"
            ) from None

    def counts(self) -> Mapping[str, int]:
        """The sums over all processes of this worker so far, at the time of the last group."""
        with self._lock:
            return added(self._counts.values())

    def evaluate(self, problems: Any, places: Sequence[int], kept: Any) -> Future[Sequence[Any]]:
        """Sample and judge these problems of an evaluation set (WorkerParts.evaluate)."""
        with self._lock:
            return self._call("evaluate", problems, places, kept)

    def abort(self) -> None:
        """Abort all requests of the process's engine."""
        with self._lock:
            self._send("abort")

    def announce(self, snapshot: Snapshot) -> Future[Report | None]:
        """Send the state of the servers. None: the process died, or has not started."""
        with self._lock:
            self._snapshot = snapshot
            if self._channel is None:
                nothing: Future[Report | None] = Future()
                nothing.set_result(None)
                return nothing
            return self._call("servers", snapshot)

    def load_weights(self, weights: Weights) -> None:
        """Load weights into the process's embedded engine."""
        with self._lock:
            self._weights = weights
            self._send("weights", *weights[:2], payload=weights[2])

    def close(self) -> None:
        """End the process; prompts in flight are lost."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            self._send("close")
        self._thread.join(PATIENCE_SECONDS if self._step >= 0 else 0.0)
        if self._thread.is_alive():
            if self.process is not None and self.process.pid is not None:
                self.process.kill()  # else it ends as soon as it has started
            self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            log.warning(
                "worker process %d does not end, even killed; it is left alone",
                self.settings.number,
            )

    # --- to the process; called with the lock held

    def _send(
        self, method: str, *arguments: Any, number: int = -1, payload: BinaryIO | None = None
    ) -> None:
        """Send it if the process is up. Otherwise its replacement gets the full state on start."""
        if self._channel is not None:
            self._channel.send((method, number, arguments), payload)

    def _call(self, method: str, *arguments: Any) -> Future[Any]:
        number, future = next(self._numbers), running_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._calls[number] = (method, arguments, future)
        self._send(method, *arguments, number=number)
        return future

    def _open(self) -> None:
        """Have the process open its journal."""
        self._send("open", self._attempts, self._highest, frozenset(self._in_flight))

    def _send_prompts(self, started: Sequence[_InFlight]) -> None:
        for resampling in dict.fromkeys(each.resampling for each in started):
            alike = [each for each in started if each.resampling == resampling]
            partial = memory_of(partial_frames({e.prompt.index: e.partial for e in alike}))
            self._send("start", [each.prompt for each in alike], resampling, payload=partial)

    # --- the thread

    def _keep_alive(self) -> None:
        deaths, name = 0, f"worker process {self.settings.number}"
        while True:
            try:
                groups = self._run_process()
            except Exception as error:  # otherwise lost with this thread
                why = f"{name} could not be started or reached ({error!r}); {_REMEDY}"
                break
            deaths = 1 if groups else deaths + 1
            if self._closed or self._failure is not None:
                return
            ended = f"{name} ended (exit code {self.process.exitcode})"
            if deaths == MOST_DEATHS:
                why = (
                    f"{ended}, {deaths} times in a row without a single group; what it wrote "
                    "stands above; where memory ran out (exit code -9), lower "
                    "rollout.workers_per_node or scoring.verifier_processes, or "
                    f"{_REMEDY}"
                )
                break
            log.warning("%s with %d prompts in flight; it is started again", ended, self.in_flight)
        self._fail(EngineError(why))

    @property
    def in_flight(self) -> int:
        """Prompts that were started and are not judged."""
        return sum(not each.group.done() for each in list(self._in_flight.values()))

    def _run_process(self) -> int:
        """One process, from its start to its end; returns how many groups it brought."""
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(
            target=main, args=(theirs, self.settings), name="megatron_stare worker", daemon=True
        )
        self.process.start()
        theirs.close()
        channel, groups, ended = Channel(ours), 0, threading.Event()
        with self._lock:
            if self._closed:
                self.process.kill()
            self.starts += 1
            self._channel = channel
            self._is_up, self._asked = False, False
            self._send_all()
        watch = functools.partial(self._watch, self.process, ended)
        threading.Thread(target=watch, name="process-watch", daemon=True).start()
        try:
            while True:
                groups += self._receive(*channel.receive())
        except (EOFError, OSError):
            ended.set()
        with self._lock:
            self._channel = None
        self.process.join(PATIENCE_SECONDS)
        self.process.kill()
        channel.close()
        with self._lock:
            lost = [n for n, (method, *_) in self._calls.items() if method == "servers"]
            unanswered = [self._calls.pop(number)[-1] for number in lost]
        for future in unanswered:
            future.set_result(None)
        if self._closed:
            self._fail(EngineError("the worker process was closed"))
        return groups

    def _watch(self, process: Any, ended: threading.Event) -> None:
        """Ask the process for beats until it has ended; kill it where it owes one for too long.

        This has a thread of its own, because a process that stops in the middle of a message blocks
        the one that receives. Time is counted by looks: while this process stands still itself,
        none passes.
        """
        timeout, owed = self.settings.config.run.hang_timeout, 0.0
        patience = timeout * STALL_FRACTION
        while timeout and not ended.wait(BEAT_SECONDS):
            with self._lock:
                if self._closed:
                    return
                if not self._asked:
                    self._asked, owed = True, 0.0
                    self._send("beat")
                    continue
                calls = [method for method, *_ in self._calls.values()]
            owed += BEAT_SECONDS
            if owed > (patience if self._is_up else max(patience, START_SECONDS)):
                log.warning(
                    "worker process %d has not answered for %g s (run.hang_timeout=%g); it is "
                    "killed. Waiting for it: %s",
                    self.settings.number,
                    patience,
                    timeout,
                    ", ".join([*calls, f"{self.in_flight} prompts"]),
                )
                heartbeat.moved()  # its replacement gets time
                process.kill()
                return

    def _send_all(self) -> None:
        """Bring a new process to the state that the last one had."""
        if self._attempts is not None:
            self._open()
        if self._weights is not None:
            self._send("weights", *self._weights[:2], payload=self._weights[2])
        if self._snapshot is not None:
            self._call("servers", self._snapshot)
        if self._step >= 0:
            self._send("set_step", self._step, self._held)
        if self._stopped:
            self._send("stop")
        for number, (method, arguments, _) in sorted(self._calls.items()):
            if method == "pause":
                self._send(method, *arguments, number=number)
        if self._paused and not self._stopped:
            self._call("pause")
        if self._in_flight:
            self._send_prompts(list(self._in_flight.values()))
        for number, (method, arguments, _) in sorted(self._calls.items()):
            if method in ("partial_rollouts", "evaluate"):
                self._send(method, *arguments, number=number)

    def _receive(self, message: tuple[Any, ...], payload: Payload) -> int:
        """Handle a message of the process; 1 for a group or an evaluation, else 0."""
        kind, *rest = message
        self._is_up = True
        if kind == BEAT:
            self._asked = False
            if rest[0]:
                heartbeat.moved()
        elif kind == FATAL:
            self._fail(error_of(*rest))
        elif kind == DONE:
            number, value, error = rest
            with self._lock:
                method, _, future = self._calls.pop(number)
            if error is not None:
                future.set_exception(error_of(*error))
            else:
                future.set_result(payload if method == "partial_rollouts" else value)
            return method == "evaluate"
        elif kind == GROUP:
            index, counts, error = rest
            self._resolve(index, counts, payload if error is None else error_of(*error))
            if error is None:
                heartbeat.moved()
                return 1
        return 0

    def _resolve(self, index: int, counts: Mapping[str, int], outcome: Payload | Exception) -> None:
        with self._lock:
            self._counts[self.starts] = counts
            found = self._in_flight.get(index)
        if found is not None:
            if isinstance(outcome, Exception):
                resolve(found.group, outcome)
            else:
                rollouts = tuple(each.record for each in whole_frames(outcome))
                resolve(found.group, Group(found.prompt, rollouts))  # type: ignore[arg-type]
            with self._lock:
                if self._stopped:
                    return
                if self.settings.journaled:
                    self._in_flight.pop(index, None)
                # Without a journal all are dropped together, once all are judged: a process that is
                # started again must decode the same prompts in one batch.
                elif not self.in_flight:
                    self._in_flight.clear()

    def _fail(self, error: Exception) -> None:
        """Fail all futures with this error, and every later call."""
        with self._lock:
            self._failure = error
            in_flight, self._in_flight = list(self._in_flight.values()), {}
            calls, self._calls = list(self._calls.values()), {}
        for each in in_flight:
            resolve(each.group, error)
        for *_, future in calls:
            future.set_exception(error)


class WorkerProcesses:
    """The worker processes of a run. They run on the first node: `workers` is empty on every rank
    but 0.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        build: Callable[[Config], WorkerParts],
    ) -> None:
        """The processes start at once and are ready when the trainer is. `build` runs in each."""
        self._config = config
        count = config.rollout.workers if topology.is_first else 0
        on_gpu = config.rollout.engine == "embedded" and torch.cuda.is_available()
        device = torch.cuda.current_device() if on_gpu else None
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # One process imports what all of them need; all workers are forked from it.
        multiprocessing.get_context("forkserver").set_forkserver_preload([build.__module__])
        attempts = functools.cache(functools.partial(start_attempt, journal_directory(config)))
        self.workers = [
            ProcessWorker(
                WorkerSettings(config, build, number, count, local_ranks, device), attempts
            )
            for number in range(count)
        ]

    def announce(self, snapshot: Snapshot) -> Sequence[Future[Report | None]]:
        """Send every process the state of the servers."""
        return [worker.announce(snapshot) for worker in self.workers]

    def evaluate(self, problems: Any, kept: Any) -> Sequence[Future[Sequence[Any]]]:
        """Sample and judge an evaluation set; prompts that are decoded together go to one process.
        The futures have the problems of Examiner.problems.
        """
        together = decoded_together(self._config, problems.samples)
        workers = RolloutWorkers([0], self._config.rollout.workers, self.workers)
        owners = workers.assigned(problems.prompts, together)
        return [
            worker.evaluate(
                problems,
                [place for place, (_, owner) in enumerate(owners) if owner == number],
                kept,
            )
            for number, worker in enumerate(self.workers)
        ]

    def abort(self) -> None:
        """Abort all requests of all processes."""
        for worker in self.workers:
            worker.abort()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights into every process's embedded engine, from memory that all of them map."""
        if not self.workers:
            return
        named = list(weights)
        table = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        file = memory_of(bytes_of(tensor) for _, tensor in named)
        for worker in self.workers:
            worker.load_weights((version, table, file))

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()
