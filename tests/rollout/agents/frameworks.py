"""Unmodified agents of well-known frameworks, as functions that a host imports."""

from __future__ import annotations

import json
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


async def openai_agents_responses(row: Any, endpoint: Any) -> float:
    return await _openai_agents(row, endpoint, stream=False, dialect="responses")


async def openai_agents_responses_streamed(row: Any, endpoint: Any) -> float:
    return await _openai_agents(row, endpoint, stream=True, dialect="responses")


async def _openai_agents(row: Any, endpoint: Any, stream: bool, dialect: str = "chat") -> float:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatCompletionsModel
    model = kind(model=endpoint.model, openai_client=client)
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


def smolagents_code(row: Any, endpoint: Any) -> float:
    """Its model writes Python instead of calls."""
    from smolagents import CodeAgent, OpenAIServerModel

    model = OpenAIServerModel(
        model_id=endpoint.model, api_base=endpoint.base_url, api_key=endpoint.api_key
    )
    agent = CodeAgent(tools=[], model=model, verbosity_level=0)
    return float(row.label in str(agent.run(row.messages[0]["content"])))


async def langgraph_send(row: Any, endpoint: Any) -> float:
    """Three workers that start together and ask in a random order."""
    import asyncio
    import operator
    import random
    from typing import Annotated, TypedDict

    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Send

    model = ChatOpenAI(model=endpoint.model, base_url=endpoint.base_url, api_key=endpoint.api_key)

    # langgraph reads the annotations, which a class here would have as text
    State = TypedDict("State", {"answers": Annotated[list[str], operator.add]})  # noqa: UP013

    async def worker(state: Any) -> dict[str, list[str]]:
        await asyncio.sleep(0.05 * random.random())
        found = await model.ainvoke([("user", f"{state['number']}+1=")])
        return {"answers": [found.content]}

    graph = StateGraph(State)
    graph.add_node("worker", worker)
    sends = [Send("worker", {"number": number}) for number in range(3)]
    graph.add_conditional_edges(START, lambda _: sends, ["worker"])
    graph.add_edge("worker", END)
    found = await graph.compile().ainvoke({"answers": []})
    return float(len(found["answers"]) == 3)


async def impatient_openai(row: Any, endpoint: Any) -> float:
    """The official client gives up a connection that is silent for two seconds."""
    from openai import AsyncOpenAI

    own: Any = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "timeout": 2.0}
    client = AsyncOpenAI(**own, max_retries=row.metadata["retries"])
    answer = await client.chat.completions.create(model="policy", messages=row.messages)
    return float(answer.choices[0].message.content)


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


async def responses_client(row: Any, endpoint: Any) -> float:
    """The whole history comes with each call."""
    return await _responses(row, endpoint, stored=False)


async def responses_client_stored(row: Any, endpoint: Any) -> float:
    """Each call names the answer before it."""
    return await _responses(row, endpoint, stored=True)


async def _responses(row: Any, endpoint: Any, stored: bool) -> float:
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    schema = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tools: Any = [{"type": "function", "name": "calculator", "parameters": schema, "strict": None}]
    items: Any = [{"role": "user", "content": row.messages[0]["content"]}]
    asked: dict[str, Any] = {"model": endpoint.model, "tools": tools, "instructions": "Be brief."}
    for _ in range(3):
        async with client.responses.stream(input=items, **asked) as events:
            streamed = [event async for event in events]
            answer = await events.get_final_response()
        assert streamed[-1].type == "response.completed"
        results = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": calculator(**json.loads(item.arguments)),
            }
            for item in answer.output
            if item.type == "function_call"
        ]
        if not results:
            break
        if stored:
            items, asked["previous_response_id"] = results, answer.id
        else:
            items = [*items, *(item.model_dump() for item in answer.output), *results]
    return float(row.label in answer.output_text)


async def openai_clients(row: Any, endpoint: Any) -> float:
    """The official client, sync and async, streamed and not, with a stop text, a limit, and two
    calls in one turn; the pieces of a stream are the whole answer.
    """
    import asyncio

    from openai import AsyncOpenAI, OpenAI

    own: Any = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
    schema = {"type": "object", "properties": {"expression": {"type": "string"}}}
    tools: Any = [{"type": "function", "function": {"name": "calculator", "parameters": schema}}]
    asked: Any = {"model": "policy", "messages": row.messages, "tools": tools}
    asked |= {"stop": ["never"], "max_tokens": 500}
    whole = await AsyncOpenAI(**own).chat.completions.create(**asked)
    text, calls = "", {}
    async for chunk in await AsyncOpenAI(**own).chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                calls[call.index] = call.function.arguments
    made = [call.function.arguments for call in whole.choices[0].message.tool_calls or ()]
    assert (text or None) == whole.choices[0].message.content and list(calls.values()) == made
    assert len(made) == 2
    also = await asyncio.to_thread(OpenAI(**own).chat.completions.create, **asked)
    assert also.choices[0].message.tool_calls[0].function.arguments == made[0]
    cut = await AsyncOpenAI(**own).chat.completions.create(**{**asked, "max_tokens": 2})
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2
    return 1.0
