"""OpenAI's Responses: a request as a ModelCall, and an answer as JSON or events.

Items become messages: reasoning, a message and function calls that follow one another are one turn
of the assistant. `previous_response_id` stands for that call's items and its answer; its
`instructions` are not carried over, as in OpenAI's server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_stare.rollout.agents.chat import (
    Dialect,
    ModelAnswer,
    ModelCall,
    count_of,
    delivery_of,
    ignored_of,
    named_event,
)
from megatron_stare.rollout.agents.messages import BadCall, Message, checked
from megatron_stare.rollout.tools.calls import Tool

IGNORED = ("temperature", "top_p", "reasoning", "text", "truncation")


def read(body: Mapping[str, Any]) -> ModelCall:
    instructions = body.get("instructions")
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BadCall("input must be a text or a list of at least one item")
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        _add(messages, item)
    choice = body.get("tool_choice")
    return ModelCall(
        checked(messages),
        () if choice == "none" else tuple(map(_tool, body.get("tools") or ())),
        count_of(body, "max_output_tokens"),
        ignored=ignored_of(body, IGNORED, choice),
        previous=str(body.get("previous_response_id") or "").removeprefix("resp_"),
        instructed=bool(instructions),
        **delivery_of(body),
    )


def body_of(call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
    return _response(call, answer, list(_items(answer)))


def events_of(call: ModelCall, answer: ModelAnswer) -> Iterator[str]:
    number = -1

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        number += 1
        return named_event(kind, sequence_number=number, **fields)

    whole = body_of(call, answer)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        yield event("response.output_item.added", output_index=index, item=_empty(item))
        if item["type"] == "function_call":
            text = item["arguments"]
            kind, name = "response.function_call_arguments", item["name"]
            yield event(f"{kind}.delta", **place, delta=text)
            yield event(f"{kind}.done", **place, arguments=text, name=name)
        else:
            (part,) = item["content"]
            place["content_index"] = 0
            kind = f"response.{part['type']}"
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            yield event(f"{kind}.delta", **place, delta=part["text"], **more)
            yield event(f"{kind}.done", **place, text=part["text"], **more)
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{whole['status']}", response=whole)


def error_event(content: Mapping[str, Any]) -> str:
    error = content["error"]
    fields = {"code": error["code"], "message": error["message"], "param": None}
    return named_event("error", sequence_number=0, **fields)


def _response(call: ModelCall, answer: ModelAnswer, output: list[Any]) -> dict[str, Any]:
    cut = answer.finish_reason == "length"
    prompt, completion = len(answer.prompt_ids), len(answer.ids)
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": 0,
        "model": answer.model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "previous_response_id": f"resp_{call.previous}" if call.previous else None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def _items(answer: ModelAnswer) -> Iterator[dict[str, Any]]:
    message, name = answer.message, answer.id
    if message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": message["reasoning_content"]}
        yield {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [part]}
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        part = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
        yield {
            "type": "message",
            "id": f"msg_{name}",
            "role": "assistant",
            "status": "incomplete" if answer.finish_reason == "length" else "completed",
            "content": [part],
        }
    for call in calls:
        yield {
            "type": "function_call",
            "id": f"fc_{call['id']}",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, "arguments": ""} if "arguments" in item else {**item, "content": []}


def _tool(tool: Any) -> Tool:
    kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
    if kind != "function" or not isinstance(tool.get("name"), str):
        raise BadCall(
            f"a tool of type {kind!r}: the server has no tools of its own; give functions"
        )
    function = {
        name: tool[name] for name in ("name", "description", "parameters") if tool.get(name)
    }
    return {"type": "function", "function": function}


def _add(messages: list[Message], item: Any) -> None:
    """Append an item as a message, or to the assistant's turn that it belongs to."""
    if not isinstance(item, dict):
        raise BadCall("an item of input must be an object")
    kind = item.get("type") or "message"
    if kind == "function_call_output":
        text, name = item.get("output"), item.get("call_id")
        messages.append({"role": "tool", "tool_call_id": name, "content": text})
        return
    if kind == "message" and item.get("role") != "assistant":
        messages.append({"role": item.get("role"), "content": item.get("content")})
        return
    turn: Message = {"role": "assistant", "content": None}
    own = messages[-1] if messages and messages[-1].get("role") == "assistant" else None
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        turn["reasoning_content"] = "".join(str(part.get("text") or "") for part in parts)
        own = None  # thinking begins a turn
    elif kind == "message":
        own = None if own and (own["content"] is not None or own.get("tool_calls")) else own
        turn["content"] = item.get("content")
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or ""}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn["tool_calls"] = [*(own or {}).get("tool_calls", ()), call]
    else:
        raise BadCall(f"an item of type {kind!r} cannot be read; send the items themselves")
    if own is None:
        messages.append(turn)
    else:
        own |= {name: value for name, value in turn.items() if value is not None}


RESPONSES = Dialect(read, body_of, events_of, error_event)
