"""The HTTP client (aiohttp) of all requests: to SGLang servers, weight relays, judges, reward
servers and SandboxFusion.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import aiohttp

# Errors of a request whose server is away, breaks off, or takes too long.
FAULTS = (aiohttp.ClientError, OSError, TimeoutError)
# A server closes connections that were idle for 5 s. Ours are closed earlier: a request that is
# sent while the server closes its connection would be lost.
_IDLE_SECONDS = 2.0
_READ_BYTES = 1 << 18
# A longer body is written in parts, so that the event loop can serve other requests meanwhile.
_WHOLE_BYTES = 1 << 20


def authorization(key: str) -> dict[str, str]:
    """The headers that carry the key; none without a key."""
    return {"authorization": f"Bearer {key}"} if key else {}


def session(headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Connections to servers, to be opened and closed in one event loop. Neither their number nor
    the time of a request is bounded here: the callers bound both.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=_READ_BYTES,
    )


def body_of(content: bytes | None) -> bytes | io.BytesIO | None:
    """The content as aiohttp sends it best."""
    return io.BytesIO(content) if content and len(content) > _WHOLE_BYTES else content


async def post_json(
    connections: aiohttp.ClientSession, url: str, body: bytes, seconds: float, most_bytes: int
) -> tuple[int, bytes]:
    """Status and content of a POST of JSON; raises one of FAULTS. TimeoutError: the answer is not
    whole after `seconds`. ValueError: it has more than `most_bytes`.
    """
    headers = {"content-type": "application/json"}
    asking = connections.post(url, data=body_of(body), headers=headers, allow_redirects=False)
    content = bytearray()
    try:
        async with asyncio.timeout(seconds), asking as answer:
            async for piece in answer.content.iter_any():
                content += piece
                if len(content) > most_bytes:
                    raise ValueError(f"an answer of more than {most_bytes} bytes")
            return answer.status, bytes(content)
    except TimeoutError:
        raise TimeoutError(f"no whole answer after {seconds:g} s") from None


def request(
    method: str,
    url: str,
    key: str = "",
    content: bytes | None = None,
    timeout: float | None = None,
) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own; raises one of FAULTS. It has a
    thread of its own: the caller's may run an event loop already, as a notebook's does.
    """

    async def ask() -> tuple[int, bytes]:
        async with (
            asyncio.timeout(timeout),
            session(authorization(key)) as connections,
            connections.request(method, url, data=body_of(content)) as response,
        ):
            return response.status, await response.read()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask()).result()
