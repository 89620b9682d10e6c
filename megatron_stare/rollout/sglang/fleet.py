"""SGLang servers kept alive and up to date:
started or attached, watched, revived, told apart by the weights they hold.

Everything asynchronous runs in one thread of the fleet's own; public methods may be called from any
other.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import shlex
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_stare.config import EngineError, SGLangConfig, UserError
from megatron_stare.rollout.engine import Limits, State
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key, standing_open
from megatron_stare.rollout.sglang.answers import Prefill, prefill_request, read_prefill
from megatron_stare.rollout.sglang.client import SGLangClient
from megatron_stare.rollout.sglang.memory import Memory
from megatron_stare.rollout.sglang.process import ServerProcess, server_command
from megatron_stare.rollout.sglang.router import attached_urls
from megatron_stare.rollout.sglang.server import Model, Server

log = logging.getLogger(__name__)


class Fleet:
    """Servers attached by URL or launched here.
    `version` is that of the weights they are to hold.
    """

    def __init__(self, settings: SGLangConfig, model: Model, logs: Path) -> None:
        self.settings, self.model = settings, model
        self.version = -1
        self.recoveries: list[
            float
        ] = []  # seconds from each death noticed to the revived server's first readiness
        self._run = uuid.uuid4().hex[:8]
        self._counts: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._last_alive = time.monotonic()
        self._background: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sglang-pool", daemon=True
        )
        self._key = api_key(settings)
        # A router drops what a request says of experts: its workers are asked themselves.
        routed = bool(settings.router_url) and not model.routed_experts
        self.router = SGLangClient(settings.router_url, self._key) if routed else None
        self.elsewhere: Mapping[str, int] = {}  # in flight for other processes, by server
        self.servers = self._made(logs)
        self.memory = Memory(self.servers, settings.sync_timeout)

    def begin(self) -> concurrent.futures.Future[None]:
        """Start or attach every server, all at once.
        UserError or EngineError where one cannot serve.
        """
        if found := standing_open(self.settings):
            log.warning(
                "%s: no key is set, so that whoever reaches a server can ask it anything and "
                "replace its weights; set sglang.api_key or %s",
                ", ".join(found),
                KEY_VARIABLE,
            )
        self._thread.start()
        atexit.register(self.close)
        return self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine in the pool's thread; where that has ended, the future is cancelled."""
        if not self._loop.is_closed():
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        never: concurrent.futures.Future[Any] = concurrent.futures.Future()
        never.cancel()
        return never

    @property
    def limits(self) -> Limits:
        """What every server can serve."""
        known = [server.limits for server in self.servers]
        return Limits(
            min(limits.vocab_size for limits in known),
            min(limits.context_length for limits in known),
            min(limits.prompt_length for limits in known),
        )

    @property
    def tag(self) -> str:
        """What servers call the weights of `version`:
        another run on the same servers has other names.
        """
        return f"{self._run}-{self.version}"

    @property
    def run_name(self) -> str:
        """What is in every tag of this run, and in no other's."""
        return self._run

    @property
    def failure(self) -> BaseException | None:
        """Why the pool gave up; None while it has not."""
        return self._failure

    def expect(self, version: int) -> None:
        """From now on only servers that hold the weights of `version` (see `loaded`) are asked.

        Done in the fleet's thread, between two of its steps: whoever has chosen a server by then is
        counted on it, and no later choice falls on one that holds other weights.
        """

        async def note() -> None:
            self.version = version

        if self._thread.is_alive():
            self.run(note()).result()
        else:
            self.version = version

    def alive(self) -> list[Server]:
        """Servers that answer."""
        return [server for server in self.servers if server.state in (State.READY, State.PAUSED)]

    def without_weights(self) -> list[Server]:
        """Servers that answer, do not hold the expected weights, and have nothing in flight:
        they can be given them.
        """
        busy = [s for s in self.servers if s.in_flight or self.elsewhere.get(s.name)]
        # Which worker a router chose is not known: all must be idle.
        if self.router is not None and busy:
            return []
        return [s for s in self.alive() if s.weights != self.tag and s not in busy]

    def up_to_date(self) -> bool:
        """Whether some server answers, and all that do hold the expected weights."""
        alive = self.alive()
        return bool(alive) and all(server.weights == self.tag for server in alive)

    def look(self) -> None:
        """Ask every server how it is, now; the dead are revived."""

        async def look_at_all() -> None:
            await asyncio.gather(*(self._look(server) for server in self.alive()))

        self.run(look_at_all()).result()

    def loaded(self, servers: Iterable[Server]) -> None:
        """Note that these servers now hold the expected weights."""

        async def note() -> None:
            for server in servers:
                server.weights, server.version = self.tag, self.version
            await self._notify()

        self.run(note()).result()

    def note_corrupt_sync(self, error: Exception) -> None:
        """Count that a server holds other weights than it was sent."""
        self._counts["corrupt_syncs"] += 1
        log.warning("%s; they are sent once more", error)

    def release_memory(self) -> None:
        """Have every server give its memory back (sglang.colocated). Nothing may be in flight."""
        self.run(self.memory.release()).result()

    def resume_memory(self, tags: Collection[str]) -> None:
        """Have every server take its memory for `tags` again, where it was released."""
        self.run(self.memory.resume(tags)).result()
        self.run(self._notify()).result()

    def prefill(
        self, sequences: Sequence[numpy.ndarray]
    ) -> concurrent.futures.Future[dict[str, list[Prefill]]]:
        """What each server that holds the expected weights says of these ids, one after another."""
        return self.run(self._prefill(sequences))

    def close(self) -> None:
        """End the launched servers and the thread."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self.run(self._close()).result(timeout=60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
        if not self._loop.is_running():
            self._loop.close()

    # --- in the fleet's thread
    # ----------------------------------------------------------------------------------------

    def _made(self, logs: Path) -> list[Server]:
        """The servers, none of them started."""
        urls = attached_urls(self.settings)
        return [Server(url, self.model, self.settings, url) for url in urls] or [
            self._launched(number, logs) for number in range(self.settings.num_servers)
        ]

    def _launched(self, number: int, logs: Path) -> Server:
        launch = launcher(self.settings, self.model, logs, number)
        return Server(f"sglang_{number}", self.model, self.settings, launch)

    async def _start(self) -> None:
        await asyncio.gather(*(server.start() for server in self.servers))
        if self.router is not None:
            # It drops what a request says of the interval: only the workers' own holds.
            known = [server.info for server in self.servers if server.info]
            streams = all(info.streams and info.stream_interval > 1 for info in known)
            self.router.stream_interval = self.settings.stream_interval if streams else 0
        for server in self.servers:
            self._spawn(self._watch(server))

    async def _close(self) -> None:
        # What ends may begin something that sees to its end: until there is nothing.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers))
        if self.router is not None:
            await self.router.close()

    async def _prefill(self, sequences: Sequence[numpy.ndarray]) -> dict[str, list[Prefill]]:
        found: dict[str, list[Prefill]] = {}
        for server in [one for one in self.alive() if one.weights == self.tag]:
            hidden = server.info is not None and server.info.hidden_states
            for ids in sequences:
                body = prefill_request(ids, hidden)
                patience = self.settings.request_timeout
                answer = await server.client.call("POST", "/generate", body, patience)
                found.setdefault(server.name, []).append(
                    read_prefill(answer, ids, server.limits.vocab_size)
                )
        return found

    async def _watch(self, server: Server) -> None:
        """Look at the server forever; revive it when it is dead."""
        while True:
            await asyncio.sleep(self.settings.health_interval)
            try:
                await self._look(server)
                await self.memory.keep_released(server)
            except Exception as error:  # whatever it is, the requests that wait must hear of it
                await self._fail(error)
                return
            if server.state is not State.DEAD:
                self._last_alive = time.monotonic()
            elif all(other.state is State.DEAD for other in self.servers):
                silent = time.monotonic() - self._last_alive
                if silent > self.settings.start_timeout:
                    await self._fail(
                        EngineError(f"no server of sglang.urls has answered for {silent:.0f} s")
                    )
                    return

    async def _look(self, server: Server) -> State:
        """The server's state, asked of it;
        DEAD where it is being revived. One asks, though many may want to know.
        """
        async with server.asking:
            before = server.state
            state = await server.look()
            if state is State.DEAD and before is not State.DEAD:
                log.warning("%s died with %d requests in flight", server.name, server.in_flight)
                if server.process is not None:
                    server.state = State.STARTING
                    self._spawn(self._revive(server))
        if state is not before:
            await self._notify()
        return State.DEAD if server.state is State.STARTING else state

    async def _revive(self, server: Server) -> None:
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
            await self._fail(error)
            return
        self.recoveries.append(time.monotonic() - began)
        log.warning("%s is back after %.1f s", server.name, self.recoveries[-1])
        await self._notify()

    async def _fail(self, error: BaseException) -> None:
        self._failure = error
        await self._notify()

    async def _notify(self, waiters: int = 1 << 30) -> None:
        async with self._changed:
            self._changed.notify(waiters)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def places(settings: SGLangConfig, number: int) -> list[str]:
    """The arguments that give launched server `number` GPUs of its own."""
    size, first = settings.gpus_per_server, settings.first_gpu + number * settings.gpus_per_server
    split = ["--tp-size", str(size)] if size > 1 else []
    return split + (["--base-gpu-id", str(first)] if first and torch.cuda.is_available() else [])


def launcher(
    settings: SGLangConfig, model: Model, logs: Path, number: int
) -> Callable[[], ServerProcess]:
    """What starts server `number` of those that are launched here; its log is in `logs`."""
    command, key = server_command(settings), api_key(settings)
    saver = ["--enable-memory-saver"] if settings.colocated else []
    interval = str(settings.stream_interval)
    streams = ["--incremental-streaming-output", "--stream-interval", interval]
    arguments = ["--dtype", model.dtype, *saver, *places(settings, number)]
    arguments += streams if settings.stream_interval else []
    arguments += ["--enable-return-routed-experts"] if model.routed_experts else []
    arguments += ["--enable-deterministic-inference"] if settings.deterministic else []
    arguments += shlex.split(settings.server_args)
    if key and "--config" in arguments:
        raise UserError(
            "sglang.server_args has --config, of which a server takes one, and the key goes by "
            "one; write its options into server_args themselves"
        )
    log_file, port = logs / f"sglang_{number}.log", settings.port and settings.port + number

    def launch() -> ServerProcess:
        checkpoint, host = model.hf_checkpoint, settings.host
        return ServerProcess(command, checkpoint, arguments, log_file, host, port, key)

    return launch
