"""Unmodified agents of well-known frameworks, as functions that a host imports."""

from __future__ import annotations

from typing import Any


def calculator(expression: str) -> str:
    """Evaluates an expression.

    Args:
        expression: a sum such as 6*7
    """
    return str(eval(expression))


async def openai_agents(row: Any, endpoint: Any) -> float:
    return await _openai_agents(row, endpoint, stream=False)


async def openai_agents_streamed(row: Any, endpoint: Any) -> float:
    return await _openai_agents(row, endpoint, stream=True)


async def _openai_agents(row: Any, endpoint: Any, stream: bool) -> float:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = OpenAIChatCompletionsModel(model=endpoint.model, openai_client=client)
    agent = Agent(name="a", model=model, tools=[function_tool(calculator)])
    if stream:
        found = Runner.run_streamed(agent, row.messages[0]["content"])
        async for _ in found.stream_events():
            pass
    else:
        found = await Runner.run(agent, row.messages[0]["content"])
    return float(row.label in found.final_output)


async def pydantic_ai(row: Any, endpoint: Any) -> float:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
    agent = Agent(OpenAIChatModel(endpoint.model, provider=provider), tools=[calculator])
    found = await agent.run(row.messages[0]["content"])
    return float(row.label in found.output)


async def langgraph(row: Any, endpoint: Any) -> float:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key)
    agent = create_react_agent(model, [calculator])
    found = await agent.ainvoke({"messages": [("user", row.messages[0]["content"])]})
    return float(row.label in found["messages"][-1].content)


def smolagents(row: Any, endpoint: Any) -> float:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(
        model_id=endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key
    )
    agent = ToolCallingAgent(tools=[tool(calculator)], model=model, verbosity_level=0)
    return float(row.label in str(agent.run(row.messages[0]["content"])))


async def anthropic_client(row: Any, endpoint: Any) -> float:
    return await _anthropic(row, endpoint, stream=False)


async def anthropic_client_streamed(row: Any, endpoint: Any) -> float:
    return await _anthropic(row, endpoint, stream=True)


async def _anthropic(row: Any, endpoint: Any, stream: bool) -> float:
    from anthropic import AsyncAnthropic

    base = endpoint.base_url.removesuffix("/v1")
    client = AsyncAnthropic(base_url=base, api_key=endpoint.api_key)
    schema = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tools = [{"name": "calculator", "description": "Evaluates.", "input_schema": schema}]
    messages = list(row.messages)
    for _ in range(3):
        asked: Any = {"model": "policy", "max_tokens": 900, "messages": messages, "tools": tools}
        if stream:
            async with client.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": calculator(**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "user", "content": results})
    return float(row.label in answer.content[-1].text)
