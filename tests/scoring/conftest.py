"""Judges over HTTP for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.scoring.judge_server import Answer, JudgeServer


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], JudgeServer]]:
    servers: list[JudgeServer] = []

    def start(answer: Answer) -> JudgeServer:
        servers.append(JudgeServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
