"""Servers watched: revived when they die, and without memory on GPUs that the trainer uses.

    release everything -> train -> resume WEIGHTS -> send the weights -> resume CACHES -> generate

The caches come back last: there is no room for them together with old and new weights and the
buffers of a sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any

from megatron_stare.config import EngineError, SGLangConfig, UserError
from megatron_stare.rollout.engine import State
from megatron_stare.rollout.sglang.admission import Admission
from megatron_stare.rollout.sglang.client import ServerFault
from megatron_stare.rollout.sglang.server import PROBES, Server

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, Any]], None]
WEIGHTS = ("weights",)
CACHES = ("cuda_graph", "kv_cache")
_POLL_SECONDS = 0.05
_ALIVE = (State.READY, State.PAUSED)


class HealthMonitor:
    """Probes every server each sglang.health_interval, and starts launched ones again. The pool
    fails when a server died too often, or when no attached server answers for
    sglang.start_timeout. It releases and resumes the memory that servers share with the trainer.

    `recoveries`: seconds from each death noticed until the revived server was ready. All coroutines
    are for the pool's thread; `spawn` runs one there in the background.
    """

    def __init__(
        self, settings: SGLangConfig, admission: Admission, counts: Counter[str], spawn: Spawn
    ) -> None:
        self.servers, self.settings, self.admission = admission.servers, settings, admission
        self.training = False  # between `release_memory` and the next `resume_memory`
        self.recoveries: list[float] = []
        self._counts, self._spawn = counts, spawn
        self._last_alive = time.monotonic()

    async def start(self) -> None:
        """Start or attach all servers at once, then watch each of them."""
        await asyncio.gather(*(server.start() for server in self.servers))
        for server in self.servers:
            self._spawn(self._watch(server))

    async def probe_all(self) -> None:
        """Probe every server that answered last time until it answers or counts as dead; the dead
        are revived.
        """
        await asyncio.gather(*map(self._probe_surely, self.admission.alive()))

    async def _probe_surely(self, server: Server) -> None:
        for _ in range(PROBES):
            if await self.probe(server) is State.DEAD or not server.silent:
                return

    async def probe(self, server: Server) -> State:
        """The server's state, asked for now; DEAD while it is being revived. Callers that come
        while the server is asked share the answer: thousands of requests may fail together.
        """
        probes = server.probes
        async with server.asking:
            before = server.state
            if server.probes == probes:
                await server.probe()
                server.probes += 1
            if server.state is State.DEAD and before is not State.DEAD:
                log.warning("%s died with %d requests in flight", server.name, server.in_flight)
                # A machine that vanished ends no connection: other servers get its requests.
                self._spawn(server.connect(server.client.url))
                if server.process is not None:
                    server.state = State.STARTING
                    self._spawn(self.revive(server))
        if server.state is not before:
            await self.admission.notify()
        return State.DEAD if server.state is State.STARTING else server.state

    async def revive(self, server: Server) -> None:
        """Start the server again until it is ready. The pool fails after sglang.max_restarts."""
        began = time.monotonic()
        try:
            while True:
                self._counts["restarts"] += 1
                if self._counts["restarts"] > self.settings.max_restarts:
                    raise EngineError(
                        f"servers died more than sglang.max_restarts={self.settings.max_restarts} "
                        f"times; see {server.process.log if server.process else server.name}"
                    )
                await asyncio.sleep(server.pause_before_start())
                try:
                    await server.start()
                    break
                except (EngineError, UserError) as error:
                    log.warning("%s", error)
        except Exception as error:
            await self.admission.fail(error)
            return
        self.recoveries.append(time.monotonic() - began)
        log.warning("%s is back after %.1f s", server.name, self.recoveries[-1])
        await self.admission.notify()

    async def release_memory(self) -> None:
        """Have every server that answers release everything. EngineError, ServerFault: one did
        not.
        """
        self.training = True
        await asyncio.gather(*(self.keep_released(server) for server in self.servers))

    async def keep_released(self, server: Server) -> None:
        """Release a server's memory if it was started again while the trainer has the memory."""
        async with server.asking:
            if not self.training or server.released or server.state not in _ALIVE:
                return
            with _dead_or_willing():
                await self._idle(server)
                await server.client.release_memory(WEIGHTS + CACHES, self.settings.sync_timeout)
                server.released = frozenset(WEIGHTS + CACHES)
                server.has_base = False

    async def resume_memory(self, tags: Collection[str]) -> None:
        """Have every server take these parts again, if it had released them."""
        self.training = False
        await asyncio.gather(*(self._resume(server, tags) for server in self.servers))

    async def _watch(self, server: Server) -> None:
        while True:
            await asyncio.sleep(self.settings.health_interval)
            try:
                await self.probe(server)
                await self.keep_released(server)
            except ServerFault as fault:  # its memory is released at the next look
                log.warning("%s", fault)
            except Exception as error:  # of any other kind: the requests that wait must raise it
                await self.admission.fail(error)
                return
            if server.state is not State.DEAD:
                self._last_alive = time.monotonic()
            elif all(other.state is State.DEAD for other in self.servers):
                silent = time.monotonic() - self._last_alive
                if silent > self.settings.start_timeout:
                    await self.admission.fail(
                        EngineError(
                            f"no server of sglang.urls has answered for {silent:.0f} s "
                            "(sglang.start_timeout); start one again"
                        )
                    )
                    return

    async def _resume(self, server: Server, tags: Collection[str]) -> None:
        async with server.asking:
            wanted = server.released.intersection(tags)
            if not wanted or server.state not in _ALIVE:
                return
            with _dead_or_willing():
                await server.client.resume_memory(wanted, self.settings.sync_timeout)
                server.released -= wanted

    async def _idle(self, server: Server) -> None:
        """Wait for the end of aborted requests: a busy server would end itself."""
        most = self.settings.sync_timeout
        deadline = time.monotonic() + most
        while await server.client.running():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{server.name} is still busy after {most:g} s (sglang.sync_timeout), "
                    "although its requests were aborted; its memory stays taken; see its log"
                )
            await asyncio.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _dead_or_willing() -> Iterator[None]:
    """Ignores the death of a server: the health monitor revives it, with its memory."""
    try:
        yield
    except ServerFault as fault:
        if fault.kind != "connection":
            raise
        log.warning("%s", fault)
