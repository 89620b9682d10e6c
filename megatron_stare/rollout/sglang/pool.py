"""Several SGLang servers as one engine:
the least loaded serves, a faulty answer is asked for again, the dead revive.

A request's life: `submit` takes it -> waits for a server with room that holds the current weights
-> is answered, checked, turned into a Rollout -> or is interrupted by new weights: it keeps its
tokens and goes on behind them -> or
fails: a dead server's requests move on at once, other faults after a back-off, sglang.max_attempts
times. Every request has its own future, so none is lost and none is doubled whoever answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

import tenacity

from megatron_stare.config import SGLangConfig
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import EngineError, Request, SamplingParams, State
from megatron_stare.rollout.sglang.client import Answer, ServerFault
from megatron_stare.rollout.sglang.fleet import Fleet
from megatron_stare.rollout.sglang.router import with_other_weights
from megatron_stare.rollout.sglang.server import Model, Server

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Pending:
    """A request as it is to be asked next: it grows where new weights interrupt it."""

    request: Request


class SGLangPool(Fleet):
    """A fleet that answers requests. `version` is that of the weights a rollout must come from."""

    def __init__(self, settings: SGLangConfig, model: Model, logs: Path) -> None:
        super().__init__(settings, model, logs)
        self._in_flight: dict[tuple[int, ...], tuple[Server, str]] = {}
        # in flight, waiting for a server, or about to be asked again
        self._active: set[tuple[int, ...]] = set()
        self._aborted: set[tuple[int, ...]] = set()

    # --- for the trainer's thread
    # -------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], params: SamplingParams
    ) -> list[concurrent.futures.Future[Rollout]]:
        """One future per request; cancelling one aborts what is in flight of it.

        UserError, before a server sees any of it, for a request that none can serve.
        """
        for request in requests:
            self.limits.check(request, params)
        if len({request.seed for request in requests}) != len(requests):
            raise ValueError(
                "two requests of one call share a seed, so that none of them can be named"
            )
        return [self.run(self._one(request, params)) for request in requests]

    def generate(
        self, requests: Sequence[Request], params: SamplingParams
    ) -> concurrent.futures.Future[list[Rollout]]:
        """`submit` with one future for all, in order; the first failure is its failure."""
        futures = self.submit(requests, params)

        async def all_of_them() -> list[Rollout]:
            return await asyncio.gather(*map(asyncio.wrap_future, futures))

        return self.run(all_of_them())

    def interrupt(self) -> None:
        """End what is in flight under other weights than the expected;
        it goes on where they are held.
        """
        self.run(self._interrupt())

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these requests, or all;
        their rollouts come back `aborted`. Does not wait for them.
        """
        self.run(self._abort(None if requests is None else {request.seed for request in requests}))

    def counts(self) -> dict[str, float]:
        """Faults by kind, restarts, aborted and interrupted requests since the start;
        seconds of the slowest recovery.

        begun_anew: interrupted so near the end of the servers' context that none could read what
        there was.
        """
        faults = ("fault_connection", "fault_timeout", "fault_status", "fault_garbage")
        kinds = (*faults, "restarts", "aborted", "interrupted", "begun_anew")
        counted = {f"engine_{kind}": float(self._counts[kind]) for kind in kinds}
        slowest = max(self.recoveries, default=0.0)
        recovered = {
            "engine_recoveries": float(len(self.recoveries)),
            "engine_recovery_seconds_max": slowest,
        }
        return counted | recovered

    # --- in the pool's thread
    # -----------------------------------------------------------------------------------------

    async def _one(self, request: Request, params: SamplingParams) -> Rollout:
        """The rollout of one request, from whichever server answers it well."""
        pending = _Pending(request)
        self._active.add(request.seed)
        try:
            async for attempt in tenacity.AsyncRetrying(
                stop=tenacity.stop_after_attempt(self.settings.max_attempts),
                wait=tenacity.wait_random_exponential(multiplier=0.25, max=10),
                retry=tenacity.retry_if_exception_type(ServerFault),
                reraise=True,
            ):
                with attempt:
                    return await self._attempt(pending, params)
        except ServerFault as fault:
            raise EngineError(
                f"{self.settings.max_attempts} faulty answers (sglang.max_attempts) to one "
                f"request; the last: {fault}"
            ) from fault
        finally:
            self._active.discard(request.seed)
            self._aborted.discard(request.seed)
        raise AssertionError("tenacity returns or raises")

    async def _attempt(self, pending: _Pending, params: SamplingParams) -> Rollout:
        """One answer. The death of a server is no fault of the request:
        another takes it, as often as need be.
        """
        while True:
            request = pending.request
            server = await self._acquire(request)
            if server is None:
                self._counts["aborted"] += 1
                return self._finished(request, Answer((), (), "aborted", ""), params, self.version)
            try:
                version = self.version
                rollout = self._finished(
                    request, await self._ask(server, request, params), params, version
                )
                if rollout.status != "aborted" or request.seed in self._aborted:
                    return rollout
                pending.request = self._to_go_on(request, rollout)
            except ServerFault as fault:
                self._counts[f"fault_{fault.kind}"] += 1
                log.info("%s", fault)
                if (
                    fault.kind in ("connection", "timeout")
                    and await self._look(server) is State.DEAD
                ):
                    continue
                raise
            finally:
                server.in_flight -= 1
                await self._notify(1)

    async def _ask(self, server: Server, request: Request, params: SamplingParams) -> Answer:
        rid, expected, client = uuid.uuid4().hex, server.weights, self.router or server.client
        self._in_flight[request.seed] = (server, rid)
        answered = False
        try:
            answer = await client.generate(
                request,
                params,
                self.model.stop_ids,
                server.limits,
                rid,
                self.settings.request_timeout,
            )
            answered = True
        finally:
            self._in_flight.pop(request.seed, None)
            if not answered:  # cancelled, too late, or faulty: the server need not go on with it
                self._spawn(self._end(server, rid))
        if answer.weight_version != expected and answer.ids:
            for other in (
                [server]
                if self.router is None
                else await with_other_weights(self.alive(), expected)
            ):
                if other.weights == expected:
                    other.weights = ""
            raise ServerFault(
                "garbage",
                f"{server.name} sampled with weights {answer.weight_version!r}, not {expected!r}",
            )
        if answer.status == "aborted":
            if request.seed in self._aborted:
                self._counts["aborted"] += 1
            elif server.weights != self.tag:
                self._counts["interrupted"] += 1
            else:
                raise ServerFault("status", f"{server.name} aborted a request unasked")
        return answer

    def _finished(
        self, request: Request, answer: Answer, params: SamplingParams, version: int
    ) -> Rollout:
        """The request's part and what was sampled behind it.
        A part that was ended at its last token is whole.
        """
        later = Rollout(answer.ids, answer.logprobs, (1,) * len(answer.ids), answer.status, version)
        rollout = request.part.continued(later) if request.part else later
        ids, status = rollout.response_ids, rollout.status
        if status == "aborted" and answer.ids:
            status = "completed" if ids[-1] in self.model.stop_ids else status
            status = (
                "truncated" if status == "aborted" and len(ids) >= params.max_new_tokens else status
            )
        text = self.model.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return dataclasses.replace(rollout, status=status, text=text)

    def _to_go_on(self, request: Request, part: Rollout) -> Request:
        """The interrupted request, with what it has."""
        longer = dataclasses.replace(request, part=part if part.response_ids else None)
        if len(longer.known_ids) > self.limits.prompt_length:
            self._counts["begun_anew"] += 1
            return dataclasses.replace(request, part=None)
        return longer

    async def _acquire(self, request: Request) -> Server | None:
        """The least loaded server that can take the request now;
        waits for one. None: it was aborted meanwhile.
        """
        async with self._changed:
            while request.seed not in self._aborted:
                if self._failure is not None:
                    raise EngineError(str(self._failure)) from self._failure
                free = [server for server in self.servers if self._has_room(server)]
                if free:
                    chosen = min(free, key=lambda server: server.in_flight)
                    chosen.in_flight += 1
                    return chosen
                await self._changed.wait()
            return None

    def _has_room(self, server: Server) -> bool:
        usable = server.state is State.READY and server.weights == self.tag and not self._paused
        if (
            self.router is not None
        ):  # it chooses the worker, so that every one must be fit to answer
            usable = usable and self.up_to_date()
        return usable and not server.released and server.in_flight < self.settings.max_concurrency

    async def _abort(self, named: set[tuple[int, ...]] | None) -> None:
        seeds = self._active & (self._active if named is None else named)
        self._aborted |= seeds
        await self._notify()
        # A server ignores the id of a request that has not reached it yet: say it until it is
        # answered.
        while found := [self._in_flight[seed] for seed in seeds & self._in_flight.keys()]:
            await asyncio.gather(*(self._end(server, rid) for server, rid in found))
            await asyncio.sleep(0.1)

    async def _interrupt(self) -> None:
        while stale := [
            (server, rid) for server, rid in self._in_flight.values() if server.weights != self.tag
        ]:
            await asyncio.gather(*(self._end(server, rid) for server, rid in stale))
            await asyncio.sleep(0.05)

    async def _end(self, server: Server, rid: str) -> None:
        for one in [server] if self.router is None else self.alive():
            with contextlib.suppress(
                ServerFault, RuntimeError
            ):  # httpx's own, where the pool was closed meanwhile
                await one.client.abort(rid)
