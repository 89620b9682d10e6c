"""Rollouts from requests: each request is asked of servers until one has answered it well."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence

import numpy
import tenacity

from megatron_stare.config import EngineError, SGLangConfig
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import (
    FaultyAnswer,
    Request,
    SamplingParams,
    State,
    ends_with_stop,
)
from megatron_stare.rollout.sglang.admission import Admission, prefix_of
from megatron_stare.rollout.sglang.answers import NOTHING, Answer, Received, routing_of
from megatron_stare.rollout.sglang.client import BEYOND_PROMPT, ServerFault, SGLangClient
from megatron_stare.rollout.sglang.health import HealthMonitor, Spawn
from megatron_stare.rollout.sglang.server import Model, Server

log = logging.getLogger(__name__)

DRAFTS = ("drafts", "drafts_accepted")  # counts of draft tokens
# An aborted request is waited for this long; then the tokens streamed so far are its answer.
PART_SECONDS = 5.0
# A server ignores an abort that overtakes its request: the abort is repeated.
_REPEAT_SECONDS = 0.1
_NO_ADAPTERS = "LoRA adapter"  # in the refusal of a server that has none of the requested name


@dataclasses.dataclass(frozen=True, eq=False)
class InflightRequest:
    """A request that a server works on. `server` was chosen for it; behind a router another worker
    may have it. `streams`: its tokens so far are here, and stay when the rest is given up.
    """

    server: Server
    rid: str
    asking: asyncio.Task[Answer]
    seed: tuple[int, ...]
    streams: bool
    received: Received


class InflightRequests:
    """The requests in flight, and their abort. Behind a router (`routed`) any server may have any
    of them. All methods are for the pool's thread.
    """

    def __init__(self, admission: Admission, routed: bool) -> None:
        self._admission, self._routed = admission, routed
        self._requests: dict[tuple[int, ...], InflightRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def newest_part(self) -> float:
        """time.monotonic() of the newest part of their answers; 0 without any. From any thread."""
        times = (each.received.last_part or 0.0 for each in [*self._requests.values()])
        return max(times, default=0.0)

    def add(self, request: InflightRequest) -> None:
        """Note a request before its server is asked."""
        self._requests[request.seed] = request

    def remove(self, request: InflightRequest) -> None:
        """Forget a request that is answered, or whose answer is not needed any longer."""
        self._requests.pop(request.seed, None)

    async def abort_all(self, chosen: Callable[[InflightRequest], bool]) -> None:
        """Abort the chosen requests until each is answered. Those that stream are given up when no
        request was answered for PART_SECONDS.
        """
        before, answered = 0, time.monotonic()
        while found := [request for request in self._requests.values() if chosen(request)]:
            if len(found) < before:  # the server works on the aborts it has: none is repeated
                answered = time.monotonic()
            else:
                if time.monotonic() - answered > PART_SECONDS:
                    for request in found:
                        if request.streams:
                            request.asking.cancel()
                await self.abort(found)
            before = len(found)
            await asyncio.sleep(_REPEAT_SECONDS)

    async def abort(self, requests: Sequence[InflightRequest]) -> None:
        """Have the servers end these requests; one call aborts all where a server has no other
        request of this pool.
        """
        rids_of: dict[Server, list[str]] = {}
        for request in requests:
            for server in self._admission.alive() if self._routed else [request.server]:
                rids_of.setdefault(server, []).append(request.rid)
        ours = Counter[Server]()
        if len(requests) > 1:
            ours.update(request.server for request in self._requests.values())
        calls = []
        for server, rids in rids_of.items():
            most = ours.total() if self._routed else ours[server]
            everything = len(rids) > 1 and len(rids) >= most
            calls += [server.client.abort(rid) for rid in ([""] if everything else rids)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, Exception) and not isinstance(outcome, ServerFault):
                raise outcome


@dataclasses.dataclass
class _Pending:
    """A request as it will be asked next: with every interruption its part grows. Another server
    than `failed` is preferred; best is `own`, which was slow and has the part in its cache.
    """

    submitted: Request
    request: Request
    failed: Server | None = None
    own: Server | None = None


class RequestRunner:
    """Takes a request to its rollout: waits for a server (Admission), asks it, checks the answer.

    An interrupted request (new weights, the death of its server, sglang.request_timeout) keeps its
    tokens and is continued. After the death of a server it is asked again at once; after other
    faults after a pause, sglang.max_attempts times. All methods are for the pool's thread.
    """

    def __init__(
        self,
        model: Model,
        settings: SGLangConfig,
        admission: Admission,
        health: HealthMonitor,
        router: SGLangClient | None,
        counts: Counter[str],
        spawn: Spawn,
    ) -> None:
        self.model, self.settings = model, settings
        self.admission, self.health, self.router = admission, health, router
        self._ended = 0  # requests that a server has answered, cut short or failed
        self.inflight = InflightRequests(admission, routed=router is not None)
        self._counts, self._spawn = counts, spawn
        # in flight, waiting for a server, or about to be asked again
        self._active: set[tuple[int, ...]] = set()
        self._aborted: set[tuple[int, ...]] = set()

    @property
    def progress(self) -> tuple[int, float]:
        """Another value once a request has ended or a part of an answer has come: the last response
        of a batch may take longer than run.hang_timeout. From any thread.
        """
        return self._ended, self.inflight.newest_part

    async def run(self, request: Request, params: SamplingParams) -> Rollout:
        """The rollout of one request. EngineError: no server answered it well."""
        pending = _Pending(request, request)
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

    async def abort(self, named: set[tuple[int, ...]] | None) -> None:
        """Abort the requests of these seeds, or all; returns when they are answered."""
        seeds = self._active & (self._active if named is None else named)
        self._aborted |= seeds
        await self.admission.notify()
        # An answered request has left `_aborted`: a new submission of its seed is left alone.
        await self.inflight.abort_all(
            lambda request: request.seed in seeds and request.seed in self._aborted
        )

    async def interrupt(self) -> None:
        """Abort what is in flight under other weights than the expected; it is continued where a
        server holds those.
        """
        await self.inflight.abort_all(lambda request: request.server.weights != self.admission.tag)

    async def _attempt(self, pending: _Pending, params: SamplingParams) -> Rollout:
        """One answer. The death of a server is not a fault of the request: another server is asked,
        without limit.
        """
        while True:
            request = pending.request
            server = await self.admission.acquire(
                request, self._aborted, failed=pending.failed, own=pending.own
            )
            if server is None:
                self._counts["aborted"] += 1
                return self._finished(request, NOTHING, params, self.admission.version)
            try:
                # The server's version, not the pool's: the pool may expect newer weights by now.
                # All tokens of the answer bear it, also those that newer weights sample on a kept
                # cache: a token's version is that of the oldest weights that its probability
                # depends on.
                version = server.version
                answer, fault = await self._ask(server, request, params)
                rollout = self._finished(request, answer, params, version, self._place(server))
                own = request.seed in self._aborted
                self._counts["aborted"] += own and rollout.status == "aborted"
                if own or rollout.status != "aborted":
                    return rollout
                pending.request = self._continuation(pending.submitted, rollout)
                slow = fault is not None and fault.kind == "timeout"
                pending.own = server if slow else None
                pending.failed = server if fault and not slow else None
            except ServerFault as fault:
                pending.failed, pending.own = server, None
                self._counts[f"fault_{fault.kind}"] += 1
                log.info("%s", fault)
                if _NO_ADAPTERS in str(fault) and server.version == version:
                    server.doubt()
                lost = fault.kind in ("connection", "timeout")
                if lost and await self.health.probe(server) is State.DEAD:
                    continue
                raise
            finally:
                await self.admission.release(server)

    def _place(self, server: Server) -> int:
        """The server's place in the pool; -1 with a router, which may have chosen another."""
        return -1 if self.router is not None else self.admission.servers.index(server)

    async def _ask(
        self, server: Server, request: Request, params: SamplingParams
    ) -> tuple[Answer, ServerFault | None]:
        """The server's answer, checked; `aborted` with the tokens so far if it ended early. And the
        server's fault, if that is why.
        """
        expected, version = server.weights, server.version
        answer, fault = await self._answer(server, request, params)
        for kind, number in zip(DRAFTS, answer.drafts, strict=True):
            self._counts[kind] += number
        if self.admission.came_meanwhile(answer.weight_version, version):
            self._counts["mixed_cache_tokens"] += answer.newer
        elif answer.weight_version != expected and len(answer.ids):
            doubted = [server] if self.router is None else await self._with_other_weights(expected)
            for other in doubted:
                if other.weights == expected:
                    other.doubt()
            raise ServerFault(
                "garbage",
                f"{server.name} sampled with weights {answer.weight_version!r}, not {expected!r}",
            )
        if answer.status == "completed" and not self._ends_itself(answer, params):
            raise ServerFault(
                "garbage",
                f"{server.name} calls a response complete that ends with id {answer.ids[-1]}, "
                "which is not a stop id, and holds no stop string",
            )
        if answer.status != "aborted" or request.seed in self._aborted:
            return answer, None
        if server.weights != self.admission.tag:
            self._counts["interrupted"] += 1
            return answer, None
        fault = fault or ServerFault("status", f"{server.name} aborted a request unasked")
        if not len(answer.ids):
            raise fault
        log.info("%s; continued after %d tokens", fault, len(answer.ids))
        self._counts[f"fault_{fault.kind}"] += 1
        self._counts["continued"] += 1
        if fault.kind == "connection":
            await self.health.probe(server)
        return answer, fault

    async def _answer(
        self, server: Server, request: Request, params: SamplingParams
    ) -> tuple[Answer, ServerFault | None]:
        """The server's answer, and the fault that cut it short: a time-out, or a lost connection.
        ServerFault: nothing of the answer can be kept.
        """
        rid, client = uuid.uuid4().hex, self.router or server.client
        known = len(request.part.response_ids) if request.part else 0
        room = server.limits.prompt_length + BEYOND_PROMPT - len(request.known_ids)
        stops, new_tokens = self.model.stop_ids, min(params.max_new_tokens - known, room)
        received = Received(
            stops, params.stop, server.limits, new_tokens, mixed=self.admission.keeps_cache
        )
        affinity = "-".join(map(str, prefix_of(request))) if self.router is not None else ""
        key = server.weights if self.admission.keeps_cache else ""
        asking = asyncio.create_task(
            client.generate(request, params, stops, received, rid, affinity, key, server.adapters)
        )
        streams = bool(client.stream_interval)
        inflight = InflightRequest(server, rid, asking, request.seed, streams, received)
        self.inflight.add(inflight)
        late: ServerFault | None = None
        try:
            late = await self._overdue(asking, received, server)
            if late is not None:
                self._spawn(self.inflight.abort([inflight]))
                await asyncio.wait([asking], timeout=PART_SECONDS)
        finally:
            self._ended += 1
            self.inflight.remove(inflight)
            asking.cancel()
            # The server need not continue a request that was left or failed. An answer cut short by
            # `abort_all` needs no second abort.
            if not asking.done() or not (asking.cancelled() or asking.exception() is None):
                self._spawn(self.inflight.abort([inflight]))
        await asyncio.wait([asking])
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

    async def _overdue(
        self, asking: asyncio.Task[Answer], received: Received, server: Server
    ) -> ServerFault | None:
        """Wait for the answer. A fault: its first part does not come in sglang.queue_timeout, or
        another one in sglang.request_timeout.
        """
        since = time.monotonic()
        limit, name, missing = self.settings.queue_timeout, "queue_timeout", "part"
        while not asking.done():
            if received.last_part is not None:
                limit, name, missing = self.settings.request_timeout, "request_timeout", "new part"
                since = received.last_part
            left = since + limit - time.monotonic()
            if left <= 0:
                said = f"no {missing} of an answer in {limit:g} s (sglang.{name})"
                return ServerFault("timeout", f"{server.name}: {said}")
            # A part does not wake this: look again before the next could be overdue.
            await asyncio.wait([asking], timeout=min(left, self.settings.request_timeout))
        return None

    async def _with_other_weights(self, expected: str) -> list[Server]:
        """The servers that say they hold other weights than `expected`: a router does not say which
        worker answered.
        """
        found = []
        for server in self.admission.alive():
            with contextlib.suppress(ServerFault):  # the health monitor sees to a silent server
                if (await server.client.info()).weight_version != expected:
                    found.append(server)
        return found

    def _ends_itself(self, answer: Answer, params: SamplingParams) -> bool:
        """Whether a completed answer ends with a stop id or holds a stop string."""
        if answer.ids[-1] in self.model.stop_ids:
            return True
        text = self.model.tokenizer.decode(answer.ids, skip_special_tokens=False)
        return any(stop in text for stop in params.stop)

    def _given_up(self, request: Request, params: SamplingParams, fault: ServerFault) -> Rollout:
        """A substitute for a response that no server could sample: its part and a stop id, without
        loss tokens. It is unverifiable, so that it does not count in its group.
        """
        self._counts["invalid_rollouts"] += 1
        log.warning(
            "a rollout is left out of the loss after %d attempts: %s",
            self.settings.max_attempts,
            fault,
        )
        end = Rollout.inserted([min(self.model.stop_ids)], "truncated", self.admission.version)
        rollout = request.part.continued(end) if request.part else end
        text = self._text(rollout, params)
        return rollout.without_loss(text=text, verdict="unverifiable")

    def _finished(
        self,
        request: Request,
        answer: Answer,
        params: SamplingParams,
        version: int,
        server: int = -1,
    ) -> Rollout:
        """The request's part followed by the answer, up to a stop string that the server did not
        see. A part that was aborted at its last token is completed or truncated.
        """
        routing = self._routing(request, answer, params)
        if count := self._until_stop(request, answer, params.stop):
            if params.routing is not None and len(routing):
                routing = routing[: len(routing) - (len(answer.ids) - count) * params.routing.width]
            ids, logprobs = answer.ids[:count], answer.logprobs[:count]
            answer = dataclasses.replace(answer, ids=ids, logprobs=logprobs, status="completed")
        later = Rollout(
            answer.ids,
            answer.logprobs,
            numpy.ones(len(answer.ids), numpy.bool_),
            status=answer.status,
            weight_version=version,
            server=server,
            routing=routing,
        )
        rollout = request.part.continued(later) if request.part else later
        ids, status = rollout.response_ids, rollout.status
        if status == "aborted" and len(answer.ids):
            status = "completed" if ids[-1] in self.model.stop_ids else status
            if status == "aborted" and len(ids) >= params.max_new_tokens:
                status = "truncated"
        if status == "aborted":  # the text of a part is not needed
            return rollout
        return dataclasses.replace(rollout, status=status, text=self._text(rollout, params))

    def _until_stop(self, request: Request, answer: Answer, stops: Sequence[str]) -> int:
        """The number of new tokens up to the one that completes a stop string which the server did
        not see, 0 without one. It looks for them in new text alone, because the part is a prompt to
        it, and not at the last token of an answer that it aborts.
        """
        if not stops or not len(answer.ids):
            return 0
        begun = request.part.response_ids if request.part else numpy.zeros(0, numpy.int32)
        ids, counts = numpy.concatenate([begun, answer.ids]), list[int]()
        if request.part:
            longest = max(len(stop.encode()) for stop in stops)  # a token has at least one byte
            counts += range(1, min(longest, len(answer.ids)) + 1)
        if answer.status == "aborted":
            counts.append(len(answer.ids))
        tokenizer = self.model.tokenizer
        each = (n for n in counts if ends_with_stop(tokenizer, ids[: len(begun) + n], stops))
        return next(each, 0)

    def _routing(self, request: Request, answer: Answer, params: SamplingParams) -> numpy.ndarray:
        """The experts of the new positions; none, which is counted, if the server sent none. An
        answer without tokens has none.
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
        # The tokenizer checks every number of a list, which takes longer than to decode an array.
        ids, skip = rollout.response_ids, params.skip_special_tokens
        return self.model.tokenizer.decode(ids, skip_special_tokens=skip)

    def _continuation(self, request: Request, part: Rollout) -> Request:
        """The interrupted request with its tokens so far; as it was submitted, which every server
        can read, if one cannot read that much.
        """
        longer = dataclasses.replace(request, part=part if len(part.response_ids) else None)
        longest = min(server.limits.prompt_length for server in self.admission.servers)
        if len(longer.known_ids) > longest:
            self._counts["parts_dropped"] += 1
            return request
        return longer
