"""Waits: idle sessions for a process of their own, calls for a place to run in."""

from __future__ import annotations

import asyncio
import threading

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
