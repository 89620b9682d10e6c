"""A worker process: it samples and judges some of the run's prompts next to the trainer.

It has its own engine (an embedded one, or a client of the run's servers), judge, tools, sandboxes
and journal, and does what the trainer's end (process_worker.py) asks for. It ends with the
trainer's process, however that dies, and its own children end with it.

Messages between the two are pickled. A message may have a payload of bytes, which lies in memory
without a name, which goes over as a file descriptor: the receiver maps it, and the memory is freed
when both processes have let go of it, even if they are killed. A message queue such as pyzmq would
copy every payload twice and would not report the death of the other process, which the end of a
pipe does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import mmap
import os
import queue
import signal
import tempfile
import threading
from collections.abc import Buffer, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler, recv_handle, send_handle
from typing import Any, BinaryIO, NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_stare.collect.journal import (
    Journal,
    Key,
    frame,
    journal_directory,
    partial_frames,
    partial_in,
)
from megatron_stare.collect.local_worker import LocalWorker
from megatron_stare.collect.rollout_worker import Resampling, is_streamed
from megatron_stare.config import Config, EngineError, UserError
from megatron_stare.records import Prompt, Rollout
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.engine import Engine
from megatron_stare.rollout.sglang.pool import PoolReplica
from megatron_stare.scoring.judge import Judge

# Kinds of messages to the trainer: a prompt's judged group, the answer to a call (each with an
# error, or None), the error of a process that cannot start, a sign that the process works.
GROUP, DONE, FATAL, BEAT = "group", "done", "fatal", "beat"
_MOVED_SECONDS = 0.5  # since the last movement, at a look: it was seen by this look
CLOSE_SECONDS = 10.0
Payload = mmap.mmap | bytes
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


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


class WorkerParts(NamedTuple):
    """The parts of a worker process."""

    judge: Judge
    engine: Engine
    pool: PoolReplica | None  # of a run on servers
    evaluate: Callable[..., Any]  # loop/evaluation.py: Examiner.problems


@dataclass(frozen=True)
class WorkerSettings:
    """One of the worker processes of a run."""

    config: Config
    build: Callable[[Config], WorkerParts]
    number: int  # 0 .. count - 1
    count: int
    local_ranks: int  # of the trainer on this machine
    device: int | None  # the GPU of rank 0

    @property
    def journaled(self) -> bool:
        """Whether a journal keeps finished rollouts. A round of the embedded engine is sampled
        again instead: the same prompts are decoded in one batch again, so that it repeats itself.
        """
        return self.config.rollout.engine == "sglang" or is_streamed(self.config)


def main(connection: Connection, settings: WorkerSettings) -> None:
    """Serve until the trainer closes its end."""
    os.setsid()  # Ctrl-C is the trainer's to handle
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # a verifier's output must not look like the run's own
    os.environ["LOCAL_WORLD_SIZE"] = str(max(settings.local_ranks, settings.count))
    channel = Channel(connection)
    try:
        worker = WorkerProcess(settings, channel)
    except Exception as error:
        channel.send((FATAL, *described(error)))
        channel.close()
        return
    with contextlib.closing(worker), heartbeat.waiting():
        while True:
            try:
                (method, call, arguments), payload = channel.receive()
            except (EOFError, OSError):
                os._exit(1)  # the trainer has died; this process's children notice it themselves
            if method == "close":
                break
            worker.answer(method, call, arguments, payload)


class WorkerProcess:
    """A LocalWorker that is called through a channel."""

    def __init__(self, settings: WorkerSettings, channel: Channel) -> None:
        self.settings, self.channel = settings, channel
        self.config = divided(settings.config, settings.count)
        if settings.device is not None:
            torch.cuda.set_device(settings.device)
        self.parts = settings.build(self.config)
        self.worker = LocalWorker(self.config, self.parts.engine, self.parts.judge)
        self._evaluating = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._motion, self._progress = heartbeat.Motion(), (0, 0.0)

    def answer(self, method: str, call: int, arguments: tuple[Any, ...], payload: Payload) -> None:
        """Do what a message asks for. A result is sent back with the number `call`."""
        if method == "open":
            self.worker.close()
            journal = self._journal(*arguments)
            self.worker = LocalWorker(self.config, self.parts.engine, self.parts.judge, journal)
        elif method == "start":
            self._start(payload, *arguments)
        elif method == "weights":
            self.parts.engine.load_weights(list(_tensors(arguments[1], payload)), arguments[0])
        elif method == "servers":
            assert self.parts.pool is not None, "only a run on servers announces them"
            self._reply(call, self.parts.pool.update(*arguments))
        elif method == "pause":
            paused = self.worker.pause()
            paused.add_done_callback(lambda _: self._reply(call))
        elif method == "partial_rollouts":
            partial = partial_frames(self.worker.partial_rollouts())
            self._reply(call, payload=memory_of(partial))
        elif method == "evaluate":
            self._evaluating.submit(self._evaluate, call, *arguments)
        elif method == "abort":
            self.parts.engine.abort()
        elif method == "set_step":
            self.worker.set_step(*arguments)
        elif method == "beat":
            self.worker.in_turn(self._beat)
        elif method == "stop":
            self.worker.stop()
        else:
            raise ValueError(f"no message is called {method}")

    def close(self) -> None:
        """End all parts."""
        self.worker.close()
        self.parts.engine.close()
        self._evaluating.shutdown()
        self.parts.judge.close()

    def _journal(
        self, attempts: dict[str, int], highest: int, in_flight: frozenset[int]
    ) -> Journal | None:
        """The journal of the run's attempts, with the rollouts of this worker that earlier
        processes finished: of the prompts up to `highest`, those in flight alone.
        """
        if not self.settings.journaled:
            return None
        number, count = self.settings.number, self.settings.count

        def mine(key: Key) -> bool:
            return key[0] % count == number and (key[0] > highest or key[0] in in_flight)

        return Journal(journal_directory(self.config), f"worker_{number}", mine, attempts)

    def _beat(self) -> None:
        """Send a beat, and whether anything moved since the last: a part of a server's answer, a
        rollout, a token of the embedded engine.
        """
        still, _ = self._motion.look()
        before, pool = self._progress, self.parts.pool
        if pool is not None:
            self._progress = pool.requests.progress
        self.channel.send((BEAT, still < _MOVED_SECONDS or self._progress != before))

    def _reply(self, call: int, value: Any = None, payload: BinaryIO | None = None) -> None:
        self.channel.send((DONE, call, value, None), payload)

    def _evaluate(self, call: int, *arguments: Any) -> None:
        try:
            self._reply(call, self.parts.evaluate(*arguments, f"worker_{self.settings.number}"))
        except Exception as error:
            self.channel.send((DONE, call, None, described(error)))

    def _start(
        self, partial: Payload, prompts: list[Prompt], resampling: Resampling | None
    ) -> None:
        groups = self.worker.start(prompts, partial_in(partial), resampling)
        for prompt, group in zip(prompts, groups, strict=True):
            group.add_done_callback(functools.partial(self._send_group, prompt.index))

    def _send_group(self, index: int, done: Future[Any]) -> None:
        """Send a judged group, or the error that ended it or its sending: a future would only log
        what this callback raises.
        """
        payload: BinaryIO | None = None
        error: tuple[str, str] | None = None
        try:
            rollouts = [each for each in done.result().rollouts if isinstance(each, Rollout)]
            payload = memory_of(map(frame, rollouts))
        except BaseException as fault:
            error = described(fault)
        self.channel.send((GROUP, index, dict(self.worker.counts()), error), payload)


def divided(config: Config, count: int) -> Config:
    """The config of one of `count` processes: limits of the machine or of a server are divided."""

    def part(whole: int) -> int:
        return max(1, whole // count)

    sandbox = dataclasses.replace(
        config.sandbox,
        max_concurrency=part(config.sandbox.max_concurrency),
        max_sessions=part(config.sandbox.max_sessions),
        warm_workers=config.sandbox.warm_workers and part(config.sandbox.warm_workers),
    )
    verifiers = config.scoring.verifier_processes
    scoring = dataclasses.replace(config.scoring, verifier_processes=verifiers and part(verifiers))
    sglang = dataclasses.replace(config.sglang, max_concurrency=part(config.sglang.max_concurrency))
    return dataclasses.replace(config, sandbox=sandbox, scoring=scoring, sglang=sglang)


def _tensors(
    table: list[tuple[str, torch.dtype, tuple[int, ...]]], payload: Payload
) -> Iterator[tuple[str, Tensor]]:
    """Weights by name, from the bytes that lie one after another."""
    whole = torch.from_numpy(numpy.frombuffer(payload, numpy.uint8).copy())
    start = 0
    for name, dtype, shape in table:
        size = dtype.itemsize * int(numpy.prod(shape))
        yield name, whole[start : start + size].view(dtype).view(shape)
        start += size
