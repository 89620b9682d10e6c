"""The trainer's end of a worker process: a Share whose work is done elsewhere.

It keeps what the process cannot lose: which prompts are under way, and what was known of them. A
process that dies is started again, reads its journal, and is asked for these anew; who waits for
a group does not notice. Groups come back as views of memory that both processes share.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_stare.collect.frames import Spoilt, read_frames
from megatron_stare.collect.shares import Again, Known, running_future, settle
from megatron_stare.config import EngineError
from megatron_stare.loop.evaluation.examining import Row
from megatron_stare.loop.evaluation.sets import EvaluationSet
from megatron_stare.loop.workers.channel import Channel, Payload, error_of
from megatron_stare.loop.workers.worker import (
    BROKEN,
    DONE,
    FAILED,
    FATAL,
    GROUP,
    Opening,
    Plan,
    main,
)
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.sync.announcement import Report, Snapshot

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0  # for a process that is told to end
MOST_DEATHS = 3  # in a row, without a single group in between


class Weights(NamedTuple):
    """An embedded engine's: what lies where in the file, which stays open."""

    version: int
    table: list[tuple[str, torch.dtype, tuple[int, ...]]]
    file: BinaryIO


@dataclass
class _Asked:
    """A prompt under way, what was known of it, and who waits."""

    prompt: Prompt
    known: Known | None
    group: Future[Group]
    again: Again | None


