"""Environments of the trainer's own loop as agents: the same episodes through the endpoint.

    python -m megatron_stare train tool_use_7b tools.environment= \
        agents.function=examples.agents.tool_environment.python ...

The token ids are those of `tools.environment=python`. The trainer's own loop needs no HTTP and
stays the faster way; this file is where to begin if your agent shall do more than call tools. It
runs in the trainer's Python, and returns no reward: scoring.reward judges the last answer.
"""

import functools

from megatron_stare.config import SandboxConfig, ToolsConfig
from megatron_stare.records import Prompt
from megatron_stare.rollout.sandbox.fusion import open_sandbox
from megatron_stare.rollout.tools.builtin import CalculatorEnvironment, PythonEnvironment
from megatron_stare.rollout.tools.calls import ToolCall, strict_json
from megatron_stare.rollout.tools.environment import Episode
from megatron_stare_agents.gym_tasks import next_turn

TURNS = 8
SANDBOX = SandboxConfig(max_concurrency=64, warm_workers=16)


async def python(row, endpoint):
    """Python in a sandbox that all episodes of this host share."""
    await _play(row, endpoint, PythonEnvironment(_sandbox()))


async def calculator(row, endpoint):
    """A calculator."""
    await _play(row, endpoint, CalculatorEnvironment(Prompt(row.index, [0], row.label)))


@functools.cache
def _sandbox():
    return open_sandbox(SANDBOX)


async def _play(row, endpoint, environment):
    """Turns until one without a call."""
    messages = list(row.messages)
    async with Episode(environment, ToolsConfig()) as episode:
        for _ in range(TURNS):
            asked = {"messages": messages, "tools": list(episode.tools)}
            turn = await next_turn(endpoint, asked)
            if turn is None:
                break  # what was reached counts
            messages.append(turn)
            calls = turn.get("tool_calls") or ()
            if not calls:
                break
            results = await episode.answer([_read(call["function"]) for call in calls])
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": result.text}
                for call, result in zip(calls, results, strict=False)
            ]


def _read(function):
    try:
        arguments = strict_json(function["arguments"])
        if not isinstance(arguments, dict):
            raise ValueError("not an object")
    except ValueError as error:
        return ToolCall(
            function["name"], error=f"Error: the arguments are no JSON object ({error})"
        )
    return ToolCall(function["name"], arguments)
