"""Chat messages as agents send them: brought into one form, compared, and rendered to token ids;
and a turn of the model as a message.

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

A root of the calls is rendered as a whole. A continued call adds the bridge to the tokens so far:
what the template writes between the end of an assistant's turn and the next one.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy
from transformers import PreTrainedTokenizerBase

from megatron_stare.rollout.episodes import THINK, ChatTemplate, TemplateError
from megatron_stare.rollout.tools.calls import Tool, ToolCall, ToolFormat, strict_json

Message = dict[str, Any]
_FORMAT = frozenset({"null", "parts", "whitespace", "arguments", "keys"})
TOLERANCES = {"none": frozenset(), "format": _FORMAT, "format+reasoning": _FORMAT | {"reasoning"}}
ROLES = {"system", "user", "assistant", "tool"}
_REASONING = ("reasoning_content", "reasoning")
_KNOWN = {"role", "content", "tool_calls", "tool_call_id", *_REASONING}
_ARGUMENTS = re.compile(r'"arguments"\s*:')
END_OF_THINK = "</think>"


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
    """A call's arguments as a value; the text itself where it is not JSON that any code can use."""
    text = call["function"].get("arguments", "")
    if not isinstance(text, str):
        return text
    try:
        return strict_json(text)
    except ValueError:
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


def _raw_arguments(body: str) -> str:
    """The arguments in a call's JSON, as the model wrote them; all of the call if it has none."""
    found, whole = _ARGUMENTS.search(body), body.rstrip()
    if found is None or not whole.endswith("}"):
        return body
    return whole[found.end() : -1].lstrip()


def _closing(text: str) -> str:
    """The text that a turn needs before its end; empty: it has left nothing open."""
    _, ended, spoken = text.partition(END_OF_THINK)
    if not ended:
        if text.lstrip().startswith(THINK):
            return f"\n{END_OF_THINK}\n\n"
        spoken = text
    return "</tool_call>" if spoken.rfind("<tool_call>") > spoken.rfind("</tool_call>") else ""


@dataclass(frozen=True)
class Turn:
    """The model's text of one turn."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]  # name, and arguments as text
    malformed: int  # calls that are no JSON: served raw if their name can be read, else as text
    closing: str  # what must be written before the turn's end; empty: nothing is open


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """TemplateError becomes BadCall."""
    try:
        yield
    except TemplateError as error:
        raise BadCall(f"the chat template refuses these messages: {error}") from None


class Renderer:
    """Renders for one tokenizer; `form`: how the model writes calls; `variables`: of the chat
    template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: ToolFormat,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.tokenizer, self.form = tokenizer, form
        self.template = ChatTemplate(tokenizer, variables)
        # More than all_special_ids, which lack ends of a turn such as Llama's <|eom_id|>.
        added = tokenizer.added_tokens_decoder.items()
        self._special = {number for number, token in added if token.special}

    @_refusals()
    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], begin: bool = True
    ) -> numpy.ndarray:
        """The ids of a root; `begin`: with the beginning of the model's turn. BadCall: the template
        refuses these messages.
        """
        plain = [self._plain(message) for message in messages]
        spoken = [m["content"] for m in plain if m["role"] != "assistant"]
        if any(map(self.template.has_special, spoken)):
            pieces, texts = self.template.pieces(plain, tools, begin)
        else:
            pieces, texts = [self.template.text(plain, tools, begin)], []
        return numpy.array(self.template.encoded(pieces, texts), numpy.int32)

    @_refusals()
    def bridge(self, messages: Sequence[Message], last_id: int, closing: str) -> numpy.ndarray:
        """The ids between a turn that ended with `last_id` and the model's next turn. `closing`
        precedes them where the model did not end its turn itself. BadCall, as in `prompt`.
        """
        plain = [self._plain(message) for message in messages]
        return numpy.array(self.template.ids_after_turn(plain, last_id, closing), numpy.int32)

    def turn(
        self,
        ids: Sequence[int],
        prompt: numpy.ndarray,
        stop: Sequence[str],
        tools: Sequence[Tool] = (),
    ) -> Turn:
        """The model's text up to its end of turn or the first stop text. Without `tools` there are
        no calls: text in their form is text, which an agent may read itself.
        """
        ids = list(ids)
        if ids and ids[-1] in self._special:
            ids.pop()
        begun = self.template.begun(prompt)
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        closing = _closing(begun + text)  # the tokens of a stop text stay in the sequence
        cut = min([place for each in stop if (place := text.find(each)) >= 0], default=len(text))
        text, reasoning = begun + text[:cut], ""
        if text.lstrip().startswith(THINK):
            head, _, rest = text.lstrip().removeprefix(THINK).partition(END_OF_THINK)
            reasoning, text = head.strip("\n"), rest.lstrip("\n")
        elif END_OF_THINK in text:  # the template had opened it further back
            reasoning, _, text = text.partition(END_OF_THINK)
            reasoning, text = reasoning.strip("\n"), text.lstrip("\n")
        content, calls, malformed = self._calls(text, tools) if tools else (text, [], 0)
        return Turn(content, reasoning, calls, malformed, closing)

    def _calls(self, text: str, tools: Sequence[Tool]) -> tuple[str, list[tuple[str, str]], int]:
        """Each call by itself: a broken one does not take the others with it."""
        calls: list[tuple[str, str]] = []
        malformed, content, end = 0, "", 0
        for match in self.form.call.finditer(text):
            content += text[end : match.start()]
            end = match.end()
            for call in self._read(match[0], tools):
                malformed += bool(call.error)
                if not call.error:
                    calls.append((call.name, json.dumps(call.arguments)))
                elif call.name:
                    calls.append((call.name, _raw_arguments(match[1] or match[0])))
                else:
                    content += match[0]
        return (content + text[end:]).strip("\n") if calls else text, calls, malformed

    def _read(self, text: str, tools: Sequence[Tool]) -> list[ToolCall]:
        """The calls in a text. A value that is not of its tool's type stays text: the agent's tool
        may say better what it needs.
        """
        calls = self.form.read(text, tools)
        return self.form.read(text, ()) if any(call.error for call in calls) else calls

    def _plain(self, message: Message) -> Message:
        """A message as templates take it: a text, and arguments as values."""
        plain: Message = {"role": message["role"], "content": text_of(message)}
        if reasoning := reasoning_of(message):
            plain["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.get("id"),
                    "function": {"name": call["function"]["name"], "arguments": arguments_of(call)},
                }
                for call in calls
            ]
        for name in ("tool_call_id", "name"):
            if isinstance(message.get(name), str):
                plain[name] = message[name]
        return plain
