"""Chat messages as agents send them: brought into one form, and compared.

A message is a dict as OpenAI's chat completions have it; every dialect is converted to it. A client
gives back what it was served, but rarely byte for byte: arguments are serialised again, empty
content is null, thinking is left out. Such differences are tolerated and counted by kind; any other
one is a rewrite, and begins a new sequence:

null        no content, null, or an empty text
parts       a text, or a list of text parts
whitespace  white space around a text
arguments   a call's arguments as other JSON of the same value: 2.0 is 2, true is not 1
keys        other keys, such as `name` or `index`
reasoning   the thinking under another name, or left out
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
_FORMAT = frozenset({"null", "parts", "whitespace", "arguments", "keys"})
TOLERANCES = {"none": frozenset(), "format": _FORMAT, "format+reasoning": _FORMAT | {"reasoning"}}
ROLES = {"system", "user", "assistant", "tool"}
_REASONING = ("reasoning_content", "reasoning")
_KNOWN = {"role", "content", "tool_calls", "tool_call_id", *_REASONING}


class BadCall(ValueError):
    """A call of an agent that cannot be answered; the message is the agent's to read."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


def checked(messages: Any) -> list[Message]:
    """The messages of a call. BadCall: there are none, or one holds something that the model cannot
    read.
    """
    if not isinstance(messages, list) or not messages:
        raise BadCall("messages must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in {*ROLES, "developer"}:
            raise BadCall(f"a message's role must be one of {', '.join(sorted(ROLES))}")
        text_of(message)
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise BadCall("an entry of tool_calls must have function.name")
    return [
        {**message, "role": "system"} if message["role"] == "developer" else dict(message)
        for message in messages
    ]


def text_of(message: Mapping[str, Any]) -> str:
    """The content as one text. BadCall: a part of it is not text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadCall("content must be a text, null, or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadCall(f"the model reads text alone, and content has a part of type {kind!r}")
        texts.append(part["text"])
    return "".join(texts)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The thinking, under either of its names."""
    return next((str(message[name]) for name in _REASONING if message.get(name)), "")


def arguments_of(call: Mapping[str, Any]) -> Any:
    """A call's arguments as a value; the text itself where it is not JSON."""
    text = call["function"].get("arguments", "")
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def identity(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that is equal for messages that say the same; the thinking is not part of it."""
    calls = tuple(
        (call.get("id"), call["function"]["name"], json.dumps(_by_value(arguments_of(call))))
        for call in message.get("tool_calls") or ()
    )
    return message["role"], text_of(message).strip(), calls, message.get("tool_call_id")


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    """The kinds in which two messages of the same `identity` differ; `rewrite`: in their thinking,
    which both have.
    """
    if ours == theirs:
        return set()
    found = set()
    one, other = ours.get("content"), theirs.get("content")
    if one != other:
        if not text_of(ours) and not text_of(theirs):
            found.add("null")
        else:
            if isinstance(one, list) != isinstance(other, list):
                found.add("parts")
            if text_of(ours) != text_of(theirs):
                found.add("whitespace")
    for call, echo in zip(
        ours.get("tool_calls") or (), theirs.get("tool_calls") or (), strict=True
    ):
        if call["function"].get("arguments") != echo["function"].get("arguments"):
            found.add("arguments")
        if call.keys() ^ echo.keys():
            found.add("keys")
    if (ours.keys() ^ theirs.keys()) - _KNOWN:
        found.add("keys")
    if any(ours.get(name) != theirs.get(name) for name in _REASONING):
        found.add("reasoning")
        both = reasoning_of(ours), reasoning_of(theirs)
        if all(both) and both[0].strip() != both[1].strip():
            found.add("rewrite")
    return found


def tolerated(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], allowed: frozenset[str]
) -> set[str] | None:
    """The kinds in which a history differs from the one that was served; None: it is a rewrite."""
    found: set[str] = set()
    for one, other in zip(ours, theirs, strict=True):
        found |= differences(one, other)
    return found if found <= allowed else None


def _by_value(value: Any) -> Any:
    """The same JSON value in one form: keys in order, and whole numbers as integers."""
    if isinstance(value, dict):
        return {key: _by_value(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_by_value(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
