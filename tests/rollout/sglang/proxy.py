"""A TCP proxy in front of a real server that misbehaves on demand:
the network's and the server's faults, for real.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Change = Callable[[dict[str, Any]], object]


class Proxy(ThreadingHTTPServer):
    """Forwards every request, but for the first ones of a path that `faults` has something for.

    A fault is a status code, "hang", "reset", "garbage", "corrupt" (the request's longest text
    stands for one other bit), or a function that changes the real server's JSON in place. Every
    request waits for `delay` seconds first.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target_port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target_port = target_port
        self.faults: dict[str, list[int | str | Change]] = {}
        self.delay = 0.0
        self.seen: Counter[str] = Counter()
        self.asked: list[
            tuple[str, bytes]
        ] = []  # every path and body, in the order of their arrival
        self.released = threading.Event()
        self.guard = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next_fault(self, path: str, body: bytes) -> int | str | Change | None:
        with self.guard:
            self.seen[path] += 1
            self.asked.append((path, body))
            return self.faults[path].pop(0) if self.faults.get(path) else None

    def close(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()


def damaged(content: bytes, fault: Change) -> bytes:
    """The answer, of a stream its last event, as the fault leaves it."""
    before, _, after = content.rpartition(b"data: [DONE]")
    *events, last = (before or after).rstrip().split(b"\n\n")
    changed = json.loads(last.removeprefix(b"data:"))
    fault(changed)
    if not before:
        return json.dumps(changed).encode()
    return b"\n\n".join([*events, b"data: " + json.dumps(changed).encode(), b"data: [DONE]", b""])


def corrupted(body: bytes) -> bytes:
    """The request with one bit changed in the middle of its longest list of base64 texts."""
    fields = json.loads(body)
    lists = (name for name, value in fields.items() if isinstance(value, list))
    name = max(lists, key=lambda name: len(json.dumps(fields[name])))
    content = bytearray(base64.b64decode(fields[name][0]))
    content[len(content) // 2] ^= 1
    fields[name][0] = base64.b64encode(content).decode()
    return json.dumps(fields).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        fault = self.server.next_fault(self.path, body)
        time.sleep(self.server.delay)
        if fault == "hang":
            self.server.released.wait(60)
        if fault in ("hang", "reset"):
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif isinstance(fault, int):
            self.reply(fault, b'{"error": "asked to fail"}')
        elif fault == "garbage":
            self.reply(200, b"<html>not what you asked for")
        else:
            status, content = self.forward(corrupted(body) if fault == "corrupt" else body)
            self.reply(status, damaged(content, fault) if callable(fault) else content)

    def forward(self, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target_port)
        connection.request(self.command, self.path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()

    def reply(self, status: int, content: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