class WorkerShare:
    """Implements Share, by a process that a thread of this one starts, hears and starts again."""

    def __init__(self, plan: Plan, lives: Callable[[int], dict[str, int]]) -> None:
        """`lives`: those of a run whose last one begins at this step."""
        self.plan, self._begun_lives = plan, lives
        self.starts = 0
        self.process: Any = None
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._asked: dict[int, _Asked] = {}
        self._calls: dict[int, tuple[str, tuple[Any, ...], Future[Any]]] = {}
        self._numbers = itertools.count()
        self._counts: dict[int, Mapping[str, int]] = {}  # by the number of its start
        self._lives: dict[str, int] | None = None
        self._highest = -1  # index of a prompt so far
        self._weights: Weights | None = None
        self._snapshot: Snapshot | None = None
        self._step, self._halted, self._stopped, self._closed = -1, False, False, False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._keep, name="worker-share", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # multiprocessing would wait for it for ever

    # --- what the trainer asks for

    def advance(self, step: int) -> None:
        """See Share."""
        with self._lock:
            if self._lives is None:
                self._lives = self._begun_lives(step)
                self._send("open", Opening(self._lives))
            self._step, self._halted = step, self._stopped
            self._send("advance", step)

    def begin(
        self,
        prompts: Sequence[Prompt],
        known: Mapping[int, Known] | None = None,
        again: Again | None = None,
    ) -> list[Future[Group]]:
        """See RankShare."""
        there = known or {}
        asked = [_Asked(p, there.get(p.index), running_future(), again) for p in prompts]
        with self._lock:
            if self._failure is None:
                self._asked |= {each.prompt.index: each for each in asked}
                self._highest = max([self._highest, *(each.prompt.index for each in asked)])
                self._begin(asked)
        if self._failure is not None:
            for each in asked:
                settle(each.group, self._failure)
        return [each.group for each in asked]

    def halt(self) -> Future[None]:
        """See Share."""
        with self._lock:
            self._halted = True
            return self._call("halt")

    def stop(self) -> None:
        """See Share."""
        with self._lock:
            self._halted = self._stopped = True
            self._send("stop")
            asked = list(self._asked.values())
        for each in asked:
            settle(each.group, EngineError("sampling was stopped"))

    def known(self) -> dict[int, Known]:
        """See Share. Waits for the process."""
        with self._lock:
            answer = self._call("known")
        table, payload = answer.result()
        found, place = {}, 0
        for index, *lengths in table:
            parts = []
            for length in lengths:
                parts.append(_tensor_of(payload[place : place + length]))
                place += length
            found[index] = Known(*parts)
        return found

    def counts(self) -> Mapping[str, int]:
        """See Share. As they were when the last group came."""
        with self._lock:
            total: Counter[str] = Counter()
            for counts in self._counts.values():
                total.update(counts)
            return total

    def examine(
        self, one: EvaluationSet, places: Sequence[int], directory: Path | None
    ) -> Future[Sequence[Row]]:
        """These problems of the set, as Examiner.rows has them."""
        with self._lock:
            return self._call("examine", one, places, directory)

    def abort(self) -> None:
        """End what it samples."""
        with self._lock:
            self._send("abort")

    def tell(self, snapshot: Snapshot) -> Future[Report | None]:
        """Of the servers. None: the process died, or has not started."""
        with self._lock:
            self._snapshot = snapshot
            if self._channel is None:
                nothing: Future[Report | None] = Future()
                nothing.set_result(None)
                return nothing
            return self._call("servers", snapshot)

    def give(self, weights: Weights) -> None:
        """To its embedded engine."""
        with self._lock:
            self._weights = weights
            self._send("weights", weights.version, weights.table, payload=weights.file)

    def close(self) -> None:
        """End the process; what is under way is lost."""
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

    def _begin(self, asked: Sequence[_Asked]) -> None:
        known = {
            each.prompt.index: tuple(part.numpy().tobytes() for part in each.known)
            for each in asked
            if each.known
        }
        for again in dict.fromkeys(each.again for each in asked):
            prompts = [each.prompt for each in asked if each.again == again]
            self._send("begin", prompts, known, again)

    def _message(
        self,
        method: str,
        number: int,
        arguments: tuple[Any, ...],
        payload: BinaryIO | None = None,
    ) -> None:
        """Where nobody hears it, whoever is started next will be told what it must know."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send((method, number, arguments), payload)

    # --- the thread

    def _keep(self) -> None:
        deaths = 0
        while True:
            try:
                groups = self._live()
            except Exception as error:  # nobody else would hear of it
                self._fail(
                    EngineError(
                        f"worker process {self.plan.number} could not be started or spoken with "
                        f"({error!r}); sample in the trainer's process with "
                        "rollout.workers_per_node=0"
                    )
                )
                return
            deaths = 1 if groups else deaths + 1
            if self._closed or self._failure is not None:
                return
            ended = f"worker process {self.plan.number} ended (exit code {self.process.exitcode})"
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
            log.warning("%s with %d prompts under way; it is started again", ended, self.under_way)

    @property
    def under_way(self) -> int:
        """Prompts that were begun and are not judged."""
        return sum(not each.group.done() for each in list(self._asked.values()))

    def _live(self) -> int:
        """One process, from its start to its end; how many groups it brought."""
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(
            target=main, args=(theirs, self.plan), name="megatron_stare worker", daemon=True
        )
        self.process.start()
        theirs.close()
        channel, groups = Channel(ours), 0
        with self._lock:
            if self._closed:
                self.process.kill()
            self.starts += 1
            self._channel = channel
            self._tell_all()
        with contextlib.suppress(EOFError, OSError):
            while True:
                groups += self._hear(*channel.receive())
        with self._lock:
            self._channel = None
        channel.close()
        self.process.join()
        with self._lock:
            lost = [n for n, (method, *_) in self._calls.items() if method == "servers"]
            unheard = [self._calls.pop(number)[-1] for number in lost]
        for future in unheard:
            future.set_result(None)
        if self._closed:
            self._fail(EngineError("the worker process was closed"))
        return groups

    def _tell_all(self) -> None:
        """A fresh process: all that is to be known and done."""
        if self._lives is not None:
            self._send("open", Opening(self._lives, self._highest, frozenset(self._asked)))
        if self._weights is not None:
            self._send("weights", *self._weights[:2], payload=self._weights.file)
        if self._snapshot is not None:
            self._call("servers", self._snapshot)
        if self._step >= 0:
            self._send("advance", self._step)
        if self._stopped:
            self._send("stop")
        for number, (method, arguments, _) in sorted(self._calls.items()):
            if method == "halt":
                self._message(method, number, arguments)
        if self._halted and not self._stopped:
            self._call("halt")
        if self._asked:
            self._begin(list(self._asked.values()))
        for number, (method, arguments, _) in sorted(self._calls.items()):
            if method in ("known", "examine"):
                self._message(method, number, arguments)

    def _hear(self, message: tuple[Any, ...], payload: Payload) -> int:
        """What the process says; 1 for a group, or for what was examined."""
        kind, *rest = message
        if kind in (DONE, FAILED):
            number, *value = rest
            with self._lock:
                method, _, future = self._calls.pop(number)
            if kind == FAILED:
                future.set_exception(error_of(*value))
            else:
                future.set_result((*value, payload) if method == "known" else value[0])
            return method == "examine"
        if kind == FATAL:
            self._fail(error_of(*rest))
        elif kind == BROKEN:
            index, name, text, counts = rest
            self._settle(index, counts, error_of(name, text))
        elif kind == GROUP:
            index, counts = rest
            self._settle(index, counts, payload)
            return 1
        return 0

    def _settle(self, index: int, counts: Mapping[str, int], outcome: Payload | Exception) -> None:
        with self._lock:
            self._counts[self.starts] = counts
            asked = self._asked.get(index)
        if asked is not None:
            if isinstance(outcome, Exception):
                settle(asked.group, outcome)
            else:
                settle(asked.group, Group(asked.prompt, _rollouts(outcome)))
            self._forget(index)

    def _forget(self, index: int) -> None:
        """A prompt that is judged; where there is no journal, when all are: a process that is
        started again has to decode together what was decoded together.
        """
        with self._lock:
            if self._stopped:
                return
            if self.plan.journaled:
                self._asked.pop(index, None)
            elif not self.under_way:
                self._asked.clear()

    def _fail(self, error: Exception) -> None:
        """For good: whoever waits hears why, and so does whoever asks from now on."""
        with self._lock:
            self._failure = error
            asked, self._asked = list(self._asked.values()), {}
            calls, self._calls = list(self._calls.values()), {}
        for each in asked:
            settle(each.group, error)
        for method, _, future in calls:
            if method == "servers":
                future.set_result(None)
            else:
                future.set_exception(error)


def _rollouts(payload: Payload) -> tuple[Rollout, ...]:
    found = list(read_frames(payload, copy=False))
    for each in found:
        if isinstance(each, Spoilt):
            raise EngineError(f"a worker process wrote a rollout that is spoilt: {each.reason}")
    return tuple(each.record for each in found)  # type: ignore[union-attr, misc]


def _tensor_of(content: bytes) -> Tensor:
    return torch.from_numpy(numpy.frombuffer(bytearray(content), numpy.uint8))
