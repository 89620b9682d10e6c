"""Multi-turn rollouts with tools, on top of any engine; itself an engine.

    generate a turn -> read its tool calls -> run them together -> append the results as tokens ->
    the next turn

A request is one episode, in a coroutine of its own, on an environment made from its prompt. The
engine below continues the tokens so far (Request.part), so all turns are one rollout: the sampled
tokens with the versions of their weights, and tool results with loss mask 0 and log-prob 0.

An episode ends with a turn without a call, or at tools.max_turns, at the response's length, at
tools.max_seconds. With tools.filter_void_turns it also ends at a void turn, one with neither a call
nor an answer, and none of its tokens count in the loss (SimpleTIR, arXiv 2509.02479).

An error in an episode's own code (the environment, reading a turn, writing a result) ends that
episode and no other, in one place, `_play`: its rollout has the tokens so far, masked out of the
loss, and is counted as `errors`. Only errors of the engine below, and SandboxError (no machine to
run code on), end the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import numpy
import regex
from transformers import PreTrainedTokenizerBase

from megatron_stare.config import ToolsConfig, UserError
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Engine, Request, SamplingParams
from megatron_stare.rollout.episodes import (
    ChatTemplate,
    EngineFailed,
    EpisodeEngine,
    Seed,
    TemplateError,
)
from megatron_stare.rollout.sandbox.interpreter import SandboxError
from megatron_stare.rollout.tools.calls import FORMATS, ToolCall
from megatron_stare.rollout.tools.environment import Episode, MakeEnvironment, is_own_fault, words

# For tools.answer_pattern in one turn: a pattern may take exponential time on a text of a model's.
PATTERN_SECONDS = 1.0


class ToolEngine(EpisodeEngine):
    """Multi-turn episodes with tools. `make` gives each prompt its environment; `release` is called
    at the end, for what the environments share. `variables`: of the chat template.
    """

    def __init__(
        self,
        engine: Engine,
        make: MakeEnvironment,
        tokenizer: PreTrainedTokenizerBase,
        settings: ToolsConfig,
        release: Callable[[], None] = lambda: None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(engine, tokenizer, "tool-engine")
        self.make, self.settings, self.release = make, settings, release
        self.form = FORMATS[settings.format]
        self.answer = _compiled(settings.answer_pattern)
        self.messages = ToolMessages(self.tokenizer, settings.response, variables)
        # Texts that end a turn, in which the results then stand.
        self.stops = self.form.stop_strings if settings.response else ()
        self._active: set[Seed] = set()
        self._aborted: set[Seed] = set()
        self._outbox: list[tuple[Request, SamplingParams, asyncio.Future[Future[Rollout]]]] = []

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        stop = (*params.stop, *self.stops)
        return super().submit(requests, dataclasses.replace(params, stop=stop))

    def close(self) -> None:
        """End the episodes, the engine, and what the environments share."""
        self._thread.stop()
        self.engine.close()
        self.release()

    # --- in the thread
    # ----------------------------------------------------------------------------------------------

    async def _abort(self, requests: Sequence[Request] | None) -> None:
        named = self._active if requests is None else {request.seed for request in requests}
        self._aborted |= self._active & named
        self._send()  # the engine below can only end what it has
        self.engine.abort(requests)

    async def _play(self, request: Request, params: SamplingParams) -> Rollout:
        assert request.prompt is not None, "an episode's request names its prompt"
        self._active.add(request.seed)
        trajectory = _Trajectory(self, request, params)
        try:
            async with Episode(self.make(request.prompt), self.settings) as episode:
                return await trajectory.play(episode)
        except EngineFailed as error:
            raise error.cause from None
        except BaseException as error:
            # Before a model wrote anything a UserError is about the settings.
            settings = isinstance(error, UserError) and not trajectory.counts["turns"]
            if settings or isinstance(error, SandboxError) or not is_own_fault(error):
                raise
            self._warn(type(error).__name__, "errors", words(error), raised=error)
            return trajectory.broken()
        finally:
            self._active.discard(request.seed)
            self._aborted.discard(request.seed)

    async def generate(self, request: Request, params: SamplingParams) -> Rollout:
        """The rollout of one turn. Turns requested at the same moment are submitted together."""
        if request.seed in self._aborted:
            return Rollout.inserted((), "aborted", self.version)
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[Future[Rollout]] = loop.create_future()
        self._outbox.append((request, params, sent))
        if len(self._outbox) == 1:
            loop.call_soon(self._send)
        try:
            return await asyncio.wrap_future(await sent)
        except UserError:  # about this turn, or about another one that was submitted with it
            return await self._alone(request, params)
        except Exception as error:
            raise EngineFailed(error) from error

    async def _alone(self, request: Request, params: SamplingParams) -> Rollout:
        """The rollout of one turn, whose submission with others was refused."""
        try:
            (future,) = self.engine.submit([request], params)
            return await asyncio.wrap_future(future)
        except Exception as error:
            raise EngineFailed(error) from error

    def _send(self) -> None:
        outbox = [entry for entry in self._outbox if not entry[2].cancelled()]
        self._outbox = []
        for params in dict.fromkeys(params for _, params, _ in outbox):
            alike = [(request, sent) for request, own, sent in outbox if own == params]
            try:
                futures = self.engine.submit([request for request, _ in alike], params)
            except Exception as error:
                for _, sent in alike:
                    sent.set_exception(error)
                continue
            for (_, sent), future in zip(alike, futures, strict=True):
                sent.set_result(future)


class _Trajectory:
    """One episode's tokens, turn by turn."""

    def __init__(self, engine: ToolEngine, request: Request, params: SamplingParams) -> None:
        self.engine, self.request, self.params = engine, request, params
        self.rollout = Rollout.inserted((), "truncated", engine.version)
        self.texts: list[str] = []
        self.counts = {
            "turns": 0.0,
            "tool_calls": 0.0,
            "tool_errors": 0.0,
            "void": 0.0,
            "unfinished": 0.0,
            "errors": 0.0,
        }

    async def play(self, episode: Episode) -> Rollout:
        settings = self.engine.settings
        part: Rollout | None = None
        began = 0.0  # the end of the first turn, which may wait long for a server
        begin = 0  # of the turn
        while True:
            try:
                rollout = await self.engine.generate(
                    dataclasses.replace(self.request, part=part), self.params
                )
            except EngineFailed as error:
                if part is None or not isinstance(error.cause, UserError):
                    raise
                # Servers may read fewer tokens than a response may have.
                return self._unfinished(self.rollout)
            if rollout.status == "aborted":
                return Rollout.inserted((), "aborted", rollout.weight_version)
            self.rollout, began = rollout, began or time.monotonic()
            ids = rollout.response_ids[begin:].tolist()
            text = self._text(ids, rollout.response_ids[:begin])
            calls = self.engine.form.read(text, episode.tools)
            if rollout.status == "completed" and not calls and self._continues(ids):
                part = dataclasses.replace(rollout, status="aborted")
                if rollout.length < self.params.max_new_tokens:
                    continue
                rollout = dataclasses.replace(rollout, status="truncated")
            self._count(ids, text, calls)
            if (
                rollout.status == "truncated"
                or not calls
                or (self.counts["void"] and settings.filter_void_turns)
            ):
                return self._finished(rollout)
            if (
                self.counts["turns"] >= settings.max_turns
                or time.monotonic() - began > settings.max_seconds
            ):
                return self._unfinished(rollout)
            answers = await episode.answer(calls)
            self.counts["tool_calls"] += len(answers)
            self.counts["tool_errors"] += sum(not answer.ok for answer in answers)
            results = self.engine.messages.ids(
                [answer.text for answer in answers], int(rollout.response_ids[-1])
            )
            if rollout.length + len(results) >= self.params.max_new_tokens:
                return self._unfinished(rollout)
            inserted = Rollout.inserted(results, "aborted", rollout.weight_version)
            part = rollout.continued(dataclasses.replace(inserted, server=rollout.server))
            begin = part.length

    def _text(self, ids: list[int], before: numpy.ndarray) -> str:
        """A turn's text after the ids `before` it; a thought that the template began is one."""
        known = before if len(before) else self.request.prompt_ids
        begun = self.engine.messages.template.begun(known)
        return begun + self.engine.tokenizer.decode(ids, skip_special_tokens=False)

    def _continues(self, ids: list[int]) -> bool:
        """Whether a stop text of the format, and nothing else, has ended a turn without a call: it
        ended a block of other text, or stood in a thought.
        """
        stops, decode = self.engine.stops, self.engine.tokenizer.decode
        if not stops:
            return False
        whole, before = (decode(part, skip_special_tokens=False) for part in (ids, ids[:-1]))
        last = [whole[max(0, len(before) - len(stop) + 1) :] for stop in self.params.stop]
        ended = {stop for stop, text in zip(self.params.stop, last, strict=True) if stop in text}
        return bool(ended) and ended <= {*stops}

    def _count(self, ids: list[int], text: str, calls: Sequence[ToolCall]) -> None:
        """Note a turn and its calls."""
        skip = self.params.skip_special_tokens
        self.texts.append(self.engine.tokenizer.decode(ids, skip_special_tokens=skip))
        self.counts["turns"] += 1
        answered = self.engine.answer.search(text, timeout=PATTERN_SECONDS) is not None
        self.counts["void"] += float(not answered and all(call.error for call in calls))

    def broken(self) -> Rollout:
        """The tokens so far of an episode that ended in an error, without loss tokens."""
        self.counts["errors"] = 1.0
        return self.rollout.without_loss(
            status="truncated", text="\n".join(self.texts), episode=dict(self.counts)
        )

    def _unfinished(self, rollout: Rollout) -> Rollout:
        """The rollout of an episode that ended at a limit with a call unanswered: truncated, like a
        response that ran out of tokens.
        """
        self.counts["unfinished"] = 1.0
        return self._finished(dataclasses.replace(rollout, status="truncated"))

    def _finished(self, rollout: Rollout) -> Rollout:
        """The rollout with the model's own text; without loss tokens if a void turn filters it."""
        void = self.counts["void"] > 0 and self.engine.settings.filter_void_turns
        found = dataclasses.replace(rollout, text="\n".join(self.texts), episode=dict(self.counts))
        return found.without_loss() if void else found


