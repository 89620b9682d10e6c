"""Two real servers for all tests of this folder, and pools attached to the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.rollout.sglang.server import Server
from tests.rollout.sglang.proxy import Proxy
from tests.rollout.sglang.world import attached, make_model, start_server, wait_for


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the server starts with."""
    return make_model(tmp_path_factory.mktemp("served") / "model", "qwen2")


@pytest.fixture(scope="session")
def servers(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[ServerProcess]]:
    """Two servers, started side by side and waited for."""
    directory = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        started: list[ServerProcess] = []
        stack.callback(
            lambda: [one.stop() for one in started]
        )  # as they are then: a test may have restarted one
        started.extend(
            start_server(checkpoint, directory / f"server_{number}.txt") for number in range(2)
        )
        wait_for(started, checkpoint)
        yield started


@pytest.fixture(scope="session")
def server(servers: list[ServerProcess]) -> ServerProcess:
    """The first of them."""
    return servers[0]


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
