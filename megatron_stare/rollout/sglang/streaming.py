"""An answer as it comes: what is there of it is kept, whatever becomes of the rest.

A server that streams sends an event for every few tokens, each with what is new in it. Reading them
all costs what reading one long answer costs. Unlike a whole answer, a stream that ends early (a
time-out, a dead server, new weights) leaves the tokens that were on their way before.

`post` is a request of its own over h11 and asyncio: httpx looks through all its connections at
every request, which makes thousands of answers under way at once quadratic.
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from typing import Any

import h11

from megatron_stare.rollout.engine import FaultyAnswer, Limits, check_answer
from megatron_stare.rollout.sglang.answers import Answer, decoded, joined, read_answer

_READ_BYTES = 1 << 18
_UNFINISHED = {"type": "abort"}  # what an event is that does not say how it ends: a part


class Received:
    """What has come of one answer, whole or in events. `new_tokens` is how many were asked for."""

    def __init__(
        self, stop_ids: Collection[int], stops: Collection[str], limits: Limits, new_tokens: int
    ) -> None:
        self._stop_ids, self._stops = stop_ids, stops
        self._limits, self._new_tokens = limits, new_tokens
        self._pieces: list[Answer] = []
        self._count = 0
        self._unread: list[bytes] = []  # the beginning of a line
        self.finished = False

    def feed(self, data: bytes) -> bool:
        """Bytes of a stream of events; whether more are to come. FaultyAnswer, ValueError: an event
        that cannot be.
        """
        if b"\n" not in data:
            self._unread.append(data)
            return True
        *lines, rest = b"".join([*self._unread, data]).split(b"\n")
        self._unread = [rest] if rest else []
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                self.take(decoded(line[5:]))
        return not self.finished

    def take(self, event: Any) -> None:
        """An event, or a whole answer. FaultyAnswer where tokens before it are missing, or where it
        was sampled by other weights than what came before.
        """
        try:
            if "error" in event:
                raise FaultyAnswer(f"the server failed: {event['error']}")
            meta = event["meta_info"]
            finished = meta["finish_reason"] is not None
            total = meta.get("completion_tokens", self._count + len(event["output_ids"]))
            if not finished:
                meta["finish_reason"] = _UNFINISHED
            elif meta["finish_reason"]["type"] == "abort":  # a queued one repeats what was sent
                event = _first(event, total - self._count)
            piece = read_answer(event, self._stop_ids, self._stops)
        except (KeyError, TypeError, AttributeError) as error:
            raise FaultyAnswer(f"the answer lacks {error}") from None
        self._count += len(piece.ids)
        if self._count != total:
            raise FaultyAnswer(f"{self._count} ids came where {total} were sampled")
        if self._pieces and piece.weight_version != self._pieces[0].weight_version:
            raise FaultyAnswer("its weights changed on the way")
        self._pieces.append(piece)
        self.finished = finished

    def answer(self) -> Answer:
        """All of it, checked; `aborted` where it has not finished. FaultyAnswer, UnsoundAnswer: it
        contradicts itself.
        """
        found = joined(self._pieces)
        check_answer(found.ids, found.logprobs, found.status, self._new_tokens, self._limits)
        return found


def _first(event: dict[str, Any], count: int) -> dict[str, Any]:
    """The event with the first `count` of its tokens."""
    meta = dict(event["meta_info"])
    meta["output_token_logprobs"] = (meta.get("output_token_logprobs") or [])[:count]
    return {"output_ids": event["output_ids"][:count], "meta_info": meta}


async def post(
    url: str, headers: Mapping[str, str], body: bytes, take: Callable[[bytes], bool]
) -> tuple[int, bytes]:
    """POST to `url` on a connection of its own; the status, and the body where it is not 200.

    `take` is given the pieces of a body of status 200, until it wants no more. OSError,
    h11.RemoteProtocolError: the connection failed, or the answer broke off.
    """
    place = urllib.parse.urlsplit(url)
    secure = ssl.create_default_context() if place.scheme == "https" else None
    port = place.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(place.hostname, port, ssl=secure)
    try:
        wire = h11.Connection(h11.CLIENT)
        fixed = {"host": place.netloc, "connection": "close", "content-length": str(len(body))}
        request = h11.Request(
            method="POST", target=place.path, headers=list({**headers, **fixed}.items())
        )
        parts = (wire.send(request), wire.send(h11.Data(data=body)), wire.send(h11.EndOfMessage()))
        writer.writelines([part for part in parts if part])
        await writer.drain()
        return await _response(reader, wire, take)
    finally:
        writer.close()


async def _response(
    reader: asyncio.StreamReader, wire: h11.Connection, take: Callable[[bytes], bool]
) -> tuple[int, bytes]:
    status, refused = 0, list[bytes]()
    while True:
        event = wire.next_event()
        if event is h11.NEED_DATA:
            wire.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            if status != 200:
                refused.append(bytes(event.data))
            elif not take(bytes(event.data)):
                return status, b""
        elif isinstance(event, h11.EndOfMessage):
            return status, b"".join(refused)
