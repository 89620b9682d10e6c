"""The commands with servers: `serve`, runs that attach to its servers, and a router between."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from megatron_stare.rollout.sglang.process import free_port
from tests.conftest import SGLANG_PYTHON
from tests.docs.table import (
    ROUTER,
    SERVE,
    TRAIN,
    TRAIN_ON_SERVERS,
    TRAIN_WITH_ROUTER,
)
from tests.docs.world import World
from tests.paths import ROOT

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
PATIENCE_SECONDS = 900.0
QUICK = ("sglang.sync_timeout=120", "train.num_rollout=2", "rollout.dynamic_sampling=false")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A directory with a finished runs/math."""
    found = World(tmp_path_factory.mktemp("docs"))
    found.expect(TRAIN)
    return found


@contextlib.contextmanager
def running(
    words: list[str], directory: Path, log: Path, ready: Callable[[], bool]
) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs until it receives a signal; the caller waits for its end."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, cwd=directory, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not ready():
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            finally:
                process.kill()


def two_ports() -> int:
    """The first of two free ports in a row."""
    for _ in range(100):
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), socket.socket() as one:
            one.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two free ports in a row")


@pytest.fixture(scope="module")
def urls(world: World) -> Iterator[list[str]]:
    """The addresses of the servers that the page's command starts, on other ports."""
    port, log = two_ports(), world.directory / "serve.txt"
    words = shlex.split(SERVE.replace("sglang.port=30000", f"sglang.port={port}"))

    def ready() -> bool:
        return b"serving; " in log.read_bytes()

    with running([sys.executable, *words[1:]], world.directory, log, ready) as process:
        yield [f"http://127.0.0.1:{port + number}" for number in range(2)]
    assert process.returncode == 0, log.read_text()


def test_the_commands_for_attached_servers_run(world: World, urls: list[str]) -> None:
    setting = f"sglang.urls=[{','.join(urls)}]"
    world.expect(TRAIN_ON_SERVERS, more=(setting, *QUICK))


def test_the_commands_for_a_router_run(world: World, urls: list[str]) -> None:
    port, log = free_port(), world.directory / "router.txt"
    words = [str(SGLANG_PYTHON), *shlex.split(ROUTER.replace(" 8000", f" {port}"))[1:]]
    for number, url in enumerate(urls, start=1):
        words[words.index(f"http://node{number}:30000")] = url
    if subprocess.run([SGLANG_PYTHON, "-c", "import sglang_router"]).returncode:
        pytest.skip(f"{SGLANG_PYTHON} has no sglang_router")

    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            workers = httpx.get(f"http://127.0.0.1:{port}/workers").json()["workers"]
            return len(workers) == 2 and all(worker.get("is_healthy", True) for worker in workers)
        return False

    with running(words, world.directory, log, ready):
        setting = f"sglang.router_url=http://127.0.0.1:{port}"
        world.expect(TRAIN_WITH_ROUTER, more=(setting, *QUICK))
