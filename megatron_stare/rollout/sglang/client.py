"""The endpoints of one SGLang server. The server's abilities are asked of the server, not concluded
from its version; the tests run 0.5.23.

Every answer is checked before it is used. A wrong one is a ServerFault with the kind of the fault,
so that the pool can count it and decide whether to ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import aiohttp
import numpy
import orjson

from megatron_stare.config import EngineError, UserError
from megatron_stare.http_client import FAULTS, authorization, body_of, session
from megatron_stare.rollout.engine import (
    FaultyAnswer,
    Request,
    SamplingParams,
    State,
    UnsoundAnswer,
    seed_number,
)
from megatron_stare.rollout.sglang.answers import (
    Answer,
    Prefill,
    Received,
    decoded,
    prefill_request,
    read_prefill,
)

Fault = Literal["connection", "timeout", "status", "garbage"]
# A response ends when it and its prompt have this many tokens more than the longest prompt that the
# server takes. Two tokens of the context are then left.
BEYOND_PROMPT = 5
# Even a busy server answers requests without generation within this time.
QUICK_SECONDS = 30.0
# Older servers fail to write this answer for some tokenizers, and then close the connection.
_LAST_ON_A_CONNECTION = ("/tokenize",)
# The weights are new although the status is 400: only the prefix cache was kept, because requests
# were running.
_NOT_FLUSHED = "the cache was not flushed"
# The answers of these are text, or null.
_WITHOUT_ANSWER = (
    "/abort_request",
    "/flush_cache",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)


class ServerFault(EngineError):
    """A request to one server failed; another try, or another server, may do better.
    `status`: of the answer, if it was not 200. `unsound`: it answered with probabilities that are
    no numbers.
    """

    def __init__(
        self, kind: Fault, message: str, *, status: int | None = None, unsound: bool = False
    ) -> None:
        super().__init__(message)
        self.kind: Fault = kind
        self.status, self.unsound = status, unsound


@dataclass(frozen=True)
class ServerInfo:
    """A server's description of itself. `ranks` (TP x PP) processes hold its weights."""

    model_path: str
    model_type: str
    device: str
    dtype: str
    context_length: int
    prompt_length: int
    tensor_size: int
    pipeline_size: int
    weight_version: str
    saves_memory: bool = False  # started with --enable-memory-saver
    streams: bool = False  # an event of a stream has the new tokens only
    stream_interval: int = 1  # tokens per event, by default
    first_gpu: int = 0  # the number, on its node, of the first GPU
    nodes: int = 1
    routed_experts: bool = False  # started with --enable-return-routed-experts
    deterministic: bool = False  # started with --enable-deterministic-inference
    hidden_states: bool = False  # started with --enable-return-hidden-states
    fp32_logits: bool = False  # started with --enable-fp32-lm-head
    adapter_rank: int = 0  # the highest of adapters that it serves
    adapter_targets: frozenset[str] = frozenset()  # the projections whose adapters it serves
    speculation: str = ""  # how it drafts tokens
    accept_threshold: float = 1.0  # the lowest; below 1 speculation is not exact

    @property
    def ranks(self) -> int:
        return self.tensor_size * self.pipeline_size


def _with_adapters(name: str) -> dict[str, str]:
    return {"lora_path": name} if name else {}


