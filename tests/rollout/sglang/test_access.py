"""Keys, addresses, and restarts that wait: what needs no server."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from megatron_stare.commands.servers import advice
from megatron_stare.compare import compare
from megatron_stare.config import (
    Config,
    EngineError,
    SGLangConfig,
    UserError,
    differences,
    dump,
    load,
    override,
    without_secrets,
)
from megatron_stare.rollout.engine import State
from megatron_stare.rollout.sglang import access, server
from megatron_stare.rollout.sglang.access import KEY_VARIABLE, api_key, public_url, standing_open
from megatron_stare.rollout.sglang.client import ServerFault, SGLangClient
from megatron_stare.rollout.sglang.pool import SGLangPool, worker_urls
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.rollout.sglang.server import Model, Server
from tests.rollout.sglang.idle import idle_pool, tiny_model

KEY = "open-sesame-4711"


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


class Keyed(BaseHTTPRequestHandler):
    """Answers {} to who has the key, as an SGLang server does, and 401 to the others."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        known = self.headers.get("authorization") == f"Bearer {KEY}"
        content = b'{"workers": [{"url": "http://worker:1"}]}' if known else b'{"error": "no"}'
        self.send_response(200 if known else 401)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def keyed() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Keyed) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}"
        found.shutdown()


# --- the key
# --------------------------------------------------------------------------------------------------


def test_every_request_brings_the_key(keyed: str):
    async def ask(key: str) -> None:
        client = SGLangClient(keyed, key)
        try:
            await client.state(5.0)
            await client.abort("x")
            await client.pause()
            await client.update_weights("/update_weights_from_tensor", {}, 5.0)
            await client.start_update()
        finally:
            await client.close()

    asyncio.run(ask(KEY))
    with pytest.raises(ServerFault, match="status 401"):
        asyncio.run(ask(""))
    assert worker_urls(keyed, KEY) == ["http://worker:1"]
    with pytest.raises(UserError, match="does not answer GET /workers"):
        worker_urls(keyed)


