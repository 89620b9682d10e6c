"""Agents for the tests, as functions that a host imports; they need the standard library alone."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def post(endpoint: Any, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The answer to a request; an HTTPError's text is raised as RuntimeError."""
    request = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        | headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code} {error.read().decode()}") from None


def evaluated(call: dict[str, Any]) -> str:
    expression = json.loads(call["function"]["arguments"]).get("expression", "")
    if not re.fullmatch(r"[0-9*+ -]+", str(expression)):
        return "Error: no sum"
    try:
        return str(eval(expression))
    except SyntaxError:
        return "Error: no sum"


def calculator(row: Any, endpoint: Any) -> dict[str, Any]:
    """Up to three turns with the calculator; 1 where the boxed answer is the label."""
    messages = list(row.messages)
    for _ in range(3):
        body = {"model": endpoint.model, "messages": messages, "tools": TOOLS}
        answer = post(endpoint, body)["choices"][0]["message"]
        messages.append(answer)
        if not answer.get("tool_calls"):
            break
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": evaluated(call)}
            for call in answer["tool_calls"]
        ]
    right = f"\\boxed{{{row.label}}}" in (messages[-1].get("content") or "")
    return {"reward": float(right), "metrics": {"messages": len(messages)}}


def compacting(row: Any, endpoint: Any) -> float:
    """Two calls; the second one's history is another."""
    first = post(endpoint, {"messages": row.messages})["choices"][0]["message"]
    summary = [{"role": "user", "content": f"so far: {first['content']}"}]
    post(endpoint, {"messages": summary})
    return 1.0


def talks(row: Any, endpoint: Any) -> float:
    """The number of turns that the row says, without tools."""
    messages = list(row.messages)
    for _ in range(row.metadata["turns"]):
        answer = post(endpoint, {"messages": messages})["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "more"}]
    return 1.0


async def returns(row: Any, endpoint: Any) -> Any:
    """After one call, what the row says; NaN is not JSON of ours, and an object is none at all."""
    await asyncio.to_thread(post, endpoint, {"messages": row.messages})
    value = row.metadata["returns"]
    special = {"nan": float("nan"), "object": object()}
    return special.get(value, value) if isinstance(value, str) else value


class Called:
    """An agent with a state, whose call is async."""

    async def __call__(self, row: Any, endpoint: Any) -> Any:
        return await returns(row, endpoint)


called = Called()


def raises(row: Any, endpoint: Any) -> float:
    post(endpoint, {"messages": row.messages})
    raise LookupError("no such file")


def no_call(row: Any, endpoint: Any) -> float:
    return 1.0


def dies(row: Any, endpoint: Any) -> float:
    """The host's process ends, in the first attempt or always."""
    post(endpoint, {"messages": row.messages})
    if endpoint.attempt == 0 or row.metadata.get("always"):
        os._exit(3)
    return 1.0


def endless(row: Any, endpoint: Any) -> float:
    """Calls until it is refused."""
    messages = list(row.messages)
    while True:
        answer = post(endpoint, {"messages": messages})["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "more"}]


async def hangs(row: Any, endpoint: Any) -> float:
    await asyncio.to_thread(post, endpoint, {"messages": row.messages})
    await asyncio.sleep(3600)
    return 1.0


async def cleans(row: Any, endpoint: Any) -> float:
    """Hangs; once stopped, it takes some time to end. Both leave a file in the row's folder."""
    folder = Path(row.metadata["folder"])
    try:
        await asyncio.sleep(3600)
    finally:
        (folder / "stopped").touch()
        await asyncio.sleep(0.5)
        (folder / "ended").touch()
    return 1.0


def deaf(row: Any, endpoint: Any) -> float:
    """Hangs in a thread, where nothing can stop it."""
    post(endpoint, {"messages": row.messages})
    time.sleep(3600)
    return 1.0


def drops(row: Any, endpoint: Any) -> float:
    """As `talks`; where the row says so, every second call loses its connection before the answer,
    and is asked again.
    """
    messages = list(row.messages)
    for turn in range(row.metadata["turns"]):
        body = {"messages": messages}
        if row.metadata["drops"] and turn % 2:
            left_early(endpoint, body)
        answer = post(endpoint, body)["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "more"}]
    return 1.0


def left_early(endpoint: Any, body: dict[str, Any]) -> None:
    """Sends a request and closes the connection without reading. Both travel in one packet, so that
    the endpoint cannot answer before the end. The kernel holds the request back for 200 ms, and a
    thread of hundreds may wait longer for the interpreter, which PyDLL does not release.
    """
    address, content = urllib.parse.urlsplit(endpoint.base_url), json.dumps(body)
    head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
    head += f"Authorization: Bearer {endpoint.api_key}\r\nContent-Length: {len(content)}\r\n\r\n"
    data, libc = (head + content).encode(), ctypes.PyDLL(None)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        libc.send(connection.fileno(), data, len(data), 0)
        libc.shutdown(connection.fileno(), socket.SHUT_RDWR)
