"""One real server for all tests of this folder, and pools attached to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stare.config import SGLangConfig
from megatron_stare.rollout.sglang_pool import SGLangPool
from megatron_stare.rollout.sglang_process import ServerProcess, server_command
from megatron_stare.rollout.sglang_server import Server
from tests.sglang.proxy import Proxy
from tests.sglang.world import attached, make_model, served


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the server starts with."""
    return make_model(tmp_path_factory.mktemp("served") / "model", "qwen2")


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that has been waited for."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    process = ServerProcess(server_command(""), str(checkpoint), [], log, "127.0.0.1")
    with contextlib.ExitStack() as stack:
        stack.callback(process.stop)
        pool = SGLangPool(SGLangConfig(urls=[process.url]), served(checkpoint), log.parent)
        pool.servers[0].process = process  # so that its early end is noticed
        with contextlib.closing(pool):
            pool.begin().result()
            pool.servers[0].process = None
        yield process


@pytest.fixture
def proxy(server: ServerProcess) -> Iterator[Proxy]:
    """A proxy in front of the server, forwarding until it is given faults."""
    with contextlib.closing(Proxy(server.port)) as found:
        yield found


@pytest.fixture
def pool(server: ServerProcess, checkpoint: Path, tmp_path: Path) -> Iterator[SGLangPool]:
    """A pool attached to the server, with the checkpoint's weights as version 0."""
    with attached([server.url], checkpoint, tmp_path) as found:
        yield found


@pytest.fixture
def one(pool: SGLangPool) -> Server:
    """The pool's only server."""
    return pool.servers[0]
