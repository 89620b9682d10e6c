"""Several SGLang servers as one engine.

    Admission      which server may take a request: one that answers, holds the expected weights and
                   has room
    RequestRunner  takes a request to its rollout, through interruptions and faults
    HealthMonitor  probes the servers and revives the dead

The pool owns the three and the thread that they run in; its public methods may be called from any
other thread. Every request has a future of its own, so that none is lost or answered twice.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import orjson

from megatron_stare import http_client
from megatron_stare.config import EngineError, SGLangConfig, UserError
from megatron_stare.event_loop import EventLoopThread, cancel_others
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Limits, Request, SamplingParams
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key, standing_open
from megatron_stare.rollout.sglang.admission import Admission
from megatron_stare.rollout.sglang.answers import Prefill
from megatron_stare.rollout.sglang.client import QUICK_SECONDS, SGLangClient
from megatron_stare.rollout.sglang.health import HealthMonitor
from megatron_stare.rollout.sglang.requests import DRAFTS, RequestRunner
from megatron_stare.rollout.sglang.server import Model, Server, launcher
from megatron_stare.rollout.sglang.weights import results
from megatron_stare.system import raise_file_limit

log = logging.getLogger(__name__)


class SGLangPool:
    """Servers that answer requests, under the weights that `expect` names."""

    def __init__(
        self, settings: SGLangConfig, model: Model, logs: Path, *, keeps_cache: bool = False
    ) -> None:
        """`logs`: the directory for the logs of launched servers. `keeps_cache`:
        rollout.cache_over_versions=kept.
        """
        raise_file_limit()  # each request in flight is a connection
        self.settings, self.model, self.keeps_cache = settings, model, keeps_cache
        self.servers = servers = servers_of(settings, model, logs)
        # A router drops a request's wish for expert choices: then the workers are asked directly.
        routed = bool(settings.router_url) and not model.routed_experts
        self.router = SGLangClient(settings.router_url, api_key(settings)) if routed else None
        self._counts: Counter[str] = Counter()
        self._background: set[asyncio.Task[Any]] = set()
        self._thread = EventLoopThread("sglang-pool")
        self.admission = Admission(
            servers, settings.max_concurrency, routed=routed, keeps_cache=keeps_cache
        )
        self.health = HealthMonitor(settings, self.admission, self._counts, self._spawn)
        self.requests = RequestRunner(
            model, settings, self.admission, self.health, self.router, self._counts, self._spawn
        )

    def start(self) -> concurrent.futures.Future[None]:
        """Start or attach every server, all at once. UserError or EngineError: a server cannot
        serve.
        """
        if found := standing_open(self.settings):
            log.warning(
                "%s: no key is set, so that any client that reaches a server can send it requests "
                "and replace its weights; set sglang.api_key or %s",
                ", ".join(found),
                KEY_VARIABLE,
            )
        atexit.register(self.close)
        return self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine in the pool's thread. After the thread's end the future is cancelled."""
        return self._thread.submit(work)

    @property
    def limits(self) -> Limits:
        """The limits that hold on every server."""
        known = [server.limits for server in self.servers]
        return Limits(
            min(limits.vocab_size for limits in known),
            min(limits.context_length for limits in known),
            min(limits.prompt_length for limits in known),
        )

    @property
    def version(self) -> int:
        """The version of the weights that rollouts must come from."""
        return self.admission.version

    @property
    def tag(self) -> str:
        """The name of these weights on the servers."""
        return self.admission.tag

    @property
    def failure(self) -> BaseException | None:
        """The reason why the pool gave up; None while it has not."""
        return self.admission.failure

    def submit(
        self, requests: Sequence[Request], params: SamplingParams
    ) -> list[concurrent.futures.Future[Rollout]]:
        """One future per request; cancelling one aborts its request.

        UserError, before a server sees any of them, for a request that no server can serve.
        """
        for request in requests:
            self.limits.check(request, params)
        if len({request.seed for request in requests}) != len(requests):
            raise ValueError(
                "two requests of one call share a seed, so that none of them can be named"
            )
        return [self.run(self.requests.run(request, params)) for request in requests]

    def interrupt(self) -> None:
        """Abort what is in flight under other weights than the expected; it is continued under
        those. Nothing is aborted where caches are kept.
        """
        if not self.keeps_cache:
            self.run(self.requests.interrupt())

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """Abort these requests, or all; their rollouts come back `aborted`. Does not wait."""
        named = None if requests is None else {request.seed for request in requests}
        self.run(self.requests.abort(named))

    def expect(self, version: int) -> None:
        """Ask from now on only servers that hold the weights of `version` (`note_loaded`).

        Runs in the pool's thread, between two of its steps: a server chosen before counts a request
        in flight, and no server chosen after holds other weights.
        """

        async def note() -> None:
            self.admission.version = version

        self._now(note(), 0.0)

    def note_loaded(self, servers: Iterable[Server]) -> None:
        """Note that these servers now hold the expected weights."""
        self._now(self.admission.note_loaded(servers), 0.0)

    def note_corrupt_sync(self, error: Exception) -> None:
        """Count that a server holds other weights than it was sent."""
        self._counts["corrupt_syncs"] += 1
        log.warning("%s; they are sent once more", error)

    def probe(self) -> None:
        """Probe every server until it answers or counts as dead; the dead are revived."""
        # A probe is two requests, and may come after a release of memory.
        seconds = self.settings.sync_timeout + 2 * self.settings.health_timeout
        self._now(self.health.probe_all(), seconds)

    def release_memory(self) -> None:
        """Have every server release its memory (sglang.colocated). Nothing may be in flight."""
        self._now(self.health.release_memory(), self.settings.sync_timeout)

    def resume_memory(self, tags: Collection[str]) -> None:
        """Have every server take its memory for `tags` again, where it was released."""
        self._now(self.health.resume_memory(tags), self.settings.sync_timeout)
        self._now(self.admission.notify(), 0.0)

    def _now(self, work: Coroutine[Any, Any, Any], seconds: float) -> None:
        """Wait for work in the pool's thread, whose requests have time-outs of `seconds`."""
        results([self.run(work)], seconds)

    def prefill(
        self, sequences: Sequence[numpy.ndarray]
    ) -> concurrent.futures.Future[dict[str, list[Prefill]]]:
        """The log-probs of these ids from each server that holds the expected weights."""
        return self.run(self._prefill(sequences))

    def counts(self) -> dict[str, float]:
        """Faults by kind, restarts, syncs after which a server held other weights, aborted and
        interrupted requests since the start; seconds of the slowest recovery.

        parts_dropped: interrupted so near the end of the servers' context that one could not read
        the part, which was sampled again. continued: taken from a server that was too slow or lost,
        with the tokens so far. invalid_rollouts: given up, because the model's probabilities were
        no numbers. answers_without_routing: expert choices were asked for, and not in the answer.
        drafts, drafts_accepted: draft tokens of servers that speculate. mixed_cache_tokens: sampled
        by newer weights than the beginning of their prefix cache.
        """
        faults = ("fault_connection", "fault_timeout", "fault_status", "fault_garbage")
        ends = ("aborted", "interrupted", "continued", "parts_dropped", "invalid_rollouts")
        kinds = [*faults, "restarts", "corrupt_syncs", *ends, "answers_without_routing"]
        kinds += DRAFTS if self.settings.speculation != "none" else ()
        kinds += ["mixed_cache_tokens"] if self.keeps_cache else ()
        counted = {f"engine_{kind}": float(self._counts[kind]) for kind in kinds}
        recoveries = self.health.recoveries
        counted["engine_recoveries"] = float(len(recoveries))
        counted["engine_recovery_seconds_max"] = max(recoveries, default=0.0)
        return counted

    def close(self) -> None:
        """End the launched servers and the thread."""
        atexit.unregister(self.close)
        with contextlib.suppress(Exception):
            self.run(self._close()).result(timeout=60)
        # At the interpreter's end `_close` cannot start the threads that end servers. The end of
        # the pool's thread alone would kill each server's first process and leave its group.
        for server in self.servers:
            if server.process is not None and server.process.alive():
                with contextlib.suppress(EngineError):
                    server.process.stop(at_once=True)
        self._thread.stop()

    # --- in the pool's thread

    async def _start(self) -> None:
        await self.health.start()
        if self.router is not None:
            # It drops a request's interval: the workers' own holds.
            known = [server.info for server in self.servers if server.info]
            streams = all(info.streams and info.stream_interval > 1 for info in known)
            self.router.stream_interval = self.settings.stream_interval if streams else 0

    async def _close(self) -> None:
        await cancel_others()
        await asyncio.gather(*(server.close() for server in self.servers))
        if self.router is not None:
            await self.router.close()

    async def _prefill(self, sequences: Sequence[numpy.ndarray]) -> dict[str, list[Prefill]]:
        found: dict[str, list[Prefill]] = {}
        for server in self.admission.current():
            hidden = server.info is not None and server.info.hidden_states
            for ids in sequences:
                read = await server.client.prefill(
                    ids,
                    server.limits.vocab_size,
                    self.settings.request_timeout,
                    hidden,
                    server.adapters,
                )
                found.setdefault(server.name, []).append(read)
        return found

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._thread.loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def servers_of(settings: SGLangConfig, model: Model, logs: Path) -> list[Server]:
    """The servers that the settings name, none of them started."""
    key, urls = api_key(settings), settings.urls
    if not urls and settings.router_url:
        urls = worker_urls(settings.router_url, key)
    if urls:
        return [Server(url, model, settings, url) for url in urls]
    return [
        Server(f"sglang_{number}", model, settings, launcher(settings, model, logs, number))
        for number in range(settings.num_servers)
    ]


def worker_urls(router_url: str, key: str = "") -> list[str]:
    """The sorted addresses of the router's workers. UserError: the router does not answer, or has
    no worker.
    """
    try:
        url = f"{router_url.rstrip('/')}/workers"
        status, content = http_client.request("GET", url, key, timeout=QUICK_SECONDS)
        if status != 200:
            raise ConnectionError(f"status {status}")
        urls = sorted(str(worker["url"]) for worker in orjson.loads(content)["workers"])
    except http_client.FAULTS as error:
        raise UserError(
            f"sglang.router_url={router_url} does not answer GET /workers ({error}); start the "
            "router, or correct it"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"sglang.router_url={router_url} lists no workers; give them in sglang.urls"
        ) from None
    if not urls:
        raise UserError(
            f"sglang.router_url={router_url} has no worker; start it with --worker-urls, or wait "
            "for its workers"
        )
    return urls
