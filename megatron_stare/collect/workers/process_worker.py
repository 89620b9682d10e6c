"""The trainer's end of the worker processes.

A ProcessWorker is a RolloutWorker whose work is done in another process. It keeps the prompts that
are in flight and their partial states. A process that dies is started again, reads its journal and
gets these prompts again; the futures of their groups just take longer. Groups come back as views of
memory that both processes share.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_stare.collect.frames import InvalidBytes, read_frames
from megatron_stare.collect.journal import journal_directory, start_attempt
from megatron_stare.collect.rollout_worker import (
    PartialState,
    Resampling,
    assigned,
    decoded_together,
    resolve,
    running_future,
)
from megatron_stare.collect.workers.channel import Channel, Payload, error_of, memory_of
from megatron_stare.collect.workers.worker_main import (
    BROKEN,
    DONE,
    FAILED,
    FATAL,
    GROUP,
    Opening,
    WorkerParts,
    WorkerSettings,
    main,
)
from megatron_stare.config import Config, EngineError
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.rollout.sglang.pool_replica import Report, Snapshot

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0  # for a process to end
MOST_DEATHS = 3  # in a row, without a single group in between


class Weights(NamedTuple):
    """Weights for embedded engines, in an open file of shared memory."""

    version: int
    table: list[tuple[str, torch.dtype, tuple[int, ...]]]  # in the order of the file
    file: BinaryIO


@dataclass
class _InFlight:
    """A prompt that the process samples."""

    prompt: Prompt
    partial: PartialState | None  # from before it was started
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
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._keep_alive, name="process-worker", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # multiprocessing would wait for the process for ever

    # --- what the trainer calls

    def set_step(self, step: int) -> None:
        """The first call starts an attempt of the run in the journal."""
        with self._lock:
            if self._attempts is None:
                self._attempts = self._start_attempt(step)
                self._send("open", Opening(self._attempts))
            self._step, self._paused = step, self._stopped
            self._send("set_step", step)

    def start(
        self,
        prompts: Sequence[Prompt],
        partial: Mapping[int, PartialState] | None = None,
        resampling: Resampling | None = None,
    ) -> list[Future[Group]]:
        """Where the process is down, the next one gets the prompts."""
        states = partial or {}
        started = [_InFlight(p, states.get(p.index), running_future(), resampling) for p in prompts]
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
        """Also a process that is started meanwhile is paused."""
        with self._lock:
            self._paused = True
            return self._call("pause")

    def stop(self) -> None:
        """`partial_states` can still be called."""
        with self._lock:
            self._paused = self._stopped = True
            self._send("stop")
            in_flight = list(self._in_flight.values())
        for each in in_flight:
            resolve(each.group, EngineError("sampling was stopped"))

    def partial_states(self) -> dict[int, PartialState]:
        """Waits for the process's answer."""
        with self._lock:
            answer = self._call("partial_states")
        table, payload = answer.result()
        found, place = {}, 0
        for index, *lengths in table:
            parts = []
            for length in lengths:
                parts.append(_tensor_of(payload[place : place + length]))
                place += length
            found[index] = PartialState(*parts)
        return found

    def counts(self) -> Mapping[str, int]:
        """As they were when the last group came, summed over the processes that there were."""
        with self._lock:
            total: Counter[str] = Counter()
            for counts in self._counts.values():
                total.update(counts)
            return total

    def evaluate(
        self, problems: Any, places: Sequence[int], directory: Path | None
    ) -> Future[Sequence[Any]]:
        """Sample and judge these problems of an evaluation set (WorkerParts.evaluate)."""
        with self._lock:
            return self._call("evaluate", problems, places, directory)

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
            self._send("weights", weights.version, weights.table, payload=weights.file)

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
            self._thread.join()

    # --- to the process; called with the lock held

    def _send(self, method: str, *arguments: Any, payload: BinaryIO | None = None) -> None:
        self._message(method, -1, arguments, payload)

    def _call(self, method: str, *arguments: Any) -> Future[Any]:
        number, future = next(self._numbers), running_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        self._calls[number] = (method, arguments, future)
        self._message(method, number, arguments)
        return future

    def _send_prompts(self, started: Sequence[_InFlight]) -> None:
        states = {
            each.prompt.index: tuple(part.numpy().tobytes() for part in each.partial)
            for each in started
            if each.partial
        }
        for resampling in dict.fromkeys(each.resampling for each in started):
            prompts = [each.prompt for each in started if each.resampling == resampling]
            self._send("start", prompts, states, resampling)

    def _message(
        self,
        method: str,
        number: int,
        arguments: tuple[Any, ...],
        payload: BinaryIO | None = None,
    ) -> None:
        """Send it if the process is up. Otherwise its replacement gets the full state on start."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send((method, number, arguments), payload)

    # --- the thread

    def _keep_alive(self) -> None:
        deaths = 0
        while True:
            try:
                groups = self._run_process()
            except Exception as error:  # otherwise lost with this thread
                self._fail(
                    EngineError(
                        f"worker process {self.settings.number} could not be started or "
                        f"reached ({error!r}); sample in the trainer's process with "
                        "rollout.workers_per_node=0"
                    )
                )
                return
            deaths = 1 if groups else deaths + 1
            if self._closed or self._failure is not None:
                return
            ended = (
                f"worker process {self.settings.number} ended (exit code {self.process.exitcode})"
            )
            if deaths == MOST_DEATHS:
                self._fail(
                    EngineError(
                        f"{ended}, {deaths} times in a row without a single group; what it wrote "
                        "stands above; where memory ran out (exit code -9), lower "
                        "rollout.workers_per_node or scoring.verifier_processes, or sample in the "
                        "trainer's process with rollout.workers_per_node=0"
                    )
                )
                return
            log.warning("%s with %d prompts in flight; it is started again", ended, self.in_flight)

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
        channel, groups = Channel(ours), 0
        with self._lock:
            if self._closed:
                self.process.kill()
            self.starts += 1
            self._channel = channel
            self._send_all()
        with contextlib.suppress(EOFError, OSError):
            while True:
                groups += self._receive(*channel.receive())
        with self._lock:
            self._channel = None
        channel.close()
        self.process.join()
        with self._lock:
            lost = [n for n, (method, *_) in self._calls.items() if method == "servers"]
            unanswered = [self._calls.pop(number)[-1] for number in lost]
        for future in unanswered:
            future.set_result(None)
        if self._closed:
            self._fail(EngineError("the worker process was closed"))
        return groups

    def _send_all(self) -> None:
        """Bring a new process to the state that the last one had."""
        if self._attempts is not None:
            self._send("open", Opening(self._attempts, self._highest, frozenset(self._in_flight)))
        if self._weights is not None:
            self._send("weights", *self._weights[:2], payload=self._weights.file)
        if self._snapshot is not None:
            self._call("servers", self._snapshot)
        if self._step >= 0:
            self._send("set_step", self._step)
        if self._stopped:
            self._send("stop")
        for number, (method, arguments, _) in sorted(self._calls.items()):
            if method == "pause":
                self._message(method, number, arguments)
        if self._paused and not self._stopped:
            self._call("pause")
        if self._in_flight:
            self._send_prompts(list(self._in_flight.values()))
        for number, (method, arguments, _) in sorted(self._calls.items()):
            if method in ("partial_states", "evaluate"):
                self._message(method, number, arguments)

    def _receive(self, message: tuple[Any, ...], payload: Payload) -> int:
        """Handle a message of the process; 1 for a group or an evaluation, else 0."""
        kind, *rest = message
        if kind in (DONE, FAILED):
            number, *value = rest
            with self._lock:
                method, _, future = self._calls.pop(number)
            if kind == FAILED:
                future.set_exception(error_of(*value))
            else:
                future.set_result((*value, payload) if method == "partial_states" else value[0])
            return method == "evaluate"
        if kind == FATAL:
            self._fail(error_of(*rest))
        elif kind == BROKEN:
            index, name, text, counts = rest
            self._resolve(index, counts, error_of(name, text))
        elif kind == GROUP:
            index, counts = rest
            self._resolve(index, counts, payload)
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
                resolve(found.group, Group(found.prompt, _rollouts(outcome)))
            self._forget(index)

    def _forget(self, index: int) -> None:
        """Drop a judged prompt. Without a journal all are dropped together, once all are judged: a
        process that is started again must decode the same prompts in one batch.
        """
        with self._lock:
            if self._stopped:
                return
            if self.settings.journaled:
                self._in_flight.pop(index, None)
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
        for method, _, future in calls:
            if method == "servers":
                future.set_result(None)
            else:
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
        self._file: BinaryIO | None = None
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

    def evaluate(self, problems: Any, directory: Path | None) -> Sequence[Future[Sequence[Any]]]:
        """Sample and judge an evaluation set; prompts that are decoded together go to one process.
        The futures have the rows of Examiner.rows.
        """
        together = decoded_together(self._config, problems.samples)
        owners = assigned(problems.prompts, [0], self._config.rollout.workers, together)
        return [
            worker.evaluate(
                problems,
                [place for place, (_, owner) in enumerate(owners) if owner == number],
                directory,
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
        named = [(name, tensor.detach().contiguous().cpu()) for name, tensor in weights]
        table = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
        file = memory_of(memoryview(_bytes(tensor)) for _, tensor in named)
        for worker in self.workers:
            worker.load_weights(Weights(version, table, file))
        if self._file is not None:
            self._file.close()
        self._file = file

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.close()


def _rollouts(payload: Payload) -> tuple[Rollout, ...]:
    found = list(read_frames(payload, copy=False))
    for each in found:
        if isinstance(each, InvalidBytes):
            raise EngineError(f"a worker process wrote a rollout that is damaged: {each.reason}")
    return tuple(each.record for each in found)  # type: ignore[union-attr, misc]


def _tensor_of(content: bytes) -> Tensor:
    return torch.from_numpy(numpy.frombuffer(bytearray(content), numpy.uint8))


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
