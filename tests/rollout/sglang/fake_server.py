"""A server that speaks SGLang's protocol and computes nothing, in a process of its own.

Its answers follow from their place alone: the id at place p from the start of the prompt is
`id_at(p)` with log-prob `logprob_at(p)`, and a response ends with a stop id at place `end_of(first
id of the prompt)`. So a continuation of a part equals an uninterrupted answer, and
a token that is lost, doubled or moved shows.

Run as a program it prints its port and serves until its parent ends or closes its input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
CONTEXT = 1 << 20
PERIOD = 57 * 7  # ids and log-probs repeat after this number of places


def id_at(place: int) -> int:
    """Between 3 and 59: none of these ends a response."""
    return 3 + place * 7 % 57


def logprob_at(place: int) -> float:
    """A number that 32 bits hold, of as many digits as SGLang writes."""
    (number,) = struct.unpack("f", struct.pack("f", -0.1 * (1 + place % 7)))
    return float(number)


# The JSON of every place's id, and of the pair that it is in. Rendered once: a server that takes
# longer to write an answer than its client to read it would be what a benchmark measures.
IDS = [str(id_at(place)) for place in range(PERIOD)]
PAIRS = [f"[{logprob_at(place)}, {id_at(place)}, null]" for place in range(PERIOD)]


def rendered(table: list[str], begin: int, end: int, last: str) -> str:
    """The entries of these places; `last`, unless empty, in the place of the last of them."""
    count = end - begin
    found = (table[begin % PERIOD :] + table * (count // PERIOD + 1))[:count]
    if last and count:
        found[-1] = last
    return ", ".join(found)


@dataclass
class Fake:
    """The settings of the server, and the requests that it has seen."""

    shortest: int = 20
    longest: int = 20
    hold_at: int = 0  # who reaches this place, and began before it, waits there until it is ended
    incremental: bool = True
    vocab_size: int = 257
    model_path: str = ""
    version: str = "default"
    ending: dict[str, asyncio.Event] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)  # of requests for anything but generation
    keys: Counter[str] = field(default_factory=Counter)  # of routing, as headers named them
    asked: list[int] = field(default_factory=list)  # the length of what /generate was given
    held: int = 0  # have waited at `hold_at` so far
    deaf: bool = False  # to requests to end

    def end_of(self, first: int) -> int:
        """The place of the last token of a response to a prompt that begins with this id."""
        return self.shortest + first * 7919 % (self.longest - self.shortest + 1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request by request."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = head[0].split(" ")[1]
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                content = json.loads(body) if body else {}
                self.seen[path] += 1
                if key := fields.get("x-smg-routing-key"):
                    self.keys[key] += 1
                if path == "/generate":
                    await self.generate(content, writer)
                else:
                    if body:
                        self.order.append(path)
                    reply(writer, self.answer(path, content))
                await writer.drain()
                if fields.get("connection") == "close":
                    break
        writer.close()

    def answer(self, path: str, content: dict[str, Any]) -> Any:
        """Everything but generation."""
        if path.startswith("/update_weights"):
            self.version = content.get("weight_version") or self.version
        if path == "/abort_request" and not self.deaf:
            for rid, event in self.ending.items():
                if content["abort_all"] or rid == content["rid"]:
                    event.set()
        answers: dict[str, Any] = {
            "/server_info": {
                "version": "fake",
                "model_path": self.model_path,
                "device": "cpu",
                "dtype": "float32",
                "max_req_input_len": CONTEXT - 6,
                "tp_size": 1,
                "incremental_streaming_output": self.incremental,
                "enable_memory_saver": True,
            },
            "/model_info": {"model_path": self.model_path, "weight_version": self.version},
            "/v1/models": {"data": [{"max_model_len": CONTEXT}]},
            "/tokenize": {},
            "/v1/loads": {"loads": [{"num_running_reqs": len(self.ending), "num_waiting_reqs": 0}]},
            "/seen": {
                "paths": self.seen,
                "order": self.order,
                "keys": self.keys,
                "asked": self.asked,
                "held": self.held,
            },
        }
        return answers.get(path, {})

    async def generate(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """An answer, whole or in pieces, which a setting may end early."""
        known, sampling, rid = asked["input_ids"], asked["sampling_params"], asked["rid"]
        stream, begin = asked.get("stream", False), len(known)
        last = self.end_of(known[0])
        stop = sampling["stop_token_ids"][0]
        self.asked.append(begin)
        end = min(begin + sampling["max_new_tokens"], max(last + 1, begin + 1))
        piece = sampling.get("stream_interval", 1) if stream else end - begin
        reason = {"type": "stop"} if end > last else {"type": "length"}
        ended = self.ending[rid] = asyncio.Event()
        sent, done, place = begin, begin, self.hold_at if begin < self.hold_at else end
        if stream:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
        try:
            while True:
                done = min(end, place, 1 + done if done == begin and stream else done + piece)
                if done == place < end and (sent == done or not stream):
                    self.held += 1
                    await ended.wait()
                finish = reason if done == end else {"type": "abort"} if ended.is_set() else None
                first = sent if self.incremental and stream else begin
                ended_by = (str(stop), f"[{logprob_at(done - 1)}, {stop}, null]")
                ids, pairs = (
                    rendered(table, first, done, final if done > last else "")
                    for table, final in zip((IDS, PAIRS), ended_by, strict=True)
                )
                meta = json.dumps(
                    {
                        "id": rid,
                        "finish_reason": finish,
                        "weight_version": self.version,
                        "completion_tokens": done - begin,
                    }
                )
                meta = f'{meta[:-1]}, "output_token_logprobs": [{pairs}]}}'
                content = f'{{"text": "", "output_ids": [{ids}], "meta_info": {meta}}}'.encode()
                sent = done
                if not stream:
                    return reply(writer, content)
                chunk(writer, b"data: " + content + b"\n\n")
                await writer.drain()
                if finish:
                    chunk(writer, b"data: [DONE]\n\n")
                    return chunk(writer, b"")
        finally:
            del self.ending[rid]


def reply(writer: asyncio.StreamWriter, content: Any) -> None:
    """One JSON answer."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    writer.write(head.encode() + b"\r\n\r\n" + data)


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A chunk of a body that is sent in pieces; an empty one ends it."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class Addresses(list[str]):
    """The URLs of servers, and the process that they are in."""

    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def fake_servers(count: int, *, module: str = __name__, **settings: Any) -> Iterator[Addresses]:
    """The addresses of `count` servers, alike, in one process that runs `module`."""
    command = [sys.executable, "-m", module, str(count)]
    process = subprocess.Popen(
        [*command, json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdin and process.stdout
    try:
        ports = json.loads(process.stdout.readline())
        found = Addresses(f"http://127.0.0.1:{port}" for port in ports)
        found.process = process
        yield found
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


async def main(kind: type[Fake] = Fake) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("settings", type=json.loads)
    options = parser.parse_args()
    servers = [
        await asyncio.start_server(
            kind(**options.settings).serve, "127.0.0.1", 0, limit=1 << 26, backlog=8192
        )
        for _ in range(options.count)
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)  # connections that are left need no farewell


if __name__ == "__main__":
    asyncio.run(main())
