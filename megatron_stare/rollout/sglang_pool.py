"""Several SGLang servers as one engine: the least loaded serves, a faulty answer is asked for again, the dead revive.

A request's life: `generate` takes it -> waits for a server with room that holds the current weights -> is answered,
checked, turned into a Rollout -> or fails: a dead server's requests move on at once, other faults after a back-off,
sglang.max_attempts times. Results are placed by request, so none is lost and none is doubled whoever answers.

Everything asynchronous runs in one thread of the pool's own; public methods may be called from any other.
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
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import tenacity

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import EngineError, Limits, Request, SamplingParams, State
from megatron_stare.rollout.sglang_client import Answer, ServerFault
from megatron_stare.rollout.sglang_process import ServerProcess, server_command
from megatron_stare.rollout.sglang_server import Model, Server

log = logging.getLogger(__name__)


class SGLangPool:
    """Servers attached by URL or launched here. `version` is that of the weights a rollout must come from."""

    def __init__(self, settings: SGLangConfig, model: Model, logs: Path) -> None:
        self.settings, self.model = settings, model
        self.version = -1
        self.recoveries: list[float] = []  # seconds from each death noticed to the revived server's first readiness
        self._run = uuid.uuid4().hex[:8]
        self._counts: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._paused = False
        self._in_flight: dict[tuple[int, ...], tuple[Server, str]] = {}
        self._aborted: set[tuple[int, ...]] = set()
        self._last_alive = time.monotonic()
        self._background: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-pool", daemon=True)
        self.servers = [Server(url, model, settings, url) for url in settings.urls] or [
            self._launched(number, logs) for number in range(settings.num_servers)
        ]

    # --- for the trainer's thread -------------------------------------------------------------------------------------

    def begin(self) -> concurrent.futures.Future[None]:
        """Start or attach every server, all at once. UserError or EngineError where one cannot serve."""
        self._thread.start()
        atexit.register(self.close)
        return self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine in the pool's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> concurrent.futures.Future[list[Rollout]]:
        """One rollout per request, in order; cancelling the future aborts what is in flight.

        UserError, before a server sees any of it, for a request that none can serve.
        """
        for request in requests:
            self.limits.check(request, params)
        if len({request.seed for request in requests}) != len(requests):
            raise ValueError("two requests of one call share a seed, so that none of them can be named")
        return self.run(self._generate(requests, params))

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
        """What servers call the weights of `version`: another run on the same servers has other names."""
        return f"{self._run}-{self.version}"

    @property
    def failure(self) -> BaseException | None:
        """Why the pool gave up; None while it has not."""
        return self._failure

    def expect(self, version: int) -> None:
        """From now on only servers that hold the weights of `version` (see `loaded`) are asked."""
        self.version = version

    def alive(self) -> list[Server]:
        """Servers that answer."""
        return [server for server in self.servers if server.state in (State.READY, State.PAUSED)]

    def without_weights(self) -> list[Server]:
        """Servers that answer but do not hold the expected weights."""
        return [server for server in self.alive() if server.weights != self.tag]

    def look(self) -> None:
        """Ask every server how it is, now; the dead are revived."""

        async def look_at_all() -> None:
            await asyncio.gather(*(self._look(server) for server in self.alive()))

        self.run(look_at_all()).result()

    def loaded(self, servers: Iterable[Server]) -> None:
        """Note that these servers now hold the expected weights."""

        async def note() -> None:
            for server in servers:
                server.weights = self.tag
            await self._notify()

        self.run(note()).result()

    def pause(self) -> None:
        """Stop every server's decoding where it is, and send it nothing new."""
        self._paused = True
        self.run(self._everywhere("pause", State.PAUSED)).result()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self.run(self._everywhere("resume", State.READY)).result()

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all in flight; their rollouts come back `aborted`. Does not wait for them."""
        seeds = set(self._in_flight) if requests is None else {request.seed for request in requests}
        self.run(self._abort(seeds))

    def health(self) -> dict[str, State]:
        """Each server's state, as last seen."""
        return {server.name: server.state for server in self.servers}

    def counts(self) -> dict[str, float]:
        """Faults by kind, restarts and aborted requests since the start; seconds of the slowest recovery."""
        kinds = ("fault_connection", "fault_timeout", "fault_status", "fault_garbage", "restarts", "aborted")
        counted = {f"engine_{kind}": float(self._counts[kind]) for kind in kinds}
        return counted | {"engine_recovery_seconds_max": max(self.recoveries, default=0.0)}

    def close(self) -> None:
        """End the launched servers and the thread."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            with contextlib.suppress(Exception):
                self.run(self._close()).result(timeout=60)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)

    # --- in the pool's thread -----------------------------------------------------------------------------------------

    def _launched(self, number: int, logs: Path) -> Server:
        command = server_command(self.settings.command)
        arguments = ["--dtype", self.model.dtype, *shlex.split(self.settings.server_args)]

        def launch() -> ServerProcess:
            file, port = logs / f"sglang_{number}.log", self.settings.port and self.settings.port + number
            return ServerProcess(command, self.model.hf_checkpoint, arguments, file, self.settings.host, port)

        return Server(f"sglang_{number}", self.model, self.settings, launch)

    async def _start(self) -> None:
        await asyncio.gather(*(server.start() for server in self.servers))
        for server in self.servers:
            self._spawn(self._watch(server))

    async def _close(self) -> None:
        watching = list(self._background)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await asyncio.gather(*(server.close() for server in self.servers))

    async def _generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Rollout]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(request, params)) for request in requests]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, request: Request, params: SamplingParams) -> Rollout:
        """The rollout of one request, from whichever server answers it well."""
        try:
            async for attempt in tenacity.AsyncRetrying(
                stop=tenacity.stop_after_attempt(self.settings.max_attempts),
                wait=tenacity.wait_random_exponential(multiplier=0.25, max=10),
                retry=tenacity.retry_if_exception_type(ServerFault),
                reraise=True,
            ):
                with attempt:
                    return await self._attempt(request, params)
        except ServerFault as fault:
            raise EngineError(
                f"{self.settings.max_attempts} faulty answers (sglang.max_attempts) to one request; the last: {fault}"
            ) from fault
        finally:
            self._aborted.discard(request.seed)
        raise AssertionError("tenacity returns or raises")

    async def _attempt(self, request: Request, params: SamplingParams) -> Rollout:
        """One answer. The death of a server is no fault of the request: another takes it, as often as need be."""
        while True:
            server = await self._acquire()
            try:
                if request.seed in self._aborted:
                    self._counts["aborted"] += 1
                    return self._rollout(Answer((), (), "aborted", ""), params)
                return self._rollout(await self._ask(server, request, params), params)
            except ServerFault as fault:
                self._counts[f"fault_{fault.kind}"] += 1
                log.info("%s", fault)
                if fault.kind in ("connection", "timeout") and await self._look(server) is State.DEAD:
                    continue
                raise
            finally:
                server.in_flight -= 1
                await self._notify(1)

    async def _ask(self, server: Server, request: Request, params: SamplingParams) -> Answer:
        rid, expected, client = uuid.uuid4().hex, server.weights, server.client
        self._in_flight[request.seed] = (server, rid)
        answered = False
        try:
            answer = await client.generate(
                request, params, self.model.stop_ids, server.limits, rid, self.settings.request_timeout
            )
            answered = True
        finally:
            self._in_flight.pop(request.seed, None)
            if not answered:  # cancelled, too late, or faulty: the server need not go on with it
                self._spawn(self._end(server, rid))
        if answer.weight_version != expected and answer.status != "aborted":
            if server.weights == expected:
                server.weights = ""
            raise ServerFault(
                "garbage", f"{server.name} sampled with weights {answer.weight_version!r}, not {expected!r}"
            )
        if answer.status == "aborted":
            if request.seed not in self._aborted:
                raise ServerFault("status", f"{server.name} aborted a request unasked")
            self._counts["aborted"] += 1
        return answer

    def _rollout(self, answer: Answer, params: SamplingParams) -> Rollout:
        return Rollout(
            response_ids=answer.ids,
            logprobs=answer.logprobs,
            loss_mask=(1,) * len(answer.ids),
            status=answer.status,
            weight_version=self.version,
            text=self.model.tokenizer.decode(answer.ids, skip_special_tokens=params.skip_special_tokens),
        )

    async def _acquire(self) -> Server:
        """The least loaded server that can take a request now; waits for one."""
        async with self._changed:
            while True:
                if self._failure is not None:
                    raise EngineError(str(self._failure)) from self._failure
                free = [server for server in self.servers if self._has_room(server)]
                if free:
                    chosen = min(free, key=lambda server: server.in_flight)
                    chosen.in_flight += 1
                    return chosen
                await self._changed.wait()

    def _has_room(self, server: Server) -> bool:
        usable = server.state is State.READY and server.weights == self.tag and not self._paused
        return usable and server.in_flight < self.settings.max_concurrency

    async def _watch(self, server: Server) -> None:
        """Look at the server for ever; revive it when it is dead."""
        while True:
            await asyncio.sleep(self.settings.health_interval)
            try:
                await self._look(server)
            except Exception as error:  # whatever it is, the requests that wait must hear of it
                await self._fail(error)
                return
            if server.state is not State.DEAD:
                self._last_alive = time.monotonic()
            elif all(other.state is State.DEAD for other in self.servers):
                silent = time.monotonic() - self._last_alive
                if silent > self.settings.start_timeout:
                    await self._fail(EngineError(f"no server of sglang.urls has answered for {silent:.0f} s"))
                    return

    async def _look(self, server: Server) -> State:
        """The server's state, asked of it; DEAD where it is being revived. One asks, though many may want to know."""
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
                        f"servers died more than sglang.max_restarts={self.settings.max_restarts} times; see "
                        f"{server.process.log if server.process else server.name}"
                    )
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

    async def _abort(self, seeds: set[tuple[int, ...]]) -> None:
        self._aborted |= seeds
        # A server ignores the id of a request that has not reached it yet: say it until it is answered.
        while found := [self._in_flight[seed] for seed in seeds & self._in_flight.keys()]:
            await asyncio.gather(*(self._end(server, rid) for server, rid in found))
            await asyncio.sleep(0.1)

    async def _end(self, server: Server, rid: str) -> None:
        with contextlib.suppress(ServerFault):
            await server.client.abort(rid)

    async def _everywhere(self, method: str, state: State) -> None:
        alive = self.alive()
        for outcome in await asyncio.gather(*(getattr(s.client, method)() for s in alive), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        for server in alive:
            server.state = state
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
