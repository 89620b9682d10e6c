"""Keeps worker processes informed about the servers.

Rank 0's process keeps the servers alive and gives them weights; worker processes only send requests
to them. The announcer sends every worker a snapshot of the servers and their weights whenever it
changes. Workers answer with their requests in flight: a server gets new weights when it has none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.pool_replica import Report, ServerView, Snapshot

LOOK_SECONDS = 0.25
ANSWER_SECONDS = 10.0  # for a worker's answer; the worker's owner ends one that stands still
REPEAT_SECONDS = 5.0  # so that a worker that took a server for dead learns that it is not
# Sends the snapshot to every worker process; None: one died or has not started.
Announce = Callable[[Snapshot], Sequence[Future[Report | None]]]


class Announcer:
    """Sends the state of a pool to all worker processes, from a thread, until it is closed."""

    def __init__(self, pool: SGLangPool, announce: Announce) -> None:
        self.pool, self._announce = pool, announce
        self._lock = threading.Lock()
        self._sent: Snapshot | None = None
        self._counts: dict[int, dict[str, float]] = {}  # by process
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="announcer", daemon=True)
        self._thread.start()

    def now(self) -> None:
        """Send a snapshot and take in the reports."""
        with self._lock:
            self._sent = snapshot_of(self.pool)
            busy: Counter[str] = Counter()
            answers = self._announce(self._sent)
            wait(answers, ANSWER_SECONDS)
            for answer in answers:
                if not answer.done():  # any server may have its requests
                    busy.update(server.name for server in self.pool.servers)
                elif not answer.exception() and (report := answer.result()) is not None:
                    busy.update(report.busy)
                    self._note(report)
            self.pool.admission.elsewhere = busy

    def counts(self) -> dict[str, float]:
        """The sum of the pool's counts and those of all processes, also of ended ones."""
        total: dict[str, float] = self.pool.counts()
        with self._lock:
            for counts in self._counts.values():
                total = {name: value + counts.get(name, 0.0) for name, value in total.items()}
        return total

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _note(self, report: Report) -> None:
        self._counts[report.process] = report.counts
        for server in self.pool.servers:
            if server.name in report.doubted and server.weights == report.doubted[server.name]:
                server.doubt()

    def _work(self) -> None:
        last = 0.0
        while not self._closed.wait(LOOK_SECONDS):
            if snapshot_of(self.pool) != self._sent or time.monotonic() - last > REPEAT_SECONDS:
                last = time.monotonic()
                try:
                    self.now()
                except Exception as error:  # else lost with this thread
                    self.pool.run(self.pool.admission.fail(error))
                    return


def snapshot_of(pool: SGLangPool) -> Snapshot:
    """The pool's servers as they are now."""
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