@pytest.mark.parametrize("where", ["field", "environment"])
def test_a_pool_hands_the_key_to_its_servers_and_its_router(
    where: str, keyed: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if where == "environment":
        monkeypatch.setenv(KEY_VARIABLE, KEY)
    settings = {"api_key": KEY} if where == "field" else {}
    with idle_pool(model, tmp_path, urls=[keyed], router_url=keyed, **settings) as pool:
        assert pool.router is not None
        for client in (pool.router, pool.servers[0].client):
            assert client.headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_refused_key_is_said_at_once(key: str, keyed: str, model: Model, tmp_path: Path):
    settings = SGLangConfig(urls=[keyed], api_key=key)
    with pytest.raises(UserError, match=f"refuses .* key; set sglang.api_key or {KEY_VARIABLE}"):
        asyncio.run(Server("a", model, settings, keyed).start())


def test_a_pool_that_the_interpreters_end_closes_leaves_no_process_and_no_key(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The interpreter has ended its threads before it calls what atexit registered."""
    settings = SGLangConfig(api_key=KEY, command="sh -c 'sleep 1000; true'")
    pool = SGLangPool(settings, model, tmp_path)
    pool.start()
    group: list[psutil.Process] = []
    while len(group) < 2:
        time.sleep(0.01)
        if (process := pool.servers[0].process) is not None:
            first = psutil.Process(process.process.pid)
            group = [first, *first.children()]
    monkeypatch.setattr(asyncio, "to_thread", Mock(side_effect=RuntimeError("no new futures")))
    pool.close()
    assert not psutil.wait_procs(group, timeout=10)[1]
    assert [file.name for file in tmp_path.iterdir()] == ["sglang_0.log"]


def test_a_launched_server_gets_the_key_in_secret(tmp_path: Path):
    log = tmp_path / "servers" / "log.txt"
    log.parent.mkdir()
    log.touch(0o644)  # of an earlier attempt without a key
    # What it is given, and the file that it is pointed to.
    echo = ["sh", "-c", 'for last; do :; done; echo "args: $*"; cat "$last"; exit 3', "sh"]
    process = ServerProcess(echo, "model", ["--tp-size", "2"], log, "127.0.0.1", 1, KEY)
    process.process.wait()
    first, arguments, last = log.read_text().splitlines()
    assert last == f'api-key: "{KEY}"', "the server was given it"
    assert KEY not in first + arguments, "ps shows a command line to everyone"
    assert process.last_words() == 'api-key: "***"'
    (file,) = log.parent.glob("*.yaml")
    assert file.stat().st_mode & 0o777 == 0o600
    process.stop()
    assert not file.exists()
    assert log.stat().st_mode & 0o777 == 0o600, "what a server prints is its own affair"
    plain = ServerProcess(["true"], "model", [], tmp_path / "plain.txt", "127.0.0.1", 1)
    plain.process.wait()
    assert "--api-key" not in (tmp_path / "plain.txt").read_text()


def test_the_key_is_in_no_file_and_no_message(tmp_path: Path):
    config = override(Config(), [f"sglang.api_key={KEY}"])
    assert api_key(config.sglang) == KEY and KEY not in repr(config)
    dump(config, tmp_path / "config.yaml")
    assert KEY not in (tmp_path / "config.yaml").read_text()
    assert load(tmp_path / "config.yaml").sglang.api_key == ""
    assert config.sglang.api_key == KEY, "the run keeps it"
    assert not list(differences(config, Config()))
    shown = without_secrets(["train", f"sglang.api_key={KEY}", "run.seed=2"])
    assert shown == ["train", "sglang.api_key=***", "run.seed=2"]


def test_the_arms_of_a_comparison_get_the_key(monkeypatch: pytest.MonkeyPatch):
    assert compare._secrets(Config()) == {}
    keyed = override(Config(), [f"sglang.api_key={KEY}"])
    assert compare._secrets(keyed) == {KEY_VARIABLE: KEY}


@pytest.mark.parametrize("key", ["two words", "na\u00efve", "line\nbreak"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key: str):
    with pytest.raises(UserError, match=r"sglang\.api_key") as raised:
        api_key(SGLangConfig(api_key=key))
    assert key not in str(raised.value)


# --- addresses
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"host": "localhost"}, []),
        ({"host": "0.0.0.0", "port": 30000}, ["http://0.0.0.0:30000"]),
        ({"host": "10.0.0.7"}, ["http://10.0.0.7:0"]),
        ({"urls": ["http://127.0.0.1:1", "http://node1:2"]}, ["http://node1:2"]),
        ({"urls": ["http://[::1]:1"], "router_url": "http://node2:8000"}, ["http://node2:8000"]),
        ({"urls": ["http://node1:2"], "api_key": KEY}, []),
    ],
)
def test_servers_without_a_key_are_named(
    settings: dict[str, Any],
    found: list[str],
    model: Model,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    config = SGLangConfig(**settings)
    assert standing_open(config) == found
    if config.urls:
        monkeypatch.setattr(SGLangPool, "_start", lambda self: asyncio.sleep(0))
        with idle_pool(model, tmp_path, **settings) as pool:
            pool.start().result(timeout=30)
        assert ("no key is set" in caplog.text) == bool(found)
        assert all(url in caplog.text for url in found)


def test_other_nodes_receive_a_reachable_address(monkeypatch: pytest.MonkeyPatch):
    assert public_url("127.0.0.1", 5) == "http://127.0.0.1:5"
    assert public_url("node1", 5) == "http://node1:5"
    assert public_url("fe00::7", 5) == "http://[fe00::7]:5"
    for host in ("0.0.0.0", "::"):
        assert not any(wild in public_url(host, 5) for wild in ("0.0.0.0", "[::]", "127.0.0.1"))
    monkeypatch.setattr(access, "address_towards", lambda host: "10.1.2.3")
    assert public_url("0.0.0.0", 5) == "http://10.1.2.3:5"
    monkeypatch.setattr(access, "address_towards", lambda host: "")
    monkeypatch.setattr(access.socket, "gethostname", lambda: "node7")
    assert public_url("0.0.0.0", 5) == "http://node7:5"


def test_serve_prints_a_reachable_address(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(access, "address_towards", lambda host: "10.1.2.3")
    process = ServerProcess(["true"], "model", [], tmp_path / "log.txt", "0.0.0.0", 30000, KEY)
    process.process.wait()
    assert process.url == "http://127.0.0.1:30000", "what asks from here"
    one = Server("a", model, SGLangConfig(api_key=KEY), lambda: process)
    one.process = process
    said = advice([one], keyed=True)
    assert "sglang.urls=[http://10.1.2.3:30000]" in said and KEY_VARIABLE in said
    assert KEY not in said and "key" not in advice([one], keyed=False)


# --- restarts
# --------------------------------------------------------------------------------------------------


def launched(model: Model, **settings: Any) -> Server:
    return Server("a", model, SGLangConfig(**settings), lambda: pytest.fail("not started here"))


def test_restarts_in_a_row_wait_longer_and_longer(model: Model, monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    one, other = (launched(model, restart_backoff=2.0) for _ in range(2))
    waits = []
    for _ in range(8):
        waits.append(one.pause_before_start())
        one.ready_at, now[0] = now[0], now[0] + 5  # it runs for five seconds
    assert waits == [0, 2, 4, 8, 16, 32, 60, 60]
    assert other.pause_before_start() == 0, "each server for itself"
    one.ready_at, now[0] = now[0], now[0] + server.STEADY_SECONDS + 1
    assert [one.pause_before_start() for _ in range(3)] == [0, 2, 4], "it had lived a while"


def test_a_server_that_dies_while_starting_is_not_started_in_a_hot_loop(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    waited: list[float] = []

    async def noted(seconds: float) -> None:
        waited.append(seconds)

    async def dies() -> None:
        raise EngineError("died while starting")

    with idle_pool(model, tmp_path, max_restarts=5) as pool:
        one = pool.servers[0]
        one.state = State.STARTING
        monkeypatch.setattr(one, "start", dies)
        monkeypatch.setattr(asyncio, "sleep", noted)
        with caplog.at_level(logging.WARNING):
            asyncio.run(pool.health.revive(one))
        assert waited == [0, 1, 2, 4, 8]
        assert "sglang.max_restarts=5" in str(pool.failure)
