"""A real sglang-router in front of two real servers:
it hands out generation, the servers get everything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file

from megatron_stare.config import UserError
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.engine import State, generate
from megatron_stare.rollout.sglang.pool import worker_urls
from megatron_stare.rollout.sglang.process import ServerProcess, free_port
from tests.conftest import SGLANG_PYTHON
from tests.rollout.sglang.idle import sample_all
from tests.rollout.sglang.world import (
    CHECKSUMS,
    LONG,
    PLAIN,
    assert_sampled_from,
    attached,
    engine_for,
    make_model,
    requests,
    start_server,
    sync,
    wait_for,
)

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def router(servers: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router whose workers are both servers."""
    log = tmp_path_factory.mktemp("router") / "log.txt"
    with started_router([server.url for server in servers], log) as url:
        yield url


@contextlib.contextmanager
def started_router(workers: list[str], log_file: Path) -> Iterator[str]:
    """The address of a router that takes the workers in turn, and looks at them every second."""
    if subprocess.run(
        [SGLANG_PYTHON, "-c", "import sglang_router"], capture_output=True
    ).returncode:
        pytest.skip(f"{SGLANG_PYTHON} has no sglang_router")
    port = free_port()
    settings = [
        "--policy",
        "round_robin",
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
    ]
    settings.append(
        "--disable-circuit-breaker"
    )  # else a worker that came back gets nothing for a minute
    places = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = [
        SGLANG_PYTHON,
        "-m",
        "sglang_router.launch_router",
        "--worker-urls",
        *workers,
        *places,
        *settings,
    ]
    url = f"http://127.0.0.1:{port}"
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for_workers(url, sorted(workers))
            yield url
        finally:
            process.kill()
            process.wait()


def wait_for_workers(url: str, wanted: list[str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = httpx.get(f"{url}/workers", timeout=10).json()["workers"]
            if sorted(worker["url"] for worker in found if worker["is_healthy"]) == wanted:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, f"the router at {url} does not know {wanted}"
        time.sleep(0.1)


def generated(server: ServerProcess) -> int:
    """Requests that the server has answered."""
    return server.log.read_text(errors="replace").count('"POST /generate HTTP/1.1" 200')


def test_generation_goes_through_the_router_and_weights_to_its_workers(
    router: str, servers: list[ServerProcess], checkpoint: Path, tmp_path: Path
):
    before = [generated(server) for server in servers]
    with attached([], checkpoint, tmp_path, router_url=router) as pool:
        assert [server.client.url for server in pool.servers] == sorted(
            server.url for server in servers
        )
        asked = requests(16)
        assert_sampled_from(checkpoint, asked, sample_all(pool, asked, PLAIN).result(timeout=120))
        assert [generated(server) - old for server, old in zip(servers, before, strict=True)] == [
            8,
            8,
        ]
        other = make_model(tmp_path / "other", "qwen2", seed=9)
        sync(pool, other, 5, tmp_path)
        assert_sampled_from(other, asked, sample_all(pool, asked, PLAIN).result(timeout=120))
        future = sample_all(pool, asked, LONG)
        time.sleep(0.3)
        pool.abort(asked)
        assert {rollout.status for rollout in future.result(timeout=120)} >= {"aborted"}
        assert not any(
            count for kind, count in pool.counts().items() if kind.startswith("engine_fault")
        )


@pytest.mark.skipif(
    not CHECKSUMS, reason="0.5.9's router gives a worker that was killed and is back nothing to do"
)
def test_a_worker_that_holds_other_weights_or_dies_loses_nothing(
    router: str, servers: list[ServerProcess], checkpoint: Path, tmp_path: Path, topology: Topology
):
    """First another run replaces one worker's weights;
    then the worker is killed, and comes back with old ones.
    """
    weights = make_model(tmp_path / "weights", "qwen2", seed=4)
    engine = engine_for(checkpoint, tmp_path, topology, f"sglang.router_url={router}")
    assert engine.pool is not None
    try:
        engine.load_weights(load_file(weights / "model.safetensors").items(), 3)
        with attached([servers[1].url], checkpoint, tmp_path):
            pass
        asked = requests(12)
        assert_sampled_from(weights, asked, generate(engine, asked, PLAIN))
        assert 1 <= engine.counts()["engine_fault_garbage"] <= 12

        # The router itself asks the other worker again, so that the pool need not.
        future = sample_all(engine.pool, requests(24, seed=6), LONG)
        time.sleep(0.3)
        os.kill(servers[1].process.pid, signal.SIGKILL)
        assert_sampled_from(weights, requests(24, seed=6), future.result(timeout=200))
        deadline = time.monotonic() + 60
        while State.DEAD not in [server.state for server in engine.pool.servers]:
            assert time.monotonic() < deadline
            time.sleep(0.05)

        servers[1].stop(at_once=True)
        servers[1] = start_server(checkpoint, servers[1].log, servers[1].port)
        wait_for([servers[1]], checkpoint)
        wait_for_workers(router, sorted(server.url for server in servers))
        while {server.state for server in engine.pool.servers} != {State.READY}:
            assert time.monotonic() < deadline + 60
            time.sleep(0.05)
        before = generated(servers[1])
        while (
            generated(servers[1]) == before
        ):  # the router trusts a worker that failed only after a while
            assert time.monotonic() < deadline + 120
            assert_sampled_from(weights, asked, generate(engine, asked, PLAIN))
        assert engine.pool.admission.up_to_date()
    finally:
        engine.close()


def test_a_missing_router_is_refused():
    with pytest.raises(
        UserError, match=r"sglang.router_url=http://127.0.0.1:9 does not answer GET /workers"
    ):
        worker_urls("http://127.0.0.1:9")
