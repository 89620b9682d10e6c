"""The common parts of the engines of episodes, with tools or of agents: an engine over another one,
whose requests are episodes, and the tokens of messages by the chat template.

An episode is a coroutine in one thread of its own, and asks the engine below many times. The tokens
of a model's turn are never rendered again: only what follows the turn is. Special tokens in what
users, tools and systems say stay text: only the template can end or open a turn.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import jinja2
import numpy
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.event_loop import EventLoopThread
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Engine, Limits, Request, SamplingParams
from megatron_stare.system import prompt_date

log = logging.getLogger(__name__)

THINK = "<think>"
_TURN, _MARK = "%turn%", "%content{}%"

FAILED = "an episode failed; such are left out of the loss"

Seed = tuple[int, ...]


class EngineFailed(Exception):
    """The engine below raised `cause`: a fault of the system, not of the episode."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


class EpisodeEngine:
    """Implements rollout.engine.Engine over `engine`. A subclass plays an episode in `_play` and
    ends episodes in `_abort`; both run in the thread `name`.
    """

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.engine = engine
        # A copy: a fast tokenizer raises "Already borrowed" where two threads encode with it.
        self.tokenizer = copy.deepcopy(tokenizer)
        self._thread = EventLoopThread(name)
        self._warned: set[str] = set()

    async def _play(self, request: Request, params: SamplingParams) -> Rollout:
        raise NotImplementedError

    async def _abort(self, requests: Sequence[Request] | None) -> None:
        raise NotImplementedError

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def sources(self) -> int:
        return self.engine.sources

    @property
    def limits(self) -> Limits:
        return self.engine.limits

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        """One future per episode. A request with a part starts again: the environment or the agent
        of the part no longer exists.
        """
        whole = [dataclasses.replace(request, part=None) for request in requests]
        return [self._thread.submit(self._play(request, params)) for request in whole]

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        self.engine.wait(futures)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights into the engine below; episodes continue under them."""
        self.engine.load_weights(weights, version)

    def release_memory(self) -> None:
        self.engine.release_memory()

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these episodes, or all: they come back `aborted`, without tokens."""
        # As a coroutine it begins after the episodes that were submitted before it.
        self._thread.submit(self._abort(requests))

    def _warn(
        self, cause: str, counter: str, error: object, fate: str = FAILED, raised: Any = None
    ) -> None:
        """Log the first episode of each cause and its fate; `raised`: with its traceback."""
        if cause not in self._warned:
            self._warned.add(cause)
            text = "%s, and counted as episode/%s; this is the first %s: %s"
            log.warning(text, fate, counter, cause, error, exc_info=raised)

    def counts(self) -> dict[str, float]:
        return self.engine.counts()


class TemplateError(ValueError):
    """The template cannot write some messages; the text says why."""


class ChatTemplate:
    """The chat template of one tokenizer; `variables`: those that the user sets in it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.tokenizer, self.variables = tokenizer, variables
        # A text with none of these has no special token. One that is compared with normalised text
        # counts as in every text.
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special = ["" if token.normalized else token.content for token in added]

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), begin: bool = True
    ) -> str:
        """The messages as text; `begin`: with the beginning of the model's turn. TemplateError."""
        try:
            found = self.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=begin,
                **{"strftime_now": prompt_date, **self.variables},
            )
            return _readable(str(found))
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise TemplateError(first) from None

    def pieces(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), begin: bool = True
    ) -> tuple[list[str], list[str]]:
        """The template's text before, between and after what users, tools and systems say, and what
        they say, as the template writes it. TemplateError.
        """
        return _pieces(lambda some: self.text(some, tools, begin), messages)

    def pieces_after_turn(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[str], list[str]]:
        """As `pieces`, from the end of a model's turn to the beginning of its next one."""
        before = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _TURN}]

        def after(some: Sequence[Mapping[str, Any]]) -> str:
            text = self.text([*before, *some])
            if text.count(_TURN) != 1 + sum(str(each["content"]).count(_TURN) for each in some):
                raise TemplateError("it leaves out or repeats a turn of the model")
            return text.partition(_TURN)[2]

        return _pieces(after, messages)

    def ids_after_turn(
        self, messages: Sequence[Mapping[str, Any]], last_id: int, closing: str = ""
    ) -> list[int]:
        """The ids between a turn that ended with `last_id` and the model's next turn. `closing`
        precedes them where the model did not end its turn itself. TemplateError.
        """
        pieces, said = self.pieces_after_turn(messages)
        ended = self.tokenizer.decode([last_id], skip_special_tokens=False)
        if pieces[0].startswith(ended):
            pieces[0] = pieces[0].removeprefix(ended)
        else:
            pieces[0] = closing + pieces[0]
        return self.encoded(pieces, said)

    def begun(self, before: numpy.ndarray) -> str:
        """The beginning of a turn that the template wrote, which the ids before the turn end with:
        that of a thought, or nothing.
        """
        end = self.tokenizer.decode(before[-8:].tolist(), skip_special_tokens=False)
        return f"{THINK}\n" if end.rstrip().endswith(THINK) else ""

    def encoded(self, pieces: Sequence[str], said: Sequence[str]) -> list[int]:
        """The ids of the template's pieces, and between them of what others say: as of one text,
        as a server reads it, unless a special token in what they say has to stay text.
        """
        if not any(map(self.has_special, said)):
            pieces, said = [_joined(pieces, said)], []
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            piece = _readable(piece)
            ids += self.tokenizer.encode(piece, add_special_tokens=False) if piece else []
            ids += self.as_text(said[place]) if place < len(said) and said[place] else []
        return ids

    def as_text(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are text."""
        found: list[int] = self.tokenizer.encode(
            _readable(text), add_special_tokens=False, split_special_tokens=True
        )
        return found

    def has_special(self, text: str) -> bool:
        """Whether special tokens of the text would not stay text."""
        if not any(each in text for each in self._special):
            return False
        ids = self.tokenizer.encode(_readable(text), add_special_tokens=False)
        return bool(ids != self.as_text(text))


def _readable(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which tokenizers refuse."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _pieces(
    write: Callable[[Sequence[Mapping[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """The pieces of `write` around what users, tools and systems say, and what it makes of that:
    some templates remove white space around a text, and Llama 3 writes a tool's result as JSON.
    """
    places = [n for n, message in enumerate(messages) if message["role"] != "assistant"]
    said = [str(messages[place]["content"]) for place in places]
    marks = [_MARK.format(number) for number in range(len(said))]
    marked = list(messages)
    for place, mark in zip(places, marks, strict=True):
        marked[place] = {**messages[place], "content": mark}
    pieces = _split(write(marked), marks)
    if write(messages) == _readable(_joined(pieces, said)):
        return pieces, said
    for number, place in enumerate(places):  # each alone: one text cannot pose as a later piece
        alone = write([*marked[:place], messages[place], *marked[place + 1 :]])
        before = _joined(pieces[: number + 1], marks[:number])
        after = _joined(pieces[number + 1 :], marks[number + 1 :])
        if alone.startswith(before) and alone.removeprefix(before).endswith(after):
            said[number] = alone[len(before) : len(alone) - len(after)]
    return pieces, said


def _joined(pieces: Sequence[str], between: Sequence[str]) -> str:
    """The pieces with texts between them."""
    return "".join(map("".join, itertools.zip_longest(pieces, between, fillvalue="")))


def _split(text: str, marks: Sequence[str]) -> list[str]:
    pieces = re.split("|".join(map(re.escape, marks)), text) if marks else [text]
    if len(pieces) != len(marks) + 1:
        raise TemplateError("it leaves out or repeats a message")
    return pieces
