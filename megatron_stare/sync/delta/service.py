"""A mirror over HTTP.

    GET  /state   {"held": the update whose weights it has, "path": where servers find them}
    POST /update  a message (message.py); the same, and "seconds" that it took here

401: another key. 409: the update does not fit, all must be sent. 507: the disk cannot take it.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson

from megatron_stare.config import UserError
from megatron_stare.sync.delta.mirror import Mirror, Refused

_SILENCE_SECONDS = 600.0  # of a trainer in the middle of a request


class MirrorServer(ThreadingHTTPServer):
    """Serves one mirror at host:port (0: a free one), which it closes with itself. UserError: the
    directory or the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, directory: Path, host: str, port: int, key: str = "") -> None:
        self.mirror, self.key, self.turn = Mirror(directory), key, threading.Lock()
        self.closed = False
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            self.mirror.close()
            raise UserError(
                f"--host {host} --port {port}: {error.strerror or error}; give another one"
            ) from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def state(self) -> dict[str, Any]:
        """What the trainer is told."""
        return {"held": self.mirror.held, "path": str(self.mirror.path)}

    def take(self, content: bytes) -> tuple[int, dict[str, Any]]:
        """Status and answer for a message."""
        with self.turn:
            try:
                seconds = self.mirror.take(content)
            except Refused as error:
                return 409, {"error": str(error)}
            except OSError as error:
                return 507, {"error": str(error)}
            return 200, self.state() | {"seconds": seconds}

    def server_close(self) -> None:
        """Give the port and the directory back."""
        self.closed = True
        super().server_close()
        with self.turn:
            self.mirror.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "megatron_stare", ""
    timeout = _SILENCE_SECONDS
    wbufsize = 1 << 16  # an answer in two packets would wait for the first one's acknowledgement
    server: MirrorServer

    def do_GET(self) -> None:
        self._serve("/state", lambda _: (200, self.server.state()))

    def do_POST(self) -> None:
        self._serve("/update", self.server.take)

    def _serve(self, path: str, work: Callable[[bytes], tuple[int, dict[str, Any]]]) -> None:
        """Answer the one path of a method; a body is read only of who may ask."""
        if self.server.closed:  # a connection from before
            self.close_connection = True
            return None
        given = self.headers.get("authorization", "")
        if self.server.key and not hmac.compare_digest(
            given.encode(), f"Bearer {self.server.key}".encode()
        ):
            return self._refuse(401, "another key than the mirror's")
        if self.path != path:
            return self._refuse(404, f"no {self.command} {self.path} here")
        length = self.headers.get("content-length", "0" if self.command == "GET" else "")
        if not length.isdecimal():
            return self._refuse(411, f"content-length is {length!r}")
        content = self.rfile.read(int(length))
        if len(content) == int(length):  # else the trainer is gone
            self._answer(*work(content))
        return None

    def _refuse(self, status: int, reason: str) -> None:
        self.close_connection = True  # whatever follows is not read
        self._answer(status, {"error": reason})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        content = orjson.dumps(answer)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Requests are no news."""
