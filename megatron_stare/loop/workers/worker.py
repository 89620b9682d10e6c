"""A worker process: one share of the prompts, sampled and judged beside the trainer.

It has an engine of its own (an embedded one, or one that asks the run's servers), and a judge,
tools, sandboxes and a journal; `answer` does what the trainer's end (remote.py) asks for. It ends
with the trainer's process, however that dies, and its own children end with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_stare.collect.frames import frame
from megatron_stare.collect.journal import Journal, Key, journal_directory
from megatron_stare.collect.judging import build_judge
from megatron_stare.collect.own_share import OwnShare
from megatron_stare.collect.shares import Again, Known, is_streamed
from megatron_stare.config import Config
from megatron_stare.loop.evaluation.examining import Examiner
from megatron_stare.loop.evaluation.sets import EvaluationSet
from megatron_stare.loop.parts import embedded_engine, load_tokenizer, with_tools
from megatron_stare.loop.workers.channel import Channel, Payload, memory_of
from megatron_stare.loop.workers.mirror import PoolReplica
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.sync.served_engine import served_model

# What the trainer's end is told.
GROUP, BROKEN, DONE, FAILED, FATAL = "group", "broken", "done", "failed", "fatal"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True)
class Plan:
    """Which share of how many over all nodes, and how many processes share this machine."""

    config: Config
    number: int
    count: int
    per_node: int
    local_ranks: int
    device: int | None  # the GPU of the node's first rank

    @property
    def journaled(self) -> bool:
        """Whether finished rollouts outlive the process. A round of the embedded engine is sampled
        again instead: what is decoded together stays together, so that it repeats itself.
        """
        return self.config.rollout.engine == "sglang" or is_streamed(self.config)


class Opening(NamedTuple):
    """What a process needs to know of the run to begin: its lives (journal.py), and, where it takes
    the place of one that died, which prompts up to `highest` are under way.
    """

    lives: dict[str, int]
    highest: int = -1
    indices: frozenset[int] = frozenset()


def main(connection: Connection, plan: Plan) -> None:
    """Serve until the trainer closes its end."""
    os.setsid()  # Ctrl-C is the trainer's to handle
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(2, 1)  # what a verifier prints must not look like the run's own output
    os.environ["LOCAL_WORLD_SIZE"] = str(max(plan.local_ranks, plan.per_node))
    channel = Channel(connection)
    try:
        worker = Worker(plan, channel)
    except Exception as error:
        channel.send((FATAL, type(error).__name__, str(error)))
        return
    with contextlib.closing(worker):
        while True:
            try:
                (method, call, arguments), payload = channel.receive()
            except (EOFError, OSError):
                os._exit(1)  # the trainer has died; children of this process notice it themselves
            if method == "close":
                break
            worker.answer(method, call, arguments, payload)


class Worker:
    """The share and what it samples with."""

    def __init__(self, plan: Plan, channel: Channel) -> None:
        self.plan, self.channel = plan, channel
        self.config = config = own_part(plan.config, plan)
        if plan.device is not None:
            torch.cuda.set_device(plan.device)
        self.judge = build_judge(config)
        tokenizer = load_tokenizer(config.policy.hf_checkpoint)
        self.pool: PoolReplica | None = None
        if config.rollout.engine == "sglang":
            self.pool = PoolReplica(config.sglang, served_model(config, tokenizer))
        plain: Any = self.pool or embedded_engine(config, tokenizer)
        self.plain, self.engine = plain, with_tools(plain, config, tokenizer)
        self.share = OwnShare(config, self.engine, self.judge)
        self.examiner = Examiner(config, self.engine, self.judge, _wait)
        self._examining = ThreadPoolExecutor(1, thread_name_prefix="examiner")

    def answer(self, method: str, call: int, arguments: tuple[Any, ...], payload: Payload) -> None:
        """Do what a message asks for; what brings a result is answered with its number `call`."""
        if method == "open":
            self.share = OwnShare(self.config, self.engine, self.judge, self._journal(*arguments))
        elif method == "begin":
            self._begin(*arguments)
        elif method == "weights":
            self.plain.load_weights(list(_tensors(arguments[1], payload)), arguments[0])
        elif method == "servers":
            assert self.pool is not None, "told of servers by a run that has some"
            self.channel.send((DONE, call, self.pool.update(*arguments)))
        elif method == "halt":
            done = self.share.halt()
            done.add_done_callback(lambda _: self.channel.send((DONE, call, None)))
        elif method == "known":
            found = self.share.known()
            table = [(index, *(len(part) for part in known)) for index, known in found.items()]
            parts = (part.numpy().tobytes() for known in found.values() for part in known)
            self.channel.send((DONE, call, table), memory_of(parts))
        elif method == "examine":
            self._examining.submit(self._examine, call, *arguments)
        elif method == "abort":
            self.engine.abort()
        elif method == "advance":
            self.share.advance(*arguments)
        elif method == "stop":
            self.share.stop()
        else:
            raise ValueError(f"no message is called {method}")

    def close(self) -> None:
        """End what was started."""
        self.share.close()
        self.engine.close()
        self._examining.shutdown()
        self.judge.close()

    def _journal(self, opening: Opening) -> Journal | None:
        """With what earlier lives, or a process before this one, left in it."""
        if not self.plan.journaled:
            return None
        number, count = self.plan.number, self.plan.count
        lives, highest, indices = opening

        def mine(key: Key) -> bool:
            return key[0] % count == number and (key[0] > highest or key[0] in indices)

        return Journal(journal_directory(self.config), f"share_{number}", mine, lives)

    def _examine(
        self, call: int, one: EvaluationSet, places: Sequence[int], directory: Path | None
    ) -> None:
        try:
            rows = self.examiner.rows(one, places, directory, f"share_{self.plan.number}")
        except Exception as error:
            answer: tuple[Any, ...] = (FAILED, call, type(error).__name__, str(error))
        else:
            answer = (DONE, call, rows)
        with contextlib.suppress(OSError):  # nobody is there: this process is about to end
            self.channel.send(answer)

    def _begin(
        self,
        prompts: list[Prompt],
        known: dict[int, tuple[bytes, bytes]],
        again: Again | None,
    ) -> None:
        given = {index: Known(*map(_as_given, parts)) for index, parts in known.items()}
        groups = self.share.begin(prompts, given, again)
        for prompt, group in zip(prompts, groups, strict=True):
            group.add_done_callback(functools.partial(self._tell, prompt.index))

    def _tell(self, index: int, done: Future[Group]) -> None:
        """The trainer's end hears of a judged group, or of why there is none."""
        error, counts = done.exception(), dict(self.share.counts())
        with contextlib.suppress(OSError):  # nobody is there: this process is about to end
            if error is not None:
                self.channel.send((BROKEN, index, type(error).__name__, str(error), counts))
                return
            rollouts = [each for each in done.result().rollouts if isinstance(each, Rollout)]
            # judged: nobody reads the text again
            parts = [frame(dataclasses.replace(rollout, text="")) for rollout in rollouts]
            self.channel.send((GROUP, index, counts), memory_of(parts))