def _encoded(body: Mapping[str, Any]) -> bytes:
    """JSON; an array becomes a list of its numbers."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


class SGLangClient:
    """The endpoints that RL needs. Every method raises ServerFault, and none but `generate` waits
    forever.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self.stream_interval = 0  # tokens per event; 0: answers come whole
        self.headers = authorization(key)
        self._connections: aiohttp.ClientSession | None = None  # opened in the loop that asks
        self._responses: set[aiohttp.ClientResponse] = set()  # that are being read
        self._closed = False

    async def close(self) -> None:
        """Drop the connections; requests in flight raise ServerFault."""
        self._closed = True
        for response in self._responses:  # aiohttp would have its reader wait for ever
            response.close()
        if self._connections is not None:
            await self._connections.close()

    async def info(self) -> ServerInfo:
        """The server's description of itself."""
        server = await self._described("server_info")
        model = await self._described("model_info")
        models = await self.call("GET", "/v1/models")
        try:
            longest = int(server["max_req_input_len"]) - 1  # a prompt of that length is refused
            return ServerInfo(
                # The path at its start: an update from disk changes /model_info's.
                model_path=str(server.get("model_path") or model["model_path"]),
                model_type=str(model.get("model_type") or ""),
                device=str(server.get("device") or ""),
                dtype=str(server.get("dtype") or "auto"),
                # The memory of its cache may hold less than --context-length.
                context_length=min(
                    int(models["data"][0]["max_model_len"]), longest + BEYOND_PROMPT + 2
                ),
                prompt_length=longest,
                tensor_size=int(server["tp_size"]),
                pipeline_size=int(server.get("pp_size", 1)),
                weight_version=str(model.get("weight_version", server.get("weight_version", ""))),
                saves_memory=bool(server.get("enable_memory_saver")),
                streams=bool(server.get("incremental_streaming_output")),
                stream_interval=int(server.get("stream_interval") or 1),
                first_gpu=int(server.get("base_gpu_id") or 0),
                nodes=int(server.get("nnodes") or 1),
                routed_experts=bool(server.get("enable_return_routed_experts")),
                deterministic=bool(server.get("enable_deterministic_inference")),
                hidden_states=bool(server.get("enable_return_hidden_states")),
                fp32_logits=bool(server.get("enable_fp32_lm_head")),
                adapter_rank=int(server.get("max_lora_rank") or 0),
                adapter_targets=frozenset(server.get("lora_target_modules") or ()),
                speculation=str(server.get("speculative_algorithm") or "").lower(),
                accept_threshold=min(
                    float(server.get(f"speculative_accept_threshold_{kind}", 1.0))
                    for kind in ("single", "acc")
                ),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ServerFault("garbage", f"{self.url}: its description lacks {error}") from None

    async def prefill(
        self,
        ids: numpy.ndarray,
        vocab_size: int,
        timeout: float,
        hidden: bool = False,
        adapters: str = "",
    ) -> Prefill:
        """The server's answer for ids that it only reads. FaultyAnswer: as of `read_prefill`."""
        body = prefill_request(ids, hidden) | _with_adapters(adapters)
        answer = await self.call("POST", "/generate", body, timeout)
        return read_prefill(answer, ids, vocab_size)

    async def state(self, timeout: float) -> State | None:
        """READY or PAUSED; None if the server answers and is too old to say which.

        A busy or paused server answers, with its schedulers; a starting or dead one raises.
        """
        await self._described("server_info", timeout)
        try:
            await self.call("GET", "/ready", timeout=timeout)
        except ServerFault as fault:
            if fault.status == 503:
                return State.PAUSED
            if fault.status == 404:
                return None
            raise
        return State.READY

    async def tokenize(self, text: str) -> list[int] | None:
        """The ids of the server's own tokenizer; None without such an endpoint or tokenizer."""
        try:
            answer = await self.call(
                "POST", "/tokenize", {"prompt": text, "add_special_tokens": False}
            )
        except ServerFault as fault:
            if fault.kind == "status":
                return None
            raise
        tokens = answer.get("tokens")
        return tokens if isinstance(tokens, list) else None

    async def generate(
        self,
        request: Request,
        params: SamplingParams,
        stop_ids: frozenset[int],
        received: Received,
        rid: str,
        affinity: str = "",
        cache_key: str = "",
        adapters: str = "",
    ) -> Answer:
        """The continuation of the request's part; `received` has its maximum length, and its tokens
        as they come, by which the caller sees how long to wait. `rid` names the request for
        `abort`; rids must be unique and of one length. Requests of one `affinity` share a prefix: a
        router may send them to one worker. Requests of different `cache_key`s never share a cached
        prefix. `adapters`: the name of those to sample with; a server that has none of this name
        refuses.
        """
        interval = {"stream_interval": self.stream_interval} if self.stream_interval else {}
        body = {
            "rid": rid,
            "input_ids": request.known_ids,
            "stream": bool(interval),
            "sampling_params": {
                "temperature": 0.0 if params.greedy else params.temperature,
                "top_p": params.top_p,
                "max_new_tokens": received.new_tokens,
                "stop_token_ids": sorted(stop_ids),
                "skip_special_tokens": params.skip_special_tokens,
                **({"stop": list(params.stop), "no_stop_trim": True} if params.stop else {}),
                # A server may have been started with other defaults.
                "top_k": 1 if params.greedy else params.top_k or -1,
                "min_p": 0.0,
                "sampling_seed": seed_number(request.seed),
                "repetition_penalty": 1.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                **interval,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            **_with_adapters(adapters),
        }
        if params.routing:
            start = request.routed(params.routing)
            body |= {"return_routed_experts": True, "routed_experts_start_len": start}
        if cache_key:
            body["extra_key"] = cache_key
        headers = {"x-smg-routing-key": affinity} if affinity else {}
        try:
            if interval:
                await self._stream(body, headers, received)
            else:
                received.add(await self.call("POST", "/generate", body, None, headers))
            if not received.finished:
                raise FaultyAnswer("the answer ended without a finish reason")
            return received.answer()
        except (FaultyAnswer, ValueError) as error:
            unsound = isinstance(error, UnsoundAnswer)
            raise ServerFault("garbage", f"{self.url}: {error}", unsound=unsound) from None

    async def _stream(
        self, body: dict[str, Any], headers: dict[str, str], received: Received
    ) -> None:
        """An answer in events."""
        async with self._request("POST", "/generate", body, None, headers) as response:
            while data := await response.content.readany():
                if not received.feed(data):
                    return

    async def abort(self, rid: str = "") -> None:
        """End the request `rid`, or all; they are answered with their tokens so far. An unknown rid
        is not an error.
        """
        await self.call("POST", "/abort_request", {"rid": rid, "abort_all": not rid})

    async def pause(self) -> None:
        """Stop decoding; requests in flight stay."""
        await self.call("POST", "/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self.call("POST", "/continue_generation", {})

    async def running(self) -> int:
        """Requests that the server is working on or keeps waiting."""
        answer = await self.call("GET", "/v1/loads")
        try:
            return sum(
                int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])
                for load in answer["loads"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault("garbage", f"{self.url}: its load lacks {error}") from None

    async def release_memory(self, tags: Collection[str], timeout: float) -> None:
        """Free the memory of these tags. The server must be idle: a busy one ends itself."""
        await self.call(
            "POST", "/release_memory_occupation", {"tags": sorted(tags)}, timeout=timeout
        )

    async def resume_memory(self, tags: Collection[str], timeout: float) -> None:
        """Take the memory of these tags again. A server ends itself if one was not released."""
        await self.call(
            "POST", "/resume_memory_occupation", {"tags": sorted(tags)}, timeout=timeout
        )

    async def start_update(self) -> None:
        """Open a session of weight updates, if the server has sessions; the session of a failed
        update is closed. Of a server that speculates, the draft model is left as it is.
        """
        try:
            await self._optional("/begin_weight_update", {"selector": "target"})
        except ServerFault as fault:
            if fault.status is None or "already open" not in str(fault):
                raise
            await self.end_update()
            await self._optional("/begin_weight_update", {"selector": "target"})

    async def end_update(self) -> None:
        """Close the session of weight updates."""
        await self._optional("/end_weight_update", {})

    async def update_weights(self, path: str, body: dict[str, Any], timeout: float) -> None:
        """Call one of the update endpoints. Caches of the old weights are flushed."""
        try:
            await self.call("POST", path, body, timeout=timeout)
        except ServerFault as fault:
            if fault.status is None or _NOT_FLUSHED not in str(fault):
                raise
            await self.call("POST", "/flush_cache", {})

    async def load_adapters(self, name: str, content: dict[str, Any], timeout: float) -> None:
        """Replace the server's adapters by those of `content`, under `name`, which then is also
        the name of its weights. Nothing may be in flight.
        """
        models = await self.call("GET", "/v1/models")
        for known in models["data"]:
            if known.get("parent"):
                old = {"lora_name": known["id"]}
                await self.call("POST", "/unload_lora_adapter", old, timeout)
        new = {"lora_name": name} | content
        await self.call("POST", "/load_lora_adapter_from_tensors", new, timeout)
        named = {"new_version": name, "abort_all_requests": False}
        await self.call("POST", "/update_weight_version", named)

    async def checksums(self, timeout: float) -> list[dict[str, Any]]:
        """Per rank {"checksums": {parameter: hash}, "parallelism_info": {"tp_rank": rank, ...}}.
        EngineError: the server computes none.
        """
        try:
            answer = await self.call("POST", "/weights_checker", {"action": "checksum"}, timeout)
            ranks, why = answer.get("ranks"), "its answer has none"
        except ServerFault as fault:
            if fault.kind != "status":
                raise
            ranks, why = None, str(fault)
        if not isinstance(ranks, list) or not ranks:
            raise EngineError(
                f"{self.url} computes no checksums of its weights ({why}); upgrade SGLang, or "
                "set sglang.verify_weights=false and watch logprob_diff"
            )
        for rank in ranks:  # SGLang 0.5.23 lists a rank's models, the policy first; 0.5.15 has one
            if isinstance(rank["parallelism_info"], list):
                rank["parallelism_info"] = rank["parallelism_info"][0]
        return ranks

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = QUICK_SECONDS,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """The JSON object of the answer; {} if it is empty."""
        async with self._request(method, path, body, timeout, headers) as response:
            content = await response.read()
        if not content.strip() or path in _WITHOUT_ANSWER:
            return {}
        try:
            answer = decoded(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerFault("garbage", f"{self.url}{path}: no JSON object: {content[:80]!r}")
        return answer

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout: float | None,
        headers: Mapping[str, str],
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to a request, of status 200. Everything is to be read from it in `timeout`
        seconds; None: the caller bounds it. UserError: this process may open no more files.
        """
        url, content = f"{self.url}{path}", None if body is None else _encoded(body)
        headers = {**headers, **({"content-type": "application/json"} if content else {})}
        if path in _LAST_ON_A_CONNECTION:
            headers["connection"] = "close"
        if self._closed:
            raise ServerFault("connection", f"{url}: this client is closed")
        if self._connections is None:
            self._connections = session(self.headers)
        asking = self._connections.request(
            method, url, data=body_of(content), headers=headers, allow_redirects=False
        )
        try:
            async with asyncio.timeout(timeout), asking as response:
                self._responses.add(response)
                try:
                    if response.status != 200:
                        refusal = (await response.text(errors="replace"))[:300]
                        said = f"{url}: status {response.status}: {refusal}"
                        raise ServerFault("status", said, status=response.status)
                    yield response
                finally:
                    self._responses.discard(response)
        except TimeoutError:
            raise ServerFault("timeout", f"{url}: no answer in {timeout:g} s") from None
        except FAULTS as error:
            # As a fault of the connection, it would let healthy servers count as dead.
            if getattr(error, "errno", None) == errno.EMFILE:
                raise UserError(
                    f"no connection to {url}: this process may open no more files; raise ulimit -n,"
                    " or lower sglang.max_concurrency"
                ) from None
            raise ServerFault(
                "connection", f"{url}: {type(error).__name__} {error}".strip()
            ) from None

    async def _described(self, name: str, timeout: float = QUICK_SECONDS) -> dict[str, Any]:
        """The answer to GET /<name>, which older servers call /get_<name>."""
        try:
            return await self.call("GET", f"/{name}", timeout=timeout)
        except ServerFault as fault:
            if fault.status != 404:
                raise
        return await self.call("GET", f"/get_{name}", timeout=timeout)

    async def _optional(self, path: str, body: dict[str, Any]) -> None:
        try:
            await self.call("POST", path, body)
        except ServerFault as fault:
            if fault.status != 404:
                raise
