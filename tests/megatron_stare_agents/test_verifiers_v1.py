"""The adapter of verifiers 0.4 on a library that is not there: one environment for all episodes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace

import pytest

from megatron_stare_agents import verifiers_v1


def test_an_environment_that_cannot_be_opened_now_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    """A tool server that starts too slowly once would fail every later episode of its host."""
    opened = []

    @contextlib.asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        opened.append(len(opened))
        if len(opened) == 1:
            raise TimeoutError("no tool server")
        yield

    library = ModuleType("verifiers.v1")
    environment = SimpleNamespace(serving=serving)
    library.resolve_env_config = lambda asked: SimpleNamespace(taskset=asked)  # type: ignore[attr-defined]
    library.load_environment = lambda config: environment  # type: ignore[attr-defined]
    library.load_taskset = lambda taskset: ["task"]  # type: ignore[attr-defined]
    package = ModuleType("verifiers")
    package.v1 = library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.v1", library)

    async def play() -> None:
        settings = {"environment": {"number": 1}}
        with pytest.raises(RuntimeError, match="no tool server"):
            await verifiers_v1._opened(settings)
        for _ in range(2):
            found, tasks = await verifiers_v1._opened(settings)
            assert found is environment and tasks[0] == "task"

    asyncio.run(play())
    assert opened == [0, 1]
