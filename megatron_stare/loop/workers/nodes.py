"""The run's first rank and the first ranks of the other nodes, beside the collectives.

Rank 0 decides which prompts a stream of rollouts draws and which groups a step trains, and looks
after the servers. Over one connection to each node it hands prompts to that node's shares, and is
told of every judged group what all ranks know of it: the outline. The tokens stay where they are
until they are trained. What becomes of the servers goes the same way.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megatron_stare.collect.outlines import outline_row, outlined
from megatron_stare.collect.shares import Holding, Known, Share, running_future, settle
from megatron_stare.config import EngineError
from megatron_stare.loop.workers.channel import error_of
from megatron_stare.loop.workers.links import Link, linked
from megatron_stare.loop.workers.remote import WorkerShare
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt
from megatron_stare.sync.announcement import Report, Snapshot

GROUP, BROKEN, DONE = "group", "broken", "done"  # what rank 0 is told


class DistantShare:
    """Implements Share for one of another node's."""

    def __init__(self, node: DistantNode, number: int) -> None:
        self._node, self._number = node, number
        self._asked: dict[int, Future[Group]] = {}
        self._counts: Mapping[str, int] = {}

    def advance(self, step: int) -> None:
        """See Share."""
        self._node.send(self._number, "advance", step)

    def begin(
        self, prompts: Sequence[Prompt], known: Mapping[int, Known] | None = None
    ) -> list[Future[Group]]:
        """See Share. What there is of them already, their own node has (Holding.known)."""
        asked = {prompt.index: running_future() for prompt in prompts}
        self._asked |= asked
        self._node.send(self._number, "begin", list(prompts))
        return list(asked.values())

    def halt(self) -> Future[None]:
        """See Share."""
        return self._node.call(self._number, "halt")

    def stop(self) -> None:
        """See Share."""
        self._node.send(self._number, "stop")
        self.fail(EngineError("sampling was stopped"))

    def counts(self) -> Mapping[str, int]:
        """See Share. As they were when the last group came."""
        return self._counts

    def close(self) -> None:
        """Its own rank ends it."""

    def hear(self, index: int, counts: Mapping[str, int], outcome: Group | Exception) -> None:
        """What became of a prompt."""
        self._counts = counts
        if asked := self._asked.pop(index, None):
            settle(asked, outcome)

    def fail(self, error: Exception) -> None:
        """Whoever waits hears why."""
        for asked in list(self._asked.values()):
            settle(asked, error)


