"""Messages to token ids by the chat template, and a model's turn to a message.

A root is rendered as a whole. A continued call adds the bridge to the tokens so far: what the
template writes between the end of an assistant's turn and the next one. Special tokens in what
users and tools say stay text: only the template can end or open a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jinja2
import numpy
from transformers import PreTrainedTokenizerBase

from megatron_stare.rollout.agents.messages import (
    BadCall,
    Message,
    arguments_of,
    reasoning_of,
    text_of,
)
from megatron_stare.rollout.tools.calls import Tool, ToolFormat
from megatron_stare.rollout.tools.engine import readable

_TURN, _MARK = "%turn%", "%content{}%"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_RAW_ARGUMENTS = re.compile(r'"arguments"\s*:\s*(.*)\}\s*\Z', re.DOTALL)
THINK, END_OF_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Turn:
    """The model's text of one turn."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]  # name, and arguments as text
    malformed: int  # calls that are no JSON: served raw if their name can be read, else as text
    closing: str  # what must be written before the turn's end; empty: nothing is open


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
        self.tokenizer, self.form, self.variables = tokenizer, form, variables
        self._special = {*tokenizer.all_special_ids}

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], begin: bool = True
    ) -> numpy.ndarray:
        """The ids of a root; `begin`: with the beginning of the model's turn. BadCall: the template
        refuses these messages.
        """
        plain = [self._plain(message) for message in messages]
        spoken = [m["content"] for m in plain if m["role"] != "assistant"]
        if not any(map(self._has_special, spoken)):
            return self._encoded([self._rendered(plain, tools, begin)], [])
        marked, texts = _marked(plain)
        text = self._rendered(marked, tools, begin)
        return self._encoded(_pieces(text, len(texts)), texts)

    def bridge(self, messages: Sequence[Message], last_id: int, closing: str) -> numpy.ndarray:
        """The ids between a turn that ended with `last_id` and the model's next turn."""
        marked, texts = _marked([self._plain(message) for message in messages])
        before = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _TURN}]
        text = self._rendered([*before, *marked], ())
        pieces = _pieces(text[text.index(_TURN) + len(_TURN) :], len(texts))
        ended = self.tokenizer.decode([last_id], skip_special_tokens=False)
        if pieces[0].startswith(ended):
            pieces[0] = pieces[0].removeprefix(ended)  # the model ended its turn itself
        else:
            pieces[0] = closing + pieces[0]
        return self._encoded(pieces, texts)

    def turn(self, ids: Sequence[int], prompt: numpy.ndarray, stop: Sequence[str]) -> Turn:
        """The model's text up to its end of turn or the first stop text."""
        ids = list(ids)
        if ids and ids[-1] in self._special:
            ids.pop()
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        begun = self.tokenizer.decode(prompt[-8:].tolist(), skip_special_tokens=False)
        thinking = begun.rstrip().endswith(THINK)
        if thinking:
            text = THINK + text
        cut = min([place for each in stop if (place := text.find(each)) >= 0], default=len(text))
        text, reasoning, closing = text[:cut], "", ""
        if text.lstrip().startswith(THINK):
            head, ended, rest = text.lstrip().removeprefix(THINK).partition(END_OF_THINK)
            reasoning, text = head.strip("\n"), rest.lstrip("\n")
            closing = "" if ended else f"\n{END_OF_THINK}\n\n"
        elif END_OF_THINK in text:  # the template had opened it further back
            reasoning, _, text = text.partition(END_OF_THINK)
            reasoning, text = reasoning.strip("\n"), text.lstrip("\n")
        content, calls, malformed = self._calls(text)
        if text.rfind("<tool_call>") > text.rfind("</tool_call>"):
            closing += "</tool_call>"
        return Turn(content, reasoning, calls, malformed, closing)

    def _calls(self, text: str) -> tuple[str, list[tuple[str, str]], int]:
        """Each call by itself: a broken one does not take the others with it."""
        calls: list[tuple[str, str]] = []
        malformed, content, end = 0, "", 0
        for match in _CALL.finditer(text):
            content += text[end : match.start()]
            end = match.end()
            for call in self.form.read(match[0], ()):
                malformed += bool(call.error)
                if not call.error:
                    calls.append((call.name, json.dumps(call.arguments)))
                elif call.name:
                    raw = _RAW_ARGUMENTS.search(match[1])
                    calls.append((call.name, raw[1] if raw else match[1]))
                else:
                    content += match[0]
        return (content + text[end:]).strip("\n") if calls else text, calls, malformed

    def _plain(self, message: Message) -> Message:
        """A message as templates take it: a text, and arguments as values."""
        plain: Message = {"role": message["role"], "content": readable(text_of(message))}
        if reasoning := reasoning_of(message):
            plain["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.get("id"),
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": arguments_of(call),
                    },
                }
                for call in calls
            ]
        for name in ("tool_call_id", "name"):
            if isinstance(message.get(name), str):
                plain[name] = message[name]
        return plain

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], begin: bool = True
    ) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=begin,
                    **self.variables,
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadCall(f"the chat template refuses these messages: {first}") from None

    def _has_special(self, text: str) -> bool:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids != self._as_text(text)

    def _as_text(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        return found

    def _encoded(self, pieces: Sequence[str], texts: Sequence[str]) -> numpy.ndarray:
        """The template's pieces, and between them what others said."""
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            ids += self.tokenizer.encode(piece, add_special_tokens=False) if piece else []
            ids += self._as_text(texts[place]) if place < len(texts) and texts[place] else []
        return numpy.array(ids, numpy.int32)


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The messages with marks for what users, tools and systems say, and what they say."""
    marked, texts = [], []
    for message in messages:
        if message["role"] != "assistant":
            texts.append(message["content"])
            message = {**message, "content": _MARK.format(len(texts) - 1)}
        marked.append(message)
    return marked, texts


def _pieces(text: str, count: int) -> list[str]:
    marks = [re.escape(_MARK.format(number)) for number in range(count)]
    pieces = re.split("|".join(marks), text) if marks else [text]
    if len(pieces) != count + 1:
        raise BadCall("the chat template leaves out or repeats one of these messages")
    return pieces
