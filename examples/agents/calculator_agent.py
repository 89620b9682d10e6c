"""An unmodified agent of openai-agents with a calculator; 1 if its boxed answer is right, else 0.

    python -m megatron_stare train tool_use_quickstart tools.environment= scoring.reward=episode \
        rollout.rollout_max_response_len=60 agents.function=examples.agents.calculator_agent.run \
        agents.python=.venv-agents/bin/python
"""

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

set_tracing_disabled(True)
TURNS = 3
HTTP = DefaultAsyncHttpxClient()  # one for all episodes: its certificates load slowly


@function_tool
def calculator(expression: str) -> str:
    """Evaluates an expression of integers.

    Args:
        expression: a sum such as 6*7
    """
    if set(expression) - set("0123456789+-* ") or "**" in expression:
        return "Error: only integers and + - *"
    try:
        return str(eval(expression))
    except SyntaxError:
        return "Error: no expression"


async def run(row, endpoint):
    """One episode of up to three turns."""
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=HTTP)
    model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
    agent = Agent(name="calculator", model=model, tools=[calculator])
    try:
        found = await Runner.run(agent, row.messages[-1]["content"], max_turns=TURNS)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return 0.0  # no answer within the turns, or a call of a tool that does not exist
    return float(f"\\boxed{{{row.label}}}" in str(found.final_output))
