"""The HTTP client of requests to servers."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron_stare.config import UserError
from megatron_stare.http_client import FAULTS, request
from megatron_stare.rollout.sglang.client import SGLangClient
from tests.rollout.sglang.idle import idle_pool, tiny_model


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


def test_too_many_open_files_do_not_count_as_a_servers_death() -> None:
    """A run would end healthy servers, and start them again without remedy."""

    async def ask() -> None:
        client = SGLangClient("http://127.0.0.1:1")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        next_one = os.open("/dev/null", os.O_RDONLY)
        os.close(next_one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
        try:
            await client.state(5.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await client.close()

    with pytest.raises(UserError, match=r"no more files; raise ulimit -n, or lower sglang\.max_"):
        asyncio.run(ask())


def test_a_pool_may_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    """Also that of an evaluation: four servers with 256 requests each pass the usual 1024."""
    model = tiny_model(tmp_path / "model")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    try:
        with idle_pool(model, tmp_path / "logs"):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
