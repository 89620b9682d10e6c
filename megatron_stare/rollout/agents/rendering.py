"""Messages to token ids by the chat template, and a model's turn to a message.

A root is rendered as a whole. A continued call adds the bridge to the tokens so far: what the
template writes between the end of an assistant's turn and the next one. Special tokens in what
users and tools say stay text: only the template can end or open a turn.
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

from megatron_stare.rollout.agents.messages import (
    BadCall,
    Message,
    arguments_of,
    reasoning_of,
    text_of,
)
from megatron_stare.rollout.episodes import ChatTemplate, TemplateError, readable
from megatron_stare.rollout.tools.calls import CALL, Tool, ToolFormat

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
        self._special = {*tokenizer.all_special_ids}

    @_refusals()
    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], begin: bool = True
    ) -> numpy.ndarray:
        """The ids of a root; `begin`: with the beginning of the model's turn. BadCall: the template
        refuses these messages.
        """
        plain = [self._plain(message) for message in messages]
        spoken = [m["content"] for m in plain if m["role"] != "assistant"]
        if any(map(self._has_special, spoken)):
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
        for match in CALL.finditer(text):
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

    def _has_special(self, text: str) -> bool:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids != self.template.as_text(text)
