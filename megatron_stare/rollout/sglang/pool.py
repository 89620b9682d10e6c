"""Several SGLang servers as one engine:
who has the prefix serves, a faulty answer is asked for again, the dead revive.

A request's life: `submit` takes it -> waits for a server with room that holds the current weights
-> is answered, checked, turned into a Rollout -> or is interrupted, by new weights, by the death of
its server, or because it took longer than sglang.request_timeout: it keeps the tokens that have
come and goes on behind them -> or fails: after the death of a server it moves on at once, after
other faults when it has waited, sglang.max_attempts times. Every request has its own future, so
none is lost and none is doubled whoever answers.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy
import tenacity

from megatron_stare.config import EngineError, SGLangConfig
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import FaultyAnswer, Request, SamplingParams, State
from megatron_stare.rollout.sglang.answers import NOTHING, Answer, Received, routing_of
from megatron_stare.rollout.sglang.client import ServerFault
from megatron_stare.rollout.sglang.fleet import Fleet
from megatron_stare.rollout.sglang.flights import PART_SECONDS, Flight, Flights
from megatron_stare.rollout.sglang.router import Affinity, prefix_of, with_other_weights
from megatron_stare.rollout.sglang.server import Model, Server

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Pending:
    """A request as it should be asked next: it grows where it is interrupted.
    `last` was slow or failed: if there is another server, that one is asked.
    """

    request: Request
    last: Server | None = None


class SGLangPool(Fleet):
    """A fleet that answers requests. `version` is that of the weights a rollout must come from."""

    def __init__(self, settings: SGLangConfig, model: Model, logs: Path) -> None:
        super().__init__(settings, model, logs)
        self._flights = Flights(None if self.router is None else self.alive)
        # in flight, waiting for a server, or about to be asked again
        self._active: set[tuple[int, ...]] = set()
        self._aborted: set[tuple[int, ...]] = set()
        self._affinity = Affinity()

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
        """Faults by kind, restarts, syncs after which a server held other weights, aborted and
        interrupted requests since the start; seconds of the slowest recovery.

        begun_anew: interrupted so near the end of the servers' context that none could read what
        there was. continued: taken from a server that was too slow or lost, with the tokens there
        were. invalid_rollouts: given up, because the model's probabilities were no numbers.
        answers_without_routing: which experts were chosen was asked for, and not told.
        """
        faults = ("fault_connection", "fault_timeout", "fault_status", "fault_garbage")
        ends = ("aborted", "interrupted", "continued", "begun_anew", "invalid_rollouts")
        kinds = (*faults, "restarts", "corrupt_syncs", *ends, "answers_without_routing")
        counted = {f"engine_{kind}": float(self._counts[kind]) for kind in kinds}
        return counted | {
            "engine_recoveries": float(len(self.recoveries)),
            "engine_recovery_seconds_max": max(self.recoveries, default=0.0),
        }

    # --- in the pool's thread

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
            if fault.unsound:
                return self._given_up(pending.request, params, fault)
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
            server = await self._acquire(request, pending.last)
            if server is None:
                self._counts["aborted"] += 1
                return self._finished(request, NOTHING, params, self.version)
            try:
                # Not the pool's, which may expect others by now: those that will sample this.
                version = server.version
                answer, slow = await self._ask(server, request, params)
                rollout = self._finished(request, answer, params, version)
                own = request.seed in self._aborted
                self._counts["aborted"] += own and rollout.status == "aborted"
                if own or rollout.status != "aborted":
                    return rollout
                pending.request = self._to_go_on(request, rollout)
                pending.last = server if slow else None
            except ServerFault as fault:
                pending.last = server
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
                if self._has_room(server):  # new weights end thousands, and none is taken then
                    await self._notify(1)

    async def _ask(
        self, server: Server, request: Request, params: SamplingParams
    ) -> tuple[Answer, bool]:
        """The server's answer, checked; `aborted` where it ended early, with the tokens it has.
        And whether the server is at fault for that.
        """
        expected = server.weights
        answer, fault = await self._answer(server, request, params)
        if answer.weight_version != expected and len(answer.ids):
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
        if answer.status == "completed" and not self._ends_itself(answer, params):
            raise ServerFault(
                "garbage",
                f"{server.name} calls a response complete that ends with id {answer.ids[-1]}, "
                "which is no stop id, and holds no stop string",
            )
        if answer.status != "aborted" or request.seed in self._aborted:
            return answer, False
        if server.weights != self.tag:
            self._counts["interrupted"] += 1
        else:
            fault = fault or ServerFault("status", f"{server.name} aborted a request unasked")
            if not len(answer.ids):
                raise fault
            log.info("%s; it goes on behind %d tokens", fault, len(answer.ids))
            self._counts[f"fault_{fault.kind}"] += 1
            self._counts["continued"] += 1
            if fault.kind == "connection":
                await self._look(server)
            return answer, True
        return answer, False

    async def _answer(
        self, server: Server, request: Request, params: SamplingParams
    ) -> tuple[Answer, ServerFault | None]:
        """What the server said, and what kept it from saying more: it took too long, or was lost.
        ServerFault: it said nothing that can be kept.
        """
        rid, client = uuid.uuid4().hex, self.router or server.client
        patience, seed = self.settings.request_timeout, request.seed
        known = len(request.part.response_ids) if request.part else 0
        stops, new_tokens = self.model.stop_ids, params.max_new_tokens - known
        received = Received(stops, params.stop, server.limits, new_tokens)
        affinity = "-".join(map(str, prefix_of(request))) if self.router is not None else ""
        asking = asyncio.create_task(
            client.generate(
                request, params, stops, received, rid, patience + PART_SECONDS, affinity
            )
        )
        flight = Flight(server, rid, asking, seed, bool(client.stream_interval))
        self._flights.add(flight)
        late: ServerFault | None = None
        try:
            done, _ = await asyncio.wait([asking], timeout=patience)
            if not done:
                late = ServerFault("timeout", f"{server.name}: no end of it in {patience:g} s")
                self._spawn(self._flights.end([flight]))
                await asyncio.wait([asking])
        finally:
            self._flights.remove(flight)
            asking.cancel()
            # Where it was left, or failed, the server need not go on with it; one that was cut has
            # been told.
            if not asking.done() or not (asking.cancelled() or asking.exception() is None):
                self._spawn(self._flights.end([flight]))
        if not asking.cancelled():
            fault = asking.exception()
            if fault is None:
                return asking.result(), late
            if not isinstance(fault, ServerFault) or fault.kind in ("status", "garbage"):
                raise fault
            late = fault
        try:
            return received.answer(), late
        except FaultyAnswer as error:
            raise ServerFault("garbage", f"{server.name}: {error}") from None

    def _ends_itself(self, answer: Answer, params: SamplingParams) -> bool:
        """Whether a completed answer has what ends a response."""
        if answer.ids[-1] in self.model.stop_ids:
            return True
        text = self.model.tokenizer.decode(answer.ids, skip_special_tokens=False)
        return any(stop in text for stop in params.stop)

    def _given_up(self, request: Request, params: SamplingParams, fault: ServerFault) -> Rollout:
        """What stands in for a response that no server could sample: the part that there is and an
        end, none of it a loss token. It is unverifiable, so that it does not count in its group.
        """
        self._counts["invalid_rollouts"] += 1
        log.warning(
            "a rollout is left out of the loss after %d attempts: %s",
            self.settings.max_attempts,
            fault,
        )
        end = Rollout.inserted([min(self.model.stop_ids)], "truncated", self.version)
        rollout = request.part.continued(end) if request.part else end
        text = self._text(rollout, params)
        return rollout.without_loss(text=text, verdict="unverifiable")

    def _finished(
        self, request: Request, answer: Answer, params: SamplingParams, version: int
    ) -> Rollout:
        """The request's part and what was sampled behind it.
        A part that was ended at its last token is whole.
        """
        mask = numpy.ones(len(answer.ids), numpy.bool_)
        later = Rollout(
            answer.ids,
            answer.logprobs,
            mask,
            status=answer.status,
            weight_version=version,
            routing=self._routing(request, answer, params),
        )
        rollout = request.part.continued(later) if request.part else later
        ids, status = rollout.response_ids, rollout.status
        if status == "aborted" and len(answer.ids):
            status = "completed" if ids[-1] in self.model.stop_ids else status
            if status == "aborted" and len(ids) >= params.max_new_tokens:
                status = "truncated"
        if status == "aborted":  # nobody reads half a text
            return rollout
        return dataclasses.replace(rollout, status=status, text=self._text(rollout, params))

    def _routing(self, request: Request, answer: Answer, params: SamplingParams) -> numpy.ndarray:
        """The experts of the positions behind those that are known; none, which is counted, where
        the server told none. Of an answer without tokens nothing is kept.
        """
        nothing = numpy.zeros(0, numpy.uint8)
        if params.routing is None or not len(answer.ids):
            return nothing
        if not answer.routed:
            self._counts["answers_without_routing"] += 1
            return nothing
        read = len(request.known_ids) + len(answer.ids) - 1
        try:
            return routing_of(answer.routed, read - request.routed(params.routing), params.routing)
        except FaultyAnswer as error:
            raise ServerFault("garbage", str(error)) from None

    def _text(self, rollout: Rollout, params: SamplingParams) -> str:
        # An array: of a list it looks at every number, which takes longer than to decode it.
        ids, skip = rollout.response_ids, params.skip_special_tokens
        return self.model.tokenizer.decode(ids, skip_special_tokens=skip)

    def _to_go_on(self, request: Request, part: Rollout) -> Request:
        """The interrupted request, with what it has."""
        longer = dataclasses.replace(request, part=part if len(part.response_ids) else None)
        if len(longer.known_ids) > self.limits.prompt_length:
            self._counts["begun_anew"] += 1
            return dataclasses.replace(request, part=None)
        return longer

    async def _acquire(self, request: Request, last: Server | None = None) -> Server | None:
        """A server that can take the request now, `last` only if no other can; waits for one.
        None: it was aborted meanwhile.
        """
        async with self._changed:
            while request.seed not in self._aborted:
                if self._failure is not None:
                    raise EngineError(str(self._failure)) from self._failure
                free = [server for server in self.servers if self._has_room(server)]
                if free:
                    others = [server for server in free if server is not last]
                    chosen = self._affinity.choose(others or free, prefix_of(request))
                    chosen.in_flight += 1
                    return chosen
                await self._changed.wait()
            return None

    def _has_room(self, server: Server) -> bool:
        usable = server.state is State.READY and server.weights == self.tag
        if (
            self.router is not None
        ):  # it chooses the worker, so that every one must be fit to answer
            usable = usable and self.up_to_date()
        return usable and not server.released and server.in_flight < self.settings.max_concurrency

    async def _abort(self, named: set[tuple[int, ...]] | None) -> None:
        seeds = self._active & (self._active if named is None else named)
        self._aborted |= seeds
        await self._notify()
        await self._flights.end_all(lambda flight: flight.seed in seeds)

    async def _interrupt(self) -> None:
        await self._flights.end_all(lambda flight: flight.server.weights != self.tag)
