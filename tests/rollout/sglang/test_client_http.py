"""The HTTP client of requests to servers."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_stare.http_client import FAULTS, request


class Answer(BaseHTTPRequestHandler):
    """Answers `ready` to every GET."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ready")

    def log_message(self, format: str, *values: object) -> None:
        pass


def test_a_request_works_in_a_thread_that_runs_an_event_loop() -> None:
    """A notebook's main thread is one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"

        async def ask() -> tuple[int, bytes]:
            return request("GET", url)

        assert asyncio.run(ask()) == request("GET", url) == (200, b"ready")
        server.shutdown()
    with pytest.raises(FAULTS):
        request("GET", url)
