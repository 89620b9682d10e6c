"""Requests that servers work on, and their end before they are answered."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_stare.rollout.sglang.answers import Answer
from megatron_stare.rollout.sglang.client import ServerFault
from megatron_stare.rollout.sglang.server import Server

# A server that is told to end a request has so long to hand over what there is of it.
PART_SECONDS = 5.0
# A server ignores the id of a request that has not reached it yet: it is told again.
_AGAIN_SECONDS = 0.1


@dataclass(frozen=True, eq=False)
class Flight:
    """A request that a server works on. `server` is who was chosen for it; where a router hands out
    requests, that may not be who works on it.
    """

    server: Server
    rid: str
    asking: asyncio.Task[Answer]
    seed: tuple[int, ...]
    streams: bool  # what has come of it is here, and stays where the rest is given up


class Flights:
    """What is in flight. `workers`: whom a router may have given any of it; None without a router.

    All methods are for the pool's thread.
    """

    def __init__(self, workers: Callable[[], Sequence[Server]] | None) -> None:
        self._workers = workers
        self._flights: dict[tuple[int, ...], Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        """A server is about to be asked."""
        self._flights[flight.seed] = flight

    def remove(self, flight: Flight) -> None:
        """It is answered, or no one waits for it any longer."""
        self._flights.pop(flight.seed, None)

    async def end_all(self, chosen: Callable[[Flight], bool]) -> None:
        """End these until each is answered. Those that stream are not waited for when nothing has
        been answered for PART_SECONDS.
        """
        before, answered = 0, time.monotonic()
        while found := [flight for flight in self._flights.values() if chosen(flight)]:
            if len(found) < before:  # who hands over thousands need not be told meanwhile
                answered = time.monotonic()
            else:
                if time.monotonic() - answered > PART_SECONDS:
                    for flight in found:
                        if flight.streams:
                            flight.asking.cancel()
                await self.end(found)
            before = len(found)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def end(self, flights: Sequence[Flight]) -> None:
        """Tell the servers to end these; in one word where a server has nothing else of ours."""
        told: dict[Server, list[str]] = {}
        for flight in flights:
            for server in [flight.server] if self._workers is None else self._workers():
                told.setdefault(server, []).append(flight.rid)
        ours = Counter(f.server for f in self._flights.values()) if len(flights) > 1 else Counter()
        calls = []
        for server, rids in told.items():
            most = ours[server] if self._workers is None else ours.total()
            whole = len(rids) > 1 and len(rids) >= most
            calls += [server.client.abort(rid) for rid in ([""] if whole else rids)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, ServerFault):
                raise outcome