class DistantNode:
    """Rank 0's end of the connection to the first rank of another node."""

    def __init__(self, rank: int, link: Link, per_node: int) -> None:
        self.rank, self.link = rank, link
        self.shares = [DistantShare(self, number) for number in range(per_node)]
        self._calls: dict[int, Future[Any]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._lost: EngineError | None = None
        self._thread = threading.Thread(target=self._hear, name=f"node-of-{rank}", daemon=True)
        self._thread.start()

    def send(self, share: int, method: str, *arguments: Any, call: int = -1) -> None:
        """To one of its shares; -1: to all of them."""
        try:
            if self._lost is not None:
                raise OSError
            self.link.send((share, method, call, arguments))
        except OSError:
            self._lose()

    def call(self, share: int, method: str, *arguments: Any) -> Future[Any]:
        """`send` for what is answered."""
        with self._lock:
            self._number += 1
            number, future = self._number, running_future()
            self._calls[number] = future
        self.send(share, method, *arguments, call=number)
        return future

    def close(self) -> None:
        """End the connection; its rank closes the shares."""
        self.link.hang_up()
        self._thread.join()

    def _hear(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                (kind, *rest), _ = self.link.receive()
                if kind == DONE:
                    number, value = rest
                    with self._lock:
                        future = self._calls.pop(number)
                    future.set_result(value)
                else:
                    number, index, counts, told = rest
                    outcome = outlined(told, self.rank) if kind == GROUP else error_of(*told)
                    self.shares[number].hear(index, counts, outcome)
        self.link.close()
        self._lose()

    def _lose(self) -> None:
        """For good: the rank has ended, and the run will."""
        with self._lock:
            self._lost = EngineError(
                f"rank {self.rank}, the first of its node, has closed its connection to rank 0"
            )
            calls, self._calls = list(self._calls.values()), {}
        for future in calls:
            future.set_exception(self._lost)
        for share in self.shares:
            share.fail(self._lost)


class OwnNode:
    """A node's own end: has its shares do what rank 0 asks for, in a thread."""

    def __init__(
        self, rank: int, link: Link, shares: Sequence[WorkerShare], holding: Holding
    ) -> None:
        self.rank, self.link, self.shares, self.holding = rank, link, shares, holding
        self._thread = threading.Thread(target=self._hear, name="node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection."""
        self.link.hang_up()
        self._thread.join()

    def _hear(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    (number, method, call, arguments), _ = self.link.receive()
                    self._answer(number, method, call, arguments)
        finally:  # whatever ends this thread, rank 0 does not wait for it
            self.link.close()
            self.link.hang_up()

    def _answer(self, number: int, method: str, call: int, arguments: tuple[Any, ...]) -> None:
        if method == "servers":
            reports = all_of([share.tell(*arguments) for share in self.shares])
            reports.add_done_callback(lambda done: self._tell(DONE, call, done.result()))
        elif method == "halt":
            halted = self.shares[number].halt()
            halted.add_done_callback(lambda _: self._tell(DONE, call, None))
        elif method == "begin":
            self._begin(number, *arguments)
        elif method == "advance":
            self.shares[number].advance(*arguments)
        elif method == "stop":
            self.shares[number].stop()
        else:
            raise ValueError(f"no message is called {method}")

    def _begin(self, number: int, prompts: list[Prompt]) -> None:
        known = self.holding.take_known([prompt.index for prompt in prompts])
        share = self.shares[number]
        for prompt, group in zip(prompts, share.begin(prompts, known), strict=True):
            group.add_done_callback(functools.partial(self._note, number, prompt.index))

    def _note(self, number: int, index: int, done: Future[Group]) -> None:
        """Hold a judged group, and then tell of it, or of why there is none."""
        counts, error = dict(self.shares[number].counts()), done.exception()
        if error is not None:
            self._tell(BROKEN, number, index, counts, (type(error).__name__, str(error)))
            return
        self.holding.groups[index] = done.result()
        self._tell(GROUP, number, index, counts, outline_row(done.result()))

    def _tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # rank 0 has ended, and the run with it
            self.link.send(message)


class Nodes:
    """Every node's first rank, as rank 0 sees them; on any of the others, its own end."""

    def __init__(
        self,
        topology: Topology,
        ranks: Sequence[int],
        per_node: int,
        shares: Sequence[WorkerShare],
        holding: Holding,
    ) -> None:
        """Collective. EngineError where rank 0 cannot be reached."""
        self.shares, self.per_node = shares, per_node
        links = linked(topology, ranks) if len(ranks) > 1 else {}
        self._others = [
            DistantNode(rank, link, per_node) for rank, link in sorted(links.items()) if rank
        ]
        self._own = OwnNode(topology.rank, links[0], shares, holding) if 0 in links else None

    def everywhere(self) -> list[Share]:
        """The shares of all nodes, as Shares.everywhere wants them; on rank 0."""
        nodes: list[Sequence[Share]] = [self.shares, *(node.shares for node in self._others)]
        return [node[number] for number in range(self.per_node) for node in nodes]

    def tell(self, snapshot: Snapshot) -> list[Future[Sequence[Report | None]]]:
        """Have the worker processes of the other nodes hear of the servers; their reports."""
        return [node.call(-1, "servers", snapshot) for node in self._others]

    def close(self) -> None:
        """End the connections."""
        for node in self._others:
            node.close()
        if self._own is not None:
            self._own.close()


def all_of(futures: Sequence[Future[Any]]) -> Future[Sequence[Any]]:
    """What all of them bring; None of one that failed."""
    whole: Future[Sequence[Any]] = running_future()
    lock, left = threading.Lock(), [len(futures)]

    def count(_: object) -> None:
        with lock:
            left[0] -= 1
            last = not left[0]
        if last:
            whole.set_result([None if each.exception() else each.result() for each in futures])

    for future in futures:
        future.add_done_callback(count)
    return whole
