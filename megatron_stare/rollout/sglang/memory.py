"""GPU memory that servers share with the trainer: released while it trains, taken again for the
next weights.

    release everything -> train -> resume WEIGHTS -> send the weights -> resume CACHES -> generate

The caches come back last: there is no room for them together with old and new weights and the
buffers of a sync.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Sequence

from megatron_stare.config import EngineError
from megatron_stare.rollout.engine import State
from megatron_stare.rollout.sglang.client import ServerFault
from megatron_stare.rollout.sglang.server import Server

log = logging.getLogger(__name__)

WEIGHTS = ("weights",)
CACHES = ("cuda_graph", "kv_cache")
_POLL_SECONDS = 0.05
_ALIVE = (State.READY, State.PAUSED)


class Memory:
    """Releases and resumes the memory of a pool's servers; for the pool's thread."""

    def __init__(self, servers: Sequence[Server], timeout: float) -> None:
        self.servers, self.timeout = servers, timeout
        self.training = False  # between `release` and the next `resume`

    async def release(self) -> None:
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
                await server.client.release_memory(WEIGHTS + CACHES, self.timeout)
                server.released = frozenset(WEIGHTS + CACHES)
                server.has_base = False

    async def resume(self, tags: Collection[str]) -> None:
        """Have every server take these parts again, if it had released them."""
        self.training = False
        await asyncio.gather(*(self._resume(server, tags) for server in self.servers))

    async def _resume(self, server: Server, tags: Collection[str]) -> None:
        async with server.asking:
            wanted = server.released.intersection(tags)
            if not wanted or server.state not in _ALIVE:
                return
            with _dead_or_willing():
                await server.client.resume_memory(wanted, self.timeout)
                server.released -= wanted

    async def _idle(self, server: Server) -> None:
        """Wait for the end of aborted requests: a busy server would end itself."""
        deadline = time.monotonic() + self.timeout
        while await server.client.running():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{server.name} is still busy after {self.timeout:g} s (sglang.sync_timeout), "
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
