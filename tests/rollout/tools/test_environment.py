"""Environments under a budget: errors become messages, output is cut,
time and calls are bounded; and the tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config import ToolsConfig, UserError
from megatron_stare.records import Prompt
from megatron_stare.rollout.tools.builtin import (
    CalculatorEnvironment,
    evaluate,
    python_environments,
    show,
)
from megatron_stare.rollout.tools.calls import FORMATS, ToolCall
from megatron_stare.rollout.tools.environment import (
    Episode,
    ToolError,
    cut,
    find_environment,
    function_tool,
    hold_clock,
)
from tests.rollout.sandbox.sandboxes import open_kind

PROMPT = Prompt(0, (1,), "label", metadata={"facts": {"Oslo": "Norway", "Lima": "Peru"}})


def answers(make, calls, **limits):
    """One turn with these calls, then the end of the episode."""

    async def turn():
        async with Episode(make(PROMPT), ToolsConfig(**limits)) as episode:
            return await episode.answer(calls)

    return asyncio.run(turn())


class Clumsy:
    """Fails in every way."""

    tools = tuple(function_tool(name, "", {}, []) for name in ("raise", "sleep", "shout", "refuse"))
    closed = 0

    def __init__(self, prompt):
        pass

    async def call(self, name, arguments):
        if name == "raise":
            raise KeyError("inside")
        if name == "sleep":
            await asyncio.sleep(60)
        if name == "refuse":
            raise ToolError("not like this")
        return "a" * 10_000 + "z"

    async def close(self):
        Clumsy.closed += 1


def test_failures_become_messages_and_the_episode_continues():
    before = Clumsy.closed
    names = ["raise", "sleep", "refuse", "shout", "absent"]
    calls = [*(ToolCall(name) for name in names), ToolCall("", error="Error: malformed")]
    got = answers(Clumsy, calls, call_seconds=0.1, output_characters=100)
    assert [answer.ok for answer in got] == [False, False, False, True, False, False]
    assert got[0].text == "Error: raise failed (KeyError: 'inside')"
    assert got[1].text == "Error: sleep gave no answer within 0.1 s"
    assert got[2].text == "Error: not like this"
    assert got[3].text == "a" * 75 + "\n[9901 characters cut]\n" + "a" * 24 + "z"
    assert got[4].text.startswith("Error: there is no tool 'absent'")
    assert got[5].text == "Error: malformed"
    assert Clumsy.closed == before + 1


def test_calls_and_seconds_of_an_episode_are_bounded():
    async def episode_of_two_turns():
        async with Episode(
            Clumsy(PROMPT), ToolsConfig(max_calls=3, call_seconds=0.2, episode_seconds=0.1)
        ) as episode:
            first = await episode.answer([ToolCall("sleep"), ToolCall("shout")])
            second = await episode.answer([ToolCall("shout"), ToolCall("shout")])
            return first, second, episode

    first, second, episode = asyncio.run(episode_of_two_turns())
    assert [answer.ok for answer in first] == [False, True]
    assert "the 0.1 s for tools are used up" in second[0].text
    assert "all 3 tool calls are used" in second[1].text
    assert episode.calls == 4
    assert episode.seconds >= 0.1


class Waiting:
    """A tool whose calls wait longer than they may take, and then take `seconds`."""

    tools = CalculatorEnvironment.tools

    def __init__(self, seconds):
        self.seconds = seconds
        self.began, self.ended = [], []  # the waits

    async def call(self, name, arguments):
        resume = hold_clock()
        self.began.append(time.monotonic())
        await asyncio.sleep(0.6)
        self.ended.append(time.monotonic())
        resume()
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return "done"

    async def close(self):
        """Nothing is held."""


def test_the_time_of_a_call_starts_after_its_wait():
    calls = [ToolCall("calculator", {"expression": "1"})] * 2

    async def answered(environment):
        began = time.monotonic()
        async with Episode(environment, ToolsConfig(call_seconds=0.3)) as episode:
            return await episode.answer(calls), episode.seconds, time.monotonic() - began

    quick = Waiting(0)
    found, seconds, whole = asyncio.run(answered(quick))
    assert [answer.text for answer in found] == ["done"] * 2
    overlap = whole - (min(quick.ended) - max(quick.began))
    assert seconds <= overlap
    slow = Waiting(60)
    late, seconds, whole = asyncio.run(answered(slow))
    assert {answer.text for answer in late} == {"Error: calculator gave no answer within 0.3 s"}
    overlap = whole - (min(slow.ended) - max(slow.began))
    assert 0.29 <= seconds <= overlap, "at once, and counted once"


def test_a_users_environment_by_dotted_path_from_text_to_answer():
    make = find_environment("examples.lookup_environment.LookupEnvironment")
    text = (
        '<tool_call>{"name": "lookup", "arguments": {"key": "Oslo"}}</tool_call>'
        '<tool_call>{"name": "lookup", "arguments": {"key": "Limo"}}</tool_call>'
        '<tool_call>{"name": "lookup", "arguments": {"place": "Oslo"}}</tool_call>'
    )
    got = answers(make, FORMATS["hermes"].read(text, make(PROMPT).tools))
    assert [answer.text for answer in got] == [
        "Norway",
        "Error: nothing is known of 'Limo'; did you mean 'Lima'?",
        "Error: lookup: the argument 'key' is missing",
    ]


@pytest.mark.parametrize(
    "path", ["nothing", "examples.nothing.X", "examples.lookup_environment.Absent", "math.pi"]
)
def test_a_wrong_path_is_refused(path):
    with pytest.raises(UserError, match="environment"):
        find_environment(path)


def test_the_python_tool_with_and_without_state():
    first, second = (
        ToolCall("python", {"code": code}) for code in ("x = 20\nprint('set')", "x + 1")
    )

    async def two_turns(make):
        async with Episode(make(PROMPT), ToolsConfig()) as episode:
            return [(await episode.answer([call]))[0].text for call in (first, second)]

    with open_kind("limits") as sandbox:
        assert asyncio.run(two_turns(python_environments(sandbox, stateful=True))) == ["set", "21"]
        fresh = asyncio.run(two_turns(python_environments(sandbox)))
        assert fresh[0] == "set"
        assert "NameError: name 'x' is not defined" in fresh[1]
        (failed,) = answers(python_environments(sandbox), [second])
        assert (failed.text, failed.ok) == (fresh[1], False), "the traceback alone, and an error"
        crash = [ToolCall("python", {"code": "import os; os._exit(1)"})]
        (lost,) = answers(python_environments(sandbox, stateful=True), crash)
        assert lost.text.endswith("[all variables are lost]") and not lost.ok


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("(3 + 4) * 2 ** 5", "224"),
        ("1 / 3 + 1 / 6", "1/2 = 0.5"),
        ("6 / 3", "2"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2 ^ 10", "1024"),
        ("sqrt(16/9)", "4/3 = 1.33333333333"),
        ("sqrt(2)", "1.41421356237"),
        ("factorial(20)", "2432902008176640000"),
        ("gcd(12, 18) + max(1, 2, 3) - abs(-4)", "5"),
        ("2 * pi", "6.28318530718"),
        ("1e3 * 2", "2000"),
        ("4 ** 0.5", "2"),
        ("2 ** -2", "1/4 = 0.25"),
        ("1 ** 10 ** 9", "1"),
    ],
)
def test_the_calculator_computes(expression, shown):
    (answer,) = answers(CalculatorEnvironment, [ToolCall("calculator", {"expression": expression})])
    assert (answer.text, answer.ok) == (shown, True)


NO_ARITHMETIC = """__import__('os').system('true') | 9**9**9**9 | (-1) ** 0.5 | 1/0 | x + 1
[1]*10**9 | 'a' * 9 | True | factorial(10**9) | factorial(1.5) | gcd(1/2, 1) | (lambda: 1)() | 1 +
sqrt(-1) | 1 < 2 | sqrt(*[1]) | max() | 10.0 ** 400 | abs(1, 2)"""


@pytest.mark.parametrize(
    "expression",
    [*NO_ARITHMETIC.replace("\n", "|").split("|"), "(" * 200 + ")" * 200, "1" * 1001, "-" * 999],
)
def test_invalid_arithmetic_is_answered_with_a_message(expression):
    (answer,) = answers(CalculatorEnvironment, [ToolCall("calculator", {"expression": expression})])
    assert not answer.ok
    assert answer.text.startswith("Error: ")
    assert "failed (" not in answer.text


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), st.text("0123456789+-*/%^().e sqrtpi", max_size=60)))
def test_no_expression_raises_another_exception(expression):
    with contextlib.suppress(ToolError):
        assert show(evaluate(expression))


@settings(max_examples=200, deadline=None)
@given(st.text("0123456789+-*/ ()", max_size=24))
def test_the_calculator_agrees_with_python(expression):
    try:
        value = evaluate(expression)
    except ToolError:
        return
    assert math.isclose(value, eval(expression), rel_tol=1e-9, abs_tol=1e-9)


def test_a_whole_number_is_shown_once():
    (answer,) = answers(CalculatorEnvironment, [ToolCall("calculator", {"expression": "2**5000"})])
    assert answer.text == "Error: 2 ** 5000 is too large"


def test_cut_keeps_the_beginning_and_the_end():
    assert cut("abc", 3) == "abc"
    assert cut("0123456789" * 10, 8) == "012345\n[92 characters cut]\n89"
