"""Anthropic's messages: a request as a ModelCall, and an answer as JSON or events."""

from __future__ import annotations

import json
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
    stop_texts,
)
from megatron_stare.rollout.agents.messages import BadCall, Message, checked
from megatron_stare.rollout.tools.calls import Tool, strict_json

IGNORED = ("temperature", "top_p", "top_k", "thinking")
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Arguments that are no JSON object, which this dialect has no place for.
_RAW = "_raw_arguments"


def read(body: Mapping[str, Any]) -> ModelCall:
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": body["system"]})
    if not isinstance(body.get("messages"), list):
        raise BadCall("messages must be a list of at least one message")
    for message in body["messages"]:
        messages += _neutral(message)
    choice = (body.get("tool_choice") or {}).get("type")
    return ModelCall(
        checked(messages),
        () if choice == "none" else tuple(map(_tool, body.get("tools") or ())),
        count_of(body, "max_tokens"),
        stop_texts(body.get("stop_sequences")),
        ignored=ignored_of(body, IGNORED, choice),
        **delivery_of(body),
    )


def body_of(call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": _blocks(answer.message),
        "stop_reason": _STOPS[answer.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.ids)},
    }


def events_of(call: ModelCall, answer: ModelAnswer) -> Iterator[str]:
    whole = body_of(call, answer)
    begun = {**whole, "content": [], "stop_reason": None}
    yield named_event("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        empty, deltas = _in_pieces(block)
        yield named_event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield named_event("content_block_delta", index=index, delta=delta)
        yield named_event("content_block_stop", index=index)
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield named_event("message_delta", delta=end, usage=whole["usage"])
    yield named_event("message_stop")


def error_event(content: Mapping[str, Any]) -> str:
    return named_event("error", error=content["error"])


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thinking = message["reasoning_content"]
        blocks.append({"type": "thinking", "thinking": thinking, "signature": "policy"})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        name, text = call["function"]["name"], call["function"]["arguments"]
        block = {"type": "tool_use", "id": call["id"], "name": name, "input": _input_of(text)}
        blocks.append(block)
    return blocks


def _input_of(text: str) -> dict[str, Any]:
    try:
        found = strict_json(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {_RAW: text}


def _in_pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without its content, and the deltas that bring it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        partial = json.dumps(block["input"])
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": partial}]
    thought = {"type": "thinking_delta", "thinking": block["thinking"]}
    signed = {"type": "signature_delta", "signature": block["signature"]}
    return {**block, "thinking": "", "signature": ""}, [thought, signed]


def _tool(tool: Any) -> Tool:
    if not isinstance(tool, dict) or "input_schema" not in tool or "name" not in tool:
        raise BadCall("tools must have name and input_schema; the server has no tools of its own")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _neutral(message: Any) -> list[Message]:
    """One message in the form that all dialects share: results of tools become messages."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise BadCall("a message's role must be user or assistant")
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message["role"], "content": content}]
    results: list[Message] = []
    own: Message = {"role": message["role"], "content": None}
    for block in content:
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                own["content"] = (own["content"] or "") + str(block.get("text") or "")
            case "thinking":
                own["reasoning_content"] = str(block.get("thinking") or "")
            case "tool_use":
                own.setdefault("tool_calls", []).append(_call_of(block))
            case "tool_result":
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
                results.append({**result, "content": block.get("content")})
            case kind:
                raise BadCall(f"the model reads text alone, and content has a block {kind!r}")
    said = own["content"] is not None or own["role"] == "assistant"
    return [*results, *([own] if said else [])]


def _call_of(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input") or {}
    text = given[_RAW] if isinstance(given, dict) and set(given) == {_RAW} else json.dumps(given)
    function = {"name": str(block.get("name") or ""), "arguments": text}
    return {"id": block.get("id"), "type": "function", "function": function}


ANTHROPIC = Dialect(read, body_of, events_of, error_event, named_event("ping"))
