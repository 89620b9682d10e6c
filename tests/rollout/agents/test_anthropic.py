"""Anthropic's messages: what is served comes back as the same turn, and what cannot be read is
refused.
"""

from __future__ import annotations

import json
from typing import Any

import numpy
import pytest

from megatron_stare.rollout.agents import anthropic
from megatron_stare.rollout.agents.chat import ModelAnswer, ModelCall
from megatron_stare.rollout.agents.messages import BadCall, Message, differences, identity

ASKED = {"role": "user", "content": "go"}


def answered(**message: Any) -> ModelAnswer:
    own = {"role": "assistant", **message}
    return ModelAnswer("0", "policy", own, "stop", numpy.ones(3), numpy.ones(4), numpy.zeros(4), [])


def calls(*arguments: str) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{n}", "type": "function", "function": {"name": "f", "arguments": text}}
        for n, text in enumerate(arguments)
    ]


MESSAGES: list[Message] = [
    {"role": "assistant", "content": "words"},
    {"role": "assistant", "content": "", "reasoning_content": "hm"},
    {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "b",
        "tool_calls": calls('{"c": 1}'),
    },
    {"role": "assistant", "content": None, "tool_calls": calls("{}", "[1]", "{broken", '"text"')},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": calls('{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud800"}'),
    },
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_served_turn_comes_back_as_itself(message: Message):
    answer = answered(**message)
    body = anthropic.body_of(ModelCall([]), answer)
    json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # as clients read it
    events = [
        json.loads(line.removeprefix("data: "))
        for event in anthropic.events_of(ModelCall([]), answer)
        for line in event.splitlines()
        if line.startswith("data: ")
    ]
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"]
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], dict(event["delta"])
            kind = delta.pop("type")
            if kind == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            for name, text in delta.items():
                if name in block:
                    block[name] += text
    assert list(blocks.values()) == body["content"]
    echo = {"role": "assistant", "content": body["content"]}
    back = anthropic.read({"messages": [ASKED, echo], "max_tokens": 5}).messages[1]
    assert identity(back) == identity(message)
    assert differences(message, back) <= {"null"}


def test_results_of_tools_and_the_system_become_messages():
    results = [
        {
            "type": "tool_result",
            "tool_use_id": "call_0",
            "content": [{"type": "text", "text": "3"}],
        },
        {"type": "text", "text": "and now?"},
    ]
    body = {"system": "be brief", "messages": [ASKED, {"role": "user", "content": results}]}
    found = [(one["role"], one.get("tool_call_id")) for one in anthropic.read(body).messages]
    assert found == [("system", None), ("user", None), ("tool", "call_0"), ("user", None)]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [ASKED], "tools": [{"type": "web_search_20250305"}]}, "input_schema"),
        ({"messages": [ASKED], "max_tokens": "many"}, "max_tokens"),
    ],
)
def test_what_cannot_be_read_is_refused(body: dict[str, Any], said: str):
    with pytest.raises(BadCall, match=said):
        anthropic.read(body)
