"""Admission: the choice of the server that takes a request."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import itertools
import uuid
from collections.abc import Container, Iterable, Sequence
from typing import Any

from megatron_stare.config import EngineError
from megatron_stare.rollout.engine import Request, State
from megatron_stare.rollout.sglang.server import Server

# A prompt stays on its server while that server has at most SLACK times the mean number of requests
# in flight, plus ROOM.
SLACK, ROOM = 1.25, 8


def prefix_of(request: Request) -> tuple[int, ...]:
    """The name of the prompt: the seed without the number of the rollout. An agent's calls, which
    repeat the tokens of the calls before, have that of their episode.
    """
    return (request.episode or request.seed)[:-1]


def _order(request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order of waiting requests: by their prompts' draws. Evaluation, whose seeds have the
    higher second word, comes before training: the trainer waits for it.
    """
    return tuple(-word for word in request.seed[1:2]), request.seed


def preferred(free: Sequence[Server], prefix: tuple[int, ...]) -> Server:
    """The free server that probably has this prefix (of the rollouts of a prompt, the turns of an
    episode) in its cache.

    Rendezvous hashing with bounded loads (arXiv 1608.01350): every prompt ranks the servers in an
    order of its own, the same in every process. The first server that is not too busy is taken.
    """
    mean = (1 + sum(server.in_flight for server in free)) / len(free)
    ready = [server for server in free if server.in_flight < SLACK * mean + ROOM]
    return min(ready, key=lambda server: rank(server.name, prefix))


@functools.lru_cache(1 << 16)
def rank(name: str, prefix: tuple[int, ...]) -> bytes:
    """The prompt prefers the server with the lowest rank."""
    return hashlib.blake2b(f"{prefix} {name}".encode()).digest()


class Admission:
    """Gives each request a server that answers, holds the expected weights and has room; a request
    waits until there is one.

    Requests are served in the order in which their prompts were drawn: the next turn of an episode
    and the continuation of an interrupted rollout come before the first token of a later prompt.
    Otherwise each would wait for all that is in the queue, its group would be complete last, and
    its prefix would be gone from the server's cache.

    `version` is that of the weights a rollout must come from. Coroutines are for the pool's thread.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        max_concurrency: int,
        *,
        routed: bool,
        keeps_cache: bool = False,
    ) -> None:
        self.servers, self.max_concurrency, self.routed = servers, max_concurrency, routed
        self.keeps_cache = keeps_cache  # requests stay in flight while their server gets weights
        self.run_name = uuid.uuid4().hex[:8]  # in every tag of this run, and in no other's
        self.version = -1
        self.failure: BaseException | None = None  # why the pool gave up
        self._waiting: list[tuple[Any, int, asyncio.Future[None]]] = []  # a heap
        self._arrivals = itertools.count()  # decides between equal seeds

    @property
    def tag(self) -> str:
        """The name of the expected weights on the servers. Another run on the same servers uses
        other names.
        """
        return f"{self.run_name}-{self.version}"

    def alive(self) -> list[Server]:
        """Servers that answer."""
        return [server for server in self.servers if server.state in (State.READY, State.PAUSED)]

    def current(self) -> list[Server]:
        """Servers that answer and hold the expected weights."""
        return [server for server in self.alive() if server.weights == self.tag]

    def up_to_date(self) -> bool:
        """Whether some server answers, and all that do hold the expected weights."""
        alive = self.alive()
        return bool(alive) and all(server.weights == self.tag for server in alive)

    def without_weights(self) -> list[Server]:
        """Servers that answer, do not hold the expected weights, and have nothing in flight or are
        paused for the update: they can be sent the weights.
        """
        lacking = [server for server in self.alive() if server.weights != self.tag]
        if self.keeps_cache:
            return lacking
        busy = [s for s in self.servers if s.in_flight]
        # The worker that a router chose is not known: all of them must be idle.
        if self.routed and busy:
            return []
        return [server for server in lacking if server not in busy]

    def came_meanwhile(self, tag: str, version: int) -> bool:
        """Whether a server that held the weights of `version` may have received those of `tag` with
        requests in flight.
        """
        run_name, _, number = tag.rpartition("-")
        newer = run_name == self.run_name and number.isdecimal() and int(number) > version
        return self.keeps_cache and newer

    def has_room(self, server: Server) -> bool:
        """Whether the server can take one more request now."""
        usable = server.state is State.READY and server.weights == self.tag
        if self.routed:  # the router chooses the worker: every worker must be fit to answer
            usable = usable and self.up_to_date()
        return usable and not server.released and server.in_flight < self.max_concurrency

    async def acquire(
        self,
        request: Request,
        aborted: Container[tuple[int, ...]] = (),
        *,
        failed: Server | None = None,
        own: Server | None = None,
    ) -> Server | None:
        """A server that can take the request now: `own` if it can, `failed` only if no other can.
        Waits for one. None: the request's seed is among `aborted`.
        """
        while request.seed not in aborted:
            if self.failure is not None:
                raise EngineError(str(self.failure)) from self.failure
            free = [server for server in self.servers if self.has_room(server)]
            if free:
                others = [server for server in free if server is not failed] or free
                wanted = [server for server in free if server is own]
                chosen = preferred(wanted or others, prefix_of(request))
                chosen.in_flight += 1
                return chosen
            await self._turn(request)
        return None

    async def _turn(self, request: Request) -> None:
        """Wait until `notify` chooses this request to look for a server again."""
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (_order(request), next(self._arrivals), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was chosen: another request takes its turn
                await self.notify(1)
            raise

    async def release(self, server: Server) -> None:
        """Note that a request of an acquired server has ended."""
        server.in_flight -= 1
        # New weights end thousands of requests, while no server can take one: nothing to announce.
        if self.has_room(server):
            await self.notify(1)

    async def note_loaded(self, servers: Iterable[Server]) -> None:
        """Note that these servers now hold the expected weights."""
        for server in servers:
            server.weights, server.version = self.tag, self.version
        await self.notify()

    async def fail(self, error: BaseException) -> None:
        """Give up: every request that waits for a server raises the error."""
        self.failure = error
        await self.notify()

    async def notify(self, requests: int = 1 << 30) -> None:
        """Have this many waiting requests look for a server again."""
        while requests > 0 and self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():  # it is where the request was cancelled
                turn.set_result(None)
                requests -= 1