def _wait(futures: Sequence[Future[Any]]) -> None:
    """Until all are done; the first failure is raised."""
    wait(futures, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future.done():
            future.result()


def own_part(config: Config, plan: Plan) -> Config:
    """What is set for a node's machine, or for a server, divided by the processes that share it."""

    def part(whole: int, among: int) -> int:
        return max(1, whole // among)

    sandbox = dataclasses.replace(
        config.sandbox,
        max_concurrency=part(config.sandbox.max_concurrency, plan.per_node),
        max_sessions=part(config.sandbox.max_sessions, plan.per_node),
        warm_workers=config.sandbox.warm_workers
        and part(config.sandbox.warm_workers, plan.per_node),
    )
    given = config.scoring.verifier_processes
    scoring = dataclasses.replace(
        config.scoring, verifier_processes=given and part(given, plan.per_node)
    )
    concurrency = part(config.sglang.max_concurrency, plan.count)
    sglang = dataclasses.replace(config.sglang, max_concurrency=concurrency)
    return dataclasses.replace(config, sandbox=sandbox, scoring=scoring, sglang=sglang)


def _as_given(content: bytes) -> Tensor:
    return torch.from_numpy(numpy.frombuffer(bytearray(content), numpy.uint8))


def _tensors(
    table: list[tuple[str, torch.dtype, tuple[int, ...]]], payload: Payload
) -> Iterator[tuple[str, Tensor]]:
    """Weights by name, out of the bytes that lie behind one another."""
    whole = torch.from_numpy(numpy.frombuffer(payload, numpy.uint8).copy())
    start = 0
    for name, dtype, shape in table:
        size = dtype.itemsize * int(numpy.prod(shape))
        yield name, whole[start : start + size].view(dtype).view(shape)
        start += size
