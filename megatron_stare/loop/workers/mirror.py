"""The pool of a worker process: it asks servers that rank 0's process keeps alive.

It starts, revives and watches none of them; what it knows of them is what it is told
(sync/announcement.py), and what their answers show meanwhile.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_stare.config import EngineError, SGLangConfig
from megatron_stare.rollout.sglang.client import SGLangClient
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model, Server
from megatron_stare.sync.announcement import Report, ServerView, Snapshot


class MirroredPool(SGLangPool):
    """A pool without servers, until it is told of some."""

    def __init__(self, settings: SGLangConfig, model: Model) -> None:
        super().__init__(settings, model, Path())
        self._told: dict[str, str] = {}  # the weights of each server, as it was told
        self._thread.start()

    def take(self, snapshot: Snapshot) -> Report:
        """Know what the snapshot says from now on; what is in flight under other weights than the
        expected is interrupted.
        """
        return self.run(self._take(snapshot)).result()

    def _made(self, logs: Path) -> list[Server]:
        return []

    async def _take(self, snapshot: Snapshot) -> Report:
        doubted = {
            server.name: told
            for server in self.servers
            if (told := self._told.get(server.name)) and not server.weights
        }
        tag = self.tag
        self._run, self.version = snapshot.run, snapshot.version
        if snapshot.failure:
            self._failure = EngineError(snapshot.failure)
        if self.router is not None:
            self.router.stream_interval = snapshot.router_interval
        known = {server.name: server for server in self.servers}
        for view in snapshot.servers:
            server = known.get(view.name) or self._new(view)
            # what has just shown to hold other weights is not to be asked before it got these
            if doubted.get(view.name) != view.weights or not view.weights:
                await self._note(server, view)
        if self.tag != tag:
            self._spawn(self._interrupt())
        await self._notify()
        busy = {server.name: server.in_flight for server in self.servers if server.in_flight}
        return Report(os.getpid(), busy, doubted, self.counts())

    def _new(self, view: ServerView) -> Server:
        server = Server(view.name, self.model, self.settings, view.url)
        self.servers.append(server)
        return server

    async def _note(self, server: Server, view: ServerView) -> None:
        if server.client.url != view.url:
            await server.client.close()
            server.client = SGLangClient(view.url, self._key)
        server.client.stream_interval = view.stream_interval
        server.state, server.silent = view.state, 0
        server.limits, server.released = view.limits, view.released
        server.weights, server.version = view.weights, view.version
        self._told[server.name] = view.weights
