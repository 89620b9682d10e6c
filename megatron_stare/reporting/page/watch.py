"""The page of runs that are still training, served on this machine's loopback and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megatron_stare.config import UserError
from megatron_stare.reporting.page.content import content_of
from megatron_stare.reporting.page.render import render
from megatron_stare.system import digest

HOST = "127.0.0.1"
_WATCHED = ("metrics.jsonl", "alarms.jsonl", "summary.json", "config.yaml", "step_*.json.gz")


class LivePage:
    """The page as of the newest files: built again only when one of them has changed."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = [Path(directory) for directory in directories]
        self._lock = threading.Lock()
        self._seen: list[tuple[str, int, int]] | None = None
        self._body, self._tag = b"", ""

    def current(self) -> tuple[bytes, str]:
        """The page and its tag, which changes with it."""
        with self._lock:
            seen = self._state()
            if seen != self._seen:
                self._body = render(content_of(self.directories), live=True).encode("utf-8")
                self._tag = f'"{digest(self._body, 32)}"'
                self._seen = seen
            return self._body, self._tag

    def _state(self) -> list[tuple[str, int, int]]:
        """Name, time and size of every file that the page is made of."""
        found = []
        for directory in self.directories:
            for pattern in _WATCHED:
                for path in directory.rglob(pattern):
                    try:
                        status = path.stat()
                    except FileNotFoundError:  # replaced at this moment: the next look sees it
                        continue
                    found.append((str(path), status.st_mtime_ns, status.st_size))
        return sorted(found)


def server(directories: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of one page at http://127.0.0.1:port/ (0: a free port); the caller runs and closes
    it. UserError: the runs cannot be read, or the port is taken.

    It answers only requests that name this machine's loopback, so that no page from elsewhere can
    read it under a name of its own.
    """
    page = LivePage(directories)
    page.current()

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "megatron_stare", ""

        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rsplit(":", 1)[0]
            if name not in (HOST, "localhost"):
                return self._answer(421, b"", {})
            if self.path.split("?")[0] != "/":
                return self._answer(404, b"", {})
            try:
                body, tag = page.current()
            except UserError as error:  # a file is being written: the page that is open stays
                return self._answer(503, str(error).encode("utf-8", "replace"), {})
            if self.headers.get("If-None-Match") == tag:
                return self._answer(304, b"", {"ETag": tag})
            return self._answer(200, body, {"ETag": tag, "Content-Type": "text/html;charset=utf-8"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in ({"Content-Type": "text/plain;charset=utf-8"} | headers).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are no news."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise UserError(
            f"--port {port}: {error.strerror or error}; give another one, or 0 for any that is free"
        ) from None
