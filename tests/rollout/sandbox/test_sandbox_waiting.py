"""Waits: idle sessions for a process of their own, calls for a place to run in."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from megatron_stare.config import ToolsConfig
from megatron_stare.rollout.tools.builtin import PythonEnvironment
from megatron_stare.rollout.tools.calls import ToolCall
from megatron_stare.rollout.tools.environment import Episode, ToolResult
from tests.rollout.sandbox.sandboxes import open_kind


def test_idle_sessions_are_bounded_and_a_closed_one_says_so():
    with open_kind("limits", max_sessions=2) as sandbox:
        sessions = [sandbox.session() for _ in range(3)]
        for number, session in enumerate(sessions):
            assert not session.run(f"x = {number}").restarted
        assert len(sandbox._keeping) == 2
        kept = sessions[2].run("x")
        assert (kept.value, kept.restarted) == ("2", False)
        again = sessions[0].run("'x' in globals()")
        assert (again.value, again.restarted) == ("False", True)
        assert again.message().startswith("[variables and files of earlier calls are gone")
        assert not sessions[0].run("1").restarted, "said once"
        assert sessions[1].run("1").restarted, "the one that was idle for longest"
        sessions[1].close()
        assert len(sandbox._keeping) == 1


def test_the_calls_of_a_turn_take_one_place_of_the_sandbox_in_their_order():
    """Those that wait for another call of their session must not keep others waiting."""
    order: list[str] = []

    async def play(sandbox: Any) -> None:
        environment = PythonEnvironment(sandbox, stateful=True)

        async def call(name: str, code: str) -> None:
            assert await environment.call("python", {"code": code}) == name
            order.append(name)

        slow = "import time; time.sleep(4); n = 1; print('first')"
        turn = [call("first", slow), *(call(f"{n}", "n += 1; print(n)") for n in (2, 3, 4))]
        calls = [asyncio.create_task(each) for each in turn]
        await asyncio.sleep(0.2)
        await sandbox.run_async("1")
        order.append("another episode")
        await asyncio.gather(*calls)
        await environment.close()

    with open_kind("limits", max_concurrency=2, warm_workers=2) as sandbox:
        asyncio.run(play(sandbox))
    assert order == ["another episode", "first", "2", "3", "4"]


def test_a_session_is_closed_while_calls_take_all_places():
    free = threading.Event()
    with open_kind("limits", max_concurrency=1) as sandbox:
        session = sandbox.session()
        session.run("1")
        sandbox._callers.submit(free.wait)
        try:
            asyncio.run(asyncio.wait_for(session.close_async(), 20))
            assert not sandbox._keeping
        finally:
            free.set()


@pytest.mark.parametrize("stateful", [False, True])
def test_waiting_for_a_free_interpreter_does_not_count_as_call_time(stateful: bool):
    on_start, free = threading.Event(), threading.Event()
    with open_kind("limits") as sandbox:
        runner = sandbox.session() if stateful else sandbox
        for _ in range(2):  # all places are taken
            sandbox._callers.submit(free.wait)
        environment = PythonEnvironment(sandbox, stateful)

        async def wait_and_run() -> ToolResult:
            first = asyncio.create_task(runner.run_async("'done'", on_start=on_start.set))
            async with Episode(environment, ToolsConfig()) as episode:
                asked = asyncio.create_task(
                    episode.answer([ToolCall("python", {"code": "'also'"})])
                )
                await asyncio.sleep(0.3)
                assert not on_start.is_set() and not asked.done()
                assert episode._running == 0, "time stands still"
                free.set()
                (found,) = await asked
                assert episode.seconds > 0
                assert (await first).value == "'done'" and on_start.is_set()
                return found

        found = asyncio.run(wait_and_run())
        assert found.ok and found.text == "'also'"
