"""Servers that come back: one fault does not end them, and a start ends where nothing moves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.rollout.engine import State
from megatron_stare.rollout.sglang import server as module
from megatron_stare.rollout.sglang.client import ServerFault, ServerInfo
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.rollout.sglang.server import Model, Server
from tests.rollout.sglang.idle import idle_pool, tiny_model
from tests.rollout.sglang.test_client import info_of

FAULTS = {
    "timeout": ServerFault("timeout", "no answer in 30 s"),
    "status": ServerFault("status", "status 503: busy", status=503),
    "connection": ServerFault("connection", "ConnectionResetError"),
    "garbage": ServerFault("garbage", "no JSON object"),
}


class Returning:
    """A client of a server that answers again, with one fault in its admission."""

    url, stream_interval = "http://returning", 0

    def __init__(self, info: ServerInfo, faults: dict[str, ServerFault]) -> None:
        self._info, self._faults = info, faults
        self.asked = asyncio.Event()

    async def _answer(self, method: str, answer: Any) -> Any:
        if fault := self._faults.pop(method, None):
            raise fault
        return answer

    async def state(self, timeout: float) -> State:
        return State.READY

    async def info(self) -> ServerInfo:
        return await self._answer("info", self._info)

    async def tokenize(self, text: str) -> None:
        return await self._answer("tokenize", None)

    async def running(self) -> int:
        return await self._answer("running", 0)

    async def release_memory(self, tags: object, timeout: float) -> None:
        await self._answer("release", None)

    async def close(self) -> None:
        """Nothing to close."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def idle(model: Model, tmp_path: Path) -> Iterator[SGLangPool]:
    with idle_pool(model, tmp_path, health_interval=0.01) as pool:
        yield pool


def watched(pool: SGLangPool, server: Server) -> None:
    """Watch the server until the pool fails, or the server is ready and its memory as it should."""

    async def watch() -> None:
        task = asyncio.create_task(pool.health._watch(server))
        while pool.failure is None and (
            server.state is not State.READY or (pool.health.training and not server.released)
        ):
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(watch(), 60))


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("method", ["info", "tokenize"])
def test_a_fault_in_the_admission_of_a_returning_server_leaves_it_for_the_next_look(
    method: str, kind: str, idle: SGLangPool, model: Model
):
    server = idle.servers[0]
    server.client = Returning(info_of(model.hf_checkpoint), {method: FAULTS[kind]})  # type: ignore[assignment]
    server.state = State.DEAD
    assert asyncio.run(server.probe()) is State.DEAD
    assert server.weights == "", "what it holds is not known"
    server.client._faults[method] = FAULTS[kind]  # type: ignore[attr-defined]
    watched(idle, server)
    assert idle.failure is None and server.state is State.READY


def test_a_returning_server_of_another_model_ends_the_run(idle: SGLangPool, model: Model):
    server = idle.servers[0]
    other = info_of("/elsewhere", model_type="llama")
    server.client, server.state = Returning(other, {}), State.DEAD  # type: ignore[assignment]
    watched(idle, server)
    assert isinstance(idle.failure, UserError) and "model_type" in str(idle.failure)


@pytest.mark.parametrize("kind", ["timeout", "status"])
def test_a_returning_server_that_fails_to_release_its_memory_is_asked_again(
    kind: str, idle: SGLangPool, model: Model
):
    server = idle.servers[0]
    server.client = Returning(info_of(model.hf_checkpoint), {"release": FAULTS[kind]})  # type: ignore[assignment]
    server.state, idle.health.training = State.DEAD, True
    watched(idle, server)
    assert idle.failure is None and server.released


def test_requests_that_fail_together_share_one_probe(idle: SGLangPool, model: Model):
    """A silent server is waited for 20 s, not 20 s for each request that it had."""
    server, asked = idle.servers[0], []

    async def silent(timeout: float) -> State:
        asked.append(timeout)
        await asyncio.sleep(0.01)
        raise FAULTS["timeout"]

    async def together() -> list[set[State]]:
        probes = [idle.health.probe for _ in range(50)]
        return [{*await asyncio.gather(*(each(server) for each in probes))} for _ in range(3)]

    server.client = Returning(info_of(model.hf_checkpoint), {})  # type: ignore[assignment]
    server.client.state = silent  # type: ignore[method-assign]
    assert asyncio.run(together()) == [{State.READY}, {State.READY}, {State.DEAD}]
    assert len(asked) == 3


def test_a_look_after_a_failed_update_finds_out_which_server_is_dead(
    idle: SGLangPool, model: Model
):
    """One unanswered probe would leave it to the next update, which takes sglang.sync_timeout."""
    answering, silent, _ = idle.servers
    for server in idle.servers:
        server.client = Returning(info_of(model.hf_checkpoint), {})  # type: ignore[assignment]

    async def no_answer(timeout: float) -> State:
        raise FAULTS["timeout"]

    silent.client.state = no_answer  # type: ignore[method-assign]
    asyncio.run(idle.health.probe_all())
    assert (answering.state, silent.state) == (State.READY, State.DEAD)
    assert answering.probes == 1


def test_the_wait_for_the_end_of_a_killed_server_holds_up_no_other(model: Model):
    """A process that a driver holds ends seconds or minutes after it was killed."""
    others_ran, held = threading.Event(), list[bool]()
    launch = Mock(side_effect=UserError("no such command"))
    server = Server("a", model, SGLangConfig(), launch)
    server.process = Mock(stop=lambda at_once: held.append(not others_ran.wait(30)))

    async def start() -> None:
        starting = asyncio.create_task(server.start())
        await asyncio.sleep(0)
        others_ran.set()
        await starting

    with pytest.raises(UserError, match="no such command"):
        asyncio.run(start())
    assert held == [False]


def test_a_fault_in_the_first_admission_is_retried(model: Model):
    server = Server("a", model, SGLangConfig(), "http://127.0.0.1:1")
    server.client = Returning(
        info_of(model.hf_checkpoint), dict.fromkeys(["info"], FAULTS["status"])
    )  # type: ignore[assignment]
    asyncio.run(server.start())
    assert server.state is State.READY


def test_a_start_may_take_as_long_as_its_log_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """sglang.start_timeout is 600 s; the first start of a large model writes its log meanwhile."""
    now = 0.0

    def write(text: str) -> None:
        with process.log.open("a") as log:
            log.write(text)

    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    process = ServerProcess(["true"], "unread", [], tmp_path / "log.txt", "127.0.0.1")
    process.process.wait()
    silent, moving = module.StartPatience(None, 600.0), module.StartPatience(process, 600.0)
    assert not silent.ended() and not moving.ended()
    for now in (500.0, 1000.0, 1500.0):
        write(f"Loading safetensors checkpoint shards: {now}\n")
        assert not moving.ended()
    assert silent.ended(), "an attached server shows no progress"
    now = 2099.0
    assert not moving.ended()
    now = 2101.0
    assert moving.ended()
    for now in range(2200, 6002, 100):
        write("waiting for port 5000\n")
        assert moving.ended() is (now > 6000), "a log that grows for ever is not a start"
