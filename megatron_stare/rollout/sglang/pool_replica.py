"""The pool of a worker process: it sends requests to servers that rank 0's process keeps alive.

A replica neither starts, restarts nor watches servers. Rank 0 sends it a `Snapshot` whenever
something changes (sync/served_engine.py), and it answers with a `Report` of its own requests.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from megatron_stare.config import EngineError, SGLangConfig
from megatron_stare.rollout.engine import Limits, State
from megatron_stare.rollout.sglang.access import api_key
from megatron_stare.rollout.sglang.client import SGLangClient
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model, Server


class ServerView(NamedTuple):
    """A server as rank 0's process knows it."""

    name: str
    url: str
    state: State
    weights: str
    version: int
    released: frozenset[str]
    limits: Limits
    stream_interval: int


class Snapshot(NamedTuple):
    """All servers, and the weights that rollouts must come from."""

    run_name: str
    version: int
    failure: str
    router_interval: int
    servers: tuple[ServerView, ...]


class Report(NamedTuple):
    """A worker process's answer to a snapshot."""

    process: int
    busy: dict[str, int]  # requests in flight, by server
    # servers that did not sample with the weights that the last snapshot named, and these weights
    doubted: dict[str, str]
    counts: dict[str, float]  # faults since the process started, by name


class PoolReplica(SGLangPool):
    """A pool whose servers come with the first snapshot."""

    def __init__(self, settings: SGLangConfig, model: Model, *, keeps_cache: bool = False) -> None:
        super().__init__(settings, model, logs=None, keeps_cache=keeps_cache)
        self._announced: dict[str, str] = {}  # the weights of each server, by the last snapshot

    def update(self, snapshot: Snapshot) -> Report:
        """Adopt the snapshot. Requests in flight under other weights than the expected are
        interrupted.
        """
        report: Report = self.run(self._update(snapshot)).result()
        return report

    async def _update(self, snapshot: Snapshot) -> Report:
        # servers that sampled with other weights than those of the last snapshot
        doubted = {
            server.name: announced
            for server in self.servers
            if (announced := self._announced.get(server.name)) and not server.weights
        }
        before = self.tag
        self.admission.run_name = snapshot.run_name
        self.admission.version = snapshot.version
        if snapshot.failure:
            self.admission.failure = EngineError(snapshot.failure)
        if self.router is not None:
            self.router.stream_interval = snapshot.router_interval
        known = {server.name: server for server in self.servers}
        for view in snapshot.servers:
            server = known.get(view.name) or self._added(view)
            # A doubted server is not asked until the snapshot names new weights for it.
            if doubted.get(view.name) != view.weights or not view.weights:
                await self._note(server, view)
        if self.tag != before:
            self.interrupt()
        await self.admission.notify()
        busy = {server.name: server.in_flight for server in self.servers if server.in_flight}
        return Report(os.getpid(), busy, doubted, self.counts())

    def _added(self, view: ServerView) -> Server:
        server = Server(view.name, self.model, self.settings, view.url)
        self.servers.append(server)
        return server

    async def _note(self, server: Server, view: ServerView) -> None:
        if server.client.url != view.url:
            await server.client.close()
            server.client = SGLangClient(view.url, api_key(self.settings))
        server.client.stream_interval = view.stream_interval
        server.state, server.silent = view.state, 0
        server.limits, server.released = view.limits, view.released
        server.weights, server.version = view.weights, view.version
        self._announced[server.name] = view.weights