def _compiled(pattern: str) -> regex.Pattern[str]:
    """tools.answer_pattern; the package `regex`, because its searches can be given a time."""
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise UserError(
            f"tools.answer_pattern={pattern!r} is not a regular expression ({error}); correct it"
        ) from None


class ToolMessages:
    """Results as tokens. `response` is the user's template, with `{output}`; empty: the chat
    template's role `tool`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        response: str = "",
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.template, self.response = ChatTemplate(tokenizer, variables), response
        if response and "{output}" not in response:
            raise UserError(
                f"tools.response={response!r} has no {{output}}; write where a tool's result goes"
            )
        self._one_message = False
        if response:
            return
        try:
            self.template.pieces_after_turn(_results([""]))
        except TemplateError as error:
            raise UserError(
                f"the chat template cannot write a tool's result ({error}); set tools.response, "
                "for example '<tool_response>{output}</tool_response>'"
            ) from None
        try:
            self.template.pieces_after_turn(_results(["", ""]))
        except TemplateError:  # one that takes no second result in a row gets all in one
            self._one_message = True

    def ids(self, outputs: Sequence[str], last_id: int) -> tuple[int, ...]:
        """The tokens that follow a turn which ended with `last_id`, up to the model's next turn."""
        if self._one_message:
            outputs = ["\n\n".join(outputs)]
        if not self.response:
            return tuple(self.template.ids_after_turn(_results(outputs), last_id))
        before, after = self.response.split("{output}", 1)
        pieces = [before, *[after + before] * (len(outputs) - 1), after]
        return tuple(self.template.encoded(pieces, outputs))


def _results(outputs: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "tool", "content": output} for output in outputs]
