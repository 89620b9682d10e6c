"""The model endpoint: HTTP requests of agents to the sessions that their keys name.

A session's key comes as bearer token, as `x-api-key`, in the path, /s/<key>/v1/..., as header
`X-Session-ID`, or as `metadata.session` of the body. The first registered one counts. There is no
default session, since one mix-up trains one episode's tokens on another's reward. Slow answers send
a heartbeat, so that a weight update looks like one: comments in a stream, else white space before
the JSON. The endpoint never answers 429.

    401  no key, or an unknown one         409  the episode is over
    400  the call cannot be answered, or a limit of the episode is reached
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from aiohttp import web

from megatron_stare.config import UserError
from megatron_stare.rollout.agents.anthropic import ANTHROPIC
from megatron_stare.rollout.agents.chat import CHAT, TOKEN_IDS, Dialect, ModelCall, error_of
from megatron_stare.rollout.agents.messages import BadCall
from megatron_stare.rollout.agents.responses import RESPONSES
from megatron_stare.rollout.agents.session import ENDED, AgentSession, Delivery
from megatron_stare.rollout.episodes import EngineFailed

MOST_BODY = 256 << 20  # bytes: histories of long episodes come whole with every call
MOST_KEYS = 65_536  # closed sessions whose late calls get 409; calls of older ones get 401
DIALECTS = {
    "v1/chat/completions": CHAT,
    "v1/chat/completions/tokens": CHAT,
    "v1/responses": RESPONSES,
    "v1/messages": ANTHROPIC,
    "inference/v1/generate": TOKEN_IDS,
}
# A client that lost its connection may ask again before the loop has noticed the end of that
# connection. After this time and five rounds the loop has noticed it: on a busy host one round may
# take longer than that; an end that has arrived is read, and its handler called, within three.
NOTICE_SECONDS, NOTICE_ROUNDS = 0.01, 5
_NO_RETRY = {"x-should-retry": "false"}
# of a request, its body, and the session that it names
Answer = Callable[[web.Request, str, AgentSession], Awaitable[web.StreamResponse]]


class Endpoint:
    """An HTTP server in the running loop. Sessions are opened and closed by their owner."""

    def __init__(self, heartbeat_seconds: float, context_length: int) -> None:
        self.heartbeat_seconds, self.context_length = heartbeat_seconds, context_length
        self.sessions: dict[str, AgentSession] = {}
        self.counts: Counter[str] = Counter()
        self._over: dict[str, None] = {}  # keys of sessions that were closed
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen. UserError: the address cannot be had."""
        app = web.Application(client_max_size=MOST_BODY)
        for prefix in ("", "/s/{key}"):
            for path, dialect in DIALECTS.items():
                answer = functools.partial(self._answer, dialect)
                app.router.add_post(f"{prefix}/{path}", self._for_session(answer))
            for path in ("tokenize", "v1/tokenize", "v1/messages/count_tokens"):
                app.router.add_post(f"{prefix}/{path}", self._for_session(self._tokenize))
            app.router.add_get(f"{prefix}/v1/models", self._for_session(self._models))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        # Hundreds of episodes connect at the same time; a full queue of the kernel resets some.
        site = web.TCPSite(self._runner, host, port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise UserError(
                f"agents.port={port}: cannot listen on {host} ({error}); choose another, or 0"
            ) from None
        listening: socket.socket = site._server.sockets[0]  # type: ignore[union-attr]
        self.url = f"http://{host}:{listening.getsockname()[1]}"

    async def close(self) -> None:
        """End the server and its connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: AgentSession) -> None:
        """Answer this session's calls from now on."""
        self.sessions[session.key] = session

    def forget(self, session: AgentSession) -> None:
        """Answer this session's later calls with 409."""
        self.sessions.pop(session.key, None)
        self._over[session.key] = None
        if len(self._over) > MOST_KEYS:
            del self._over[next(iter(self._over))]

    def _for_session(self, answer: Answer) -> Callable[[web.Request], Any]:
        """A handler of requests: the answer for the session that a request names, or a refusal."""

        async def handled(request: web.Request) -> web.StreamResponse:
            try:
                body = await _text(request)
                found = self._session(request, body)
                if isinstance(found, web.Response):
                    return found
                return await answer(request, body, found)
            except BadCall as error:
                return _refused(error)
            except ConnectionError:  # the client is gone; it may ask again
                self.counts["lost_connections"] += 1
                return web.Response()

        return handled

    async def _answer(
        self, dialect: Dialect, request: web.Request, body: str, session: AgentSession
    ) -> web.StreamResponse:
        call = _call_of(dialect, _json(body))
        retries = (request.headers.get("x-stainless-retry-count") or "0") != "0"
        alive = _liveness(request)
        if session.knows(body):
            await asyncio.sleep(NOTICE_SECONDS)
            for _ in range(NOTICE_ROUNDS):
                await asyncio.sleep(0)
            if not alive():
                raise ConnectionError
            if session.closed or session.ended:
                return self._late(session.ended)
        delivery = session.ask(call, body, retries, alive)
        return await _answered(request, dialect, call, delivery, self.heartbeat_seconds)

    async def _tokenize(
        self, request: web.Request, body: str, session: AgentSession
    ) -> web.Response:
        """The ids of messages, and their number in the words of both dialects that ask for it."""
        dialect = ANTHROPIC if request.path.endswith("count_tokens") else CHAT
        asked = _json(body)
        call = _call_of(dialect, asked)
        begin = asked.get("add_generation_prompt", True) is not False
        ids = session.renderer.prompt(call.messages, call.tools, begin).tolist()
        count = {"count": len(ids), "input_tokens": len(ids), "max_model_len": self.context_length}
        return web.json_response({**count, "tokens": ids})

    async def _models(self, request: web.Request, body: str, session: AgentSession) -> web.Response:
        model = {"id": "policy", "object": "model", "max_model_len": self.context_length}
        return web.json_response({"object": "list", "data": [model]})

    def _session(self, request: web.Request, body: str) -> AgentSession | web.Response:
        keys = [
            request.match_info.get("key", ""),
            request.headers.get("Authorization", "").removeprefix("Bearer ").strip(),
            request.headers.get("x-api-key", ""),
            request.headers.get("X-Session-ID", ""),
            _in_metadata(body),
        ]
        known = [key for key in keys if key in self.sessions or key in self._over]
        for key in known:
            session = self.sessions.get(key)
            if session is None or session.closed or session.ended:
                return self._late(session.ended if session else "")
            return session
        self.counts["unknown_keys"] += 1
        error = error_of("this API key names no episode", "invalid_api_key")
        return web.json_response(error, status=401, headers=_NO_RETRY)

    def _late(self, limit: str) -> web.Response:
        if limit:
            return _refused(BadCall(f"the episode has used up {limit}", ENDED))
        self.counts["late_calls"] += 1
        error = error_of("the episode is over", ENDED)
        return web.json_response(error, status=409, headers=_NO_RETRY)


async def _text(request: web.Request) -> str:
    """The body. BadCall: it is not UTF-8, as JSON is. ConnectionError: it did not arrive."""
    try:
        return (await request.read()).decode()
    except UnicodeDecodeError as error:
        raise BadCall(f"the body is not UTF-8 ({error})") from None


def _json(body: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the body is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise BadCall("the body must be a JSON object")
    return found


def _call_of(dialect: Dialect, body: dict[str, Any]) -> ModelCall:
    try:
        return dialect.read(body)
    except (AttributeError, KeyError, TypeError) as error:
        raise BadCall(f"the body has another form than this endpoint's ({error})") from None


def _in_metadata(body: str) -> str:
    """The key in the body's metadata, which survives agents that set neither key nor header."""
    if '"metadata"' not in body:
        return ""
    with contextlib.suppress(BadCall):
        metadata = _json(body).get("metadata")
        return str(metadata.get("session") or "") if isinstance(metadata, dict) else ""
    return ""


def _liveness(request: web.Request) -> Callable[[], bool]:
    # The connection alone: a session has the function until its end, and a request has its body.
    transport = request.transport
    return lambda: transport is not None and not transport.is_closing()


def _refused(error: BadCall) -> web.Response:
    content = error_of(str(error), error.code)
    return web.json_response(content, status=400, headers=_NO_RETRY)


def _failed(error: BaseException) -> web.Response:
    if isinstance(error, BadCall):
        return _refused(error)
    content = error_of(f"the model cannot answer ({type(error).__name__})", "engine_failed")
    return web.json_response(content, status=500, headers=_NO_RETRY)


async def _until_done(delivery: Delivery, seconds: float) -> bool:
    """Whether the answer is there within a heartbeat; it is not ended by a client that leaves."""
    await asyncio.wait({delivery.answer}, timeout=seconds)
    return delivery.answer.done()


async def _answered(
    request: web.Request, dialect: Dialect, call: ModelCall, delivery: Delivery, seconds: float
) -> web.StreamResponse:
    """One JSON, or server-sent events. An error has its status until the first byte. After it, an
    error is one of the events, or the connection ends and the client's retry gets the status.
    """
    kind = "text/event-stream" if call.stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind})
    if call.stream:
        response.headers["Cache-Control"] = "no-cache"
        if not await _until_done(delivery, min(seconds, 0.05)):
            await response.prepare(request)
    heartbeat = dialect.heartbeat if call.stream else " "
    while not await _until_done(delivery, seconds):
        await response.prepare(request)
        await response.write(heartbeat.encode())
    try:
        node, answer = delivery.answer.result()
    except (BadCall, EngineFailed) as error:
        if not response.prepared:
            return _failed(error)
        if call.stream:
            code = error.code if isinstance(error, BadCall) else "engine_failed"
            event = dialect.error_event(error_of(str(error), code))
            await response.write(event.encode())
        elif request.transport is not None:  # None: the client has left
            request.transport.abort()
        return response
    if call.stream:
        pieces: Iterable[str] = dialect.events_of(call, answer)
    else:
        whole = json.dumps(dialect.body_of(call, answer))
        pieces = [whole]
        if not response.prepared:
            response.content_length = len(whole)  # json.dumps writes ASCII
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece.encode())
    await response.write_eof()
    node.delivered = node.delivered or _liveness(request)()
    return response
