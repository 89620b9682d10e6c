"""The client of a SandboxFusion server, against a real server that runs the local sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest

from megatron_stare.config import SandboxConfig
from megatron_stare.rollout.sandbox import fusion
from megatron_stare.rollout.sandbox.fusion import RemoteSandbox, open_sandbox
from megatron_stare.rollout.sandbox.interpreter import CallLost, SandboxError
from megatron_stare.rollout.sandbox.sandbox import Sandbox
from tests.rollout.sandbox.fusion_server import SandboxServer
from tests.rollout.sandbox.sandboxes import QUICK, open_kind


@pytest.fixture(scope="module")
def server():
    with open_kind("limits", wall_seconds=2.0) as sandbox:
        server = SandboxServer(sandbox)
        yield server
        server.shutdown()
        server.server_close()


@pytest.fixture
def remote(server):
    config = SandboxConfig(url=server.url + "/", max_concurrency=2, max_attempts=3)
    with contextlib.closing(RemoteSandbox(config)) as remote:
        yield remote


@pytest.mark.parametrize(
    ("code", "reason", "stdout"),
    [
        ("print(int(input()) + 1)", "ok", "42\n"),
        ("print('a'); 1/0", "error", "a\n"),
        ("print('a', flush=True)\nwhile True: pass", "timeout", "a\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed", ""),
    ],
)
def test_a_call_returns_its_output(remote, server, code, reason, stdout):
    result = remote.run(code, "41\n", wall_seconds=1.0)
    assert (result.reason, result.stdout, result.value) == (reason, stdout, None)
    assert result.seconds > 0
    assert ("ZeroDivisionError" in result.stderr) == ("1/0" in code)
    assert server.requests[-1]["run_timeout"] == 1.0
    assert server.requests[-1]["memory_limit_MB"] == 1024


def test_long_output_is_cut_with_a_mark(server):
    with contextlib.closing(
        RemoteSandbox(SandboxConfig(url=server.url, output_bytes=100))
    ) as remote:
        assert remote.run("print('x' * 200)").stdout == "x" * 100 + "\n[output cut after 100 bytes]"


@pytest.mark.parametrize(
    "fault",
    [
        503,
        "close",
        b"no json",
        b"[]",
        b'{"status": "Success"}',
        b'{"status": "SandboxError", "run_result": null}',
    ],
)
def test_a_server_that_fails_is_asked_again_and_then_named(remote, server, fault):
    server.faults[:] = [fault, fault]
    assert remote.run("print(1)").stdout == "1\n"
    server.faults[:] = [fault] * 4
    with pytest.raises(SandboxError, match=rf"sandbox.url={server.url}/: .*, 3 times") as error:
        remote.run("print(1)")
    assert not isinstance(error.value, CallLost)
    assert not server.faults


def test_code_that_a_working_server_does_not_answer_is_lost_and_not_the_server(remote, server):
    server.faults[:] = [503, 503, 503]
    with pytest.raises(CallLost, match="3 times"):
        remote.run("print(1)")
    assert remote.run("print(2)").stdout == "2\n"


def test_invalid_unicode_is_sent_to_no_server(remote, server):
    before = len(server.requests)
    result = remote.run("print('\ud800')")
    assert result.reason == "error" and "surrogates not allowed" in result.stderr
    assert len(server.requests) == before
    assert remote.run("print(len(input()))", stdin="\ud800").stdout == "1\n"


def test_an_answer_with_halves_of_pairs_is_made_text(remote, server):
    start = '{"status": "Success", "run_result": {"status": "Finished", "return_code": 0, '
    server.faults[:] = [(start + '"stdout": "\\ud800", "stderr": ""}}').encode()]
    assert remote.run("print(1)").stdout == "?"
    odd = start + '"stdout": "", "stderr": "", "execution_time": [1]}}'
    server.faults[:] = [odd.encode()]
    assert remote.run("print(1)").stdout == "1\n"


def test_requests_in_flight_are_bounded(remote, server):
    server.most_running = 0

    async def many():
        return await asyncio.gather(*(remote.run_async(f"print({number})") for number in range(8)))

    assert [result.stdout for result in asyncio.run(many())] == [
        f"{number}\n" for number in range(8)
    ]
    assert server.most_running == 2


def test_the_config_says_which_sandbox(server):
    for config, kind in (
        (SandboxConfig(url=server.url), RemoteSandbox),
        (SandboxConfig(isolation="limits", **QUICK), Sandbox),
    ):
        opened = open_sandbox(config)
        assert isinstance(opened, kind)
        opened.close()


def test_an_endless_answer_is_a_fault(monkeypatch):
    """Every byte comes in time, and the answer never ends."""
    monkeypatch.setattr(fusion, "QUEUE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            for _ in range(2):  # the call, and the question whether other code runs
                talk, _ = listening.accept()
                with talk, contextlib.suppress(OSError):
                    talk.recv(1 << 16)
                    talk.sendall(b"HTTP/1.1 200 OK\r\n\r\n{")
                    while True:
                        talk.sendall(b" ")
                        time.sleep(0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with (
            contextlib.closing(
                RemoteSandbox(SandboxConfig(url=url, wall_seconds=0.5, max_attempts=1))
            ) as sandbox,
            pytest.raises(SandboxError, match=r"no whole answer after 1 s\), 1 times"),
        ):
            sandbox.run("1")
        thread.join(20)
        assert not thread.is_alive()


def test_a_sandbox_is_closed_twice_without_harm(server):
    sandbox = RemoteSandbox(SandboxConfig(url=server.url))
    assert sandbox.run("print(1)").stdout == "1\n"
    sandbox.close()
    sandbox.close()
