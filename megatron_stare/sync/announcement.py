"""What the worker processes are told of the servers, and what they say of their requests.

Rank 0's process keeps the servers alive and gives them weights; the workers only ask. So they are
told which servers there are and which weights each holds, whenever that changes, and answer with
what they have in flight: a server gets new weights when nobody has.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from megatron_stare.rollout.engine import Limits, State
from megatron_stare.rollout.sglang.pool import SGLangPool

LOOK_SECONDS = 0.25
REPEAT_SECONDS = 5.0  # a worker that took a server for dead hears that it is not


class ServerView(NamedTuple):
    """A server, as rank 0's process knows it."""

    name: str
    url: str
    state: State
    weights: str
    version: int
    released: frozenset[str]
    limits: Limits
    stream_interval: int


class Snapshot(NamedTuple):
    """All servers, and which weights rollouts must come from."""

    run_name: str
    version: int
    failure: str
    router_interval: int
    servers: tuple[ServerView, ...]


class Report(NamedTuple):
    """A worker's answer: its requests in flight by server, the servers that sampled with other
    weights than it was told (and those), and its faults so far.
    """

    process: int
    busy: dict[str, int]
    doubted: dict[str, str]
    counts: dict[str, float]


class Askers(Protocol):
    """The worker processes."""

    def tell(self, snapshot: Snapshot) -> Sequence[Future[Sequence[Report | None]]]:
        """Tell all of them; for each node the reports of its own. None: it died, or has not
        started; a failure: the node has left.
        """
        ...


class Announcer:
    """Tells the askers of all nodes what a pool knows, from a thread, until it is closed."""

    def __init__(self, pool: SGLangPool, askers: Askers) -> None:
        self.pool, self.askers = pool, askers
        self._lock = threading.Lock()
        self._told: Snapshot | None = None
        self._counts: dict[tuple[int, int], dict[str, float]] = {}  # by node and process
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="announcer", daemon=True)
        self._thread.start()

    def now(self) -> None:
        """Tell them, and note what they report."""
        with self._lock:
            self._told = snapshot_of(self.pool)
            answers = self.askers.tell(self._told)
            busy: Counter[str] = Counter()
            for node, answer in enumerate(answers):
                for report in answer.result() if answer.exception() is None else ():
                    if report is not None:
                        busy.update(report.busy)
                        self._note(node, report)
            self.pool.admission.elsewhere = busy

    def counts(self) -> dict[str, float]:
        """The pool's and those of all processes that there were, added up."""
        total: dict[str, float] = self.pool.counts()
        with self._lock:
            for counts in self._counts.values():
                total = {name: value + counts.get(name, 0.0) for name, value in total.items()}
        return total

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _note(self, node: int, report: Report) -> None:
        self._counts[node, report.process] = report.counts
        for server in self.pool.servers:
            if server.name in report.doubted and server.weights == report.doubted[server.name]:
                server.weights = ""

    def _work(self) -> None:
        last = 0.0
        while not self._closed.wait(LOOK_SECONDS):
            if snapshot_of(self.pool) != self._told or time.monotonic() - last > REPEAT_SECONDS:
                last = time.monotonic()
                self.now()


def snapshot_of(pool: SGLangPool) -> Snapshot:
    """What the pool knows now."""
    return Snapshot(
        pool.admission.run_name,
        pool.version,
        str(pool.failure or ""),
        pool.router.stream_interval if pool.router is not None else 0,
        tuple(
            ServerView(
                server.name,
                server.client.url,
                server.state,
                server.weights,
                server.version,
                server.released,
                server.limits,
                server.client.stream_interval,
            )
            for server in pool.servers
        ),
    )
