"""The environment of an episode, a single-use object that offers tools; the limits of its calls.

An environment is made for one episode from its Prompt, and closed at the episode's end. It has
`tools`, a list of JSON schemas for the chat template, and `call`, which may take any time and raise
any error: `Episode` bounds its time, cuts its output, and turns every failure into a message for
the model. The exception is SandboxError: this machine can run no code, and the run ends. A turn
loop keeps one Episode per rollout, each in a coroutine of its own:

    async with Episode(make(prompt), settings) as episode:
        ... render(messages, tools=episode.tools); generate ...
        for message in await episode.answer(form.read(text, episode.tools)): ...

To add one, write a file with a function or class `make(prompt) -> Environment` and name it by its
dotted path; examples/lookup_environment.py is whole.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from megatron_stare.config import ToolsConfig, callable_at
from megatron_stare.records import Prompt
from megatron_stare.rollout.sandbox.interpreter import CallLost, SandboxError
from megatron_stare.rollout.tools.calls import Tool, ToolCall, check_call

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0


class Environment(Protocol):
    """Used for one episode."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools, as chat templates take them."""
        ...

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text that the model is shown. The arguments fit the tool's schema. ToolError: a
        mistake of the model.
        """
        ...

    async def close(self) -> None:
        """Release the episode's resources; called once, also after a failure."""
        ...


MakeEnvironment = Callable[[Prompt], Environment]


class ToolError(Exception):
    """A tool was used wrongly; the message is the model's to read."""


class CodeError(ToolError):
    """Code of the model failed; the message is its whole output, as the model reads it."""


@dataclass(frozen=True)
class ToolResult:
    """The result of one call. `ok` False: `text` is an error message."""

    text: str
    ok: bool


class _Clock:
    """The time of one call. It stands still while the call waits for a place to run in.

    `passing` is called with 1 when the clock starts, and with -1 when it stops.
    """

    def __init__(
        self, seconds: float, scope: asyncio.Timeout, passing: Callable[[int], None]
    ) -> None:
        self._spent, self._seconds, self._scope, self._passing = 0.0, seconds, scope, passing
        self._since: float | None = None
        self._ended = False

    def go(self) -> None:
        """Start the clock."""
        if self._since is None and not self._ended:
            self._since = time.monotonic()
            left = self._seconds - self._spent
            self._scope.reschedule(asyncio.get_running_loop().time() + left)
            self._passing(1)

    def hold(self) -> None:
        """Stop the clock until `go`."""
        if self._since is not None:
            self._spent += time.monotonic() - self._since
            self._since = None
            self._passing(-1)
            if not self._ended:
                self._scope.reschedule(None)

    def end(self) -> None:
        """Note that the call is over."""
        self._ended = True
        self.hold()


_CLOCK: contextvars.ContextVar[_Clock | None] = contextvars.ContextVar("clock", default=None)


def hold_clock() -> Callable[[], None]:
    """Stop the clock of the current call, for an environment that waits for a place to run in. The
    returned function, called from any thread, starts it again.
    """
    clock, loop = _CLOCK.get(), asyncio.get_running_loop()
    if clock is None:
        return lambda: None
    clock.hold()

    def resume() -> None:
        loop.call_soon_threadsafe(clock.go)

    return resume


class Episode:
    """One environment under the limits of `settings`. The calls of one turn run together;
    nothing here raises for a model's mistake. Beyond max_calls and episode_seconds, which counts
    calls that run at once only once, every call is answered with a message instead.
    """

    def __init__(self, environment: Environment, settings: ToolsConfig) -> None:
        self.environment = environment
        self.settings = settings
        self.tools: tuple[Tool, ...] = tuple(environment.tools)
        self.calls = 0
        self.seconds = 0.0  # in which at least one call ran
        self._running, self._since = 0, 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.environment.close()
        except BaseException as error:  # the episode's result stays valid
            if not is_own_fault(error):
                raise
            log.warning("an environment could not be closed (%s)", words(error))

    async def answer(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result per call, in order. Malformed calls count too. When the calls are used up, the
        first one beyond them gets a message that says so, and the calls after it get nothing.
        """
        left = max(0, self.settings.max_calls - self.calls)
        return await asyncio.gather(*(self._one(call) for call in calls[: left + 1]))

    async def _one(self, call: ToolCall) -> ToolResult:
        self.calls += 1
        text, ok = await self._made(call)
        return ToolResult(cut(text, self.settings.output_characters), ok)

    def _passing(self, more: int) -> None:
        """Note that `more` more calls run from now on."""
        now = time.monotonic()
        self.seconds += now - self._since if self._running else 0.0
        self._running, self._since = self._running + more, now

    async def _made(self, call: ToolCall) -> tuple[str, bool]:
        """The text to show, and whether the call succeeded."""
        settings = self.settings
        left = min(settings.call_seconds, settings.episode_seconds - self.seconds)
        if self.calls > settings.max_calls:
            used = f"all {settings.max_calls} tool calls are used"
            return f"Error: {used}; answer without tools", False
        if left <= 0:
            used = f"the {settings.episode_seconds:g} s for tools are used up"
            return f"Error: {used}; answer without tools", False
        call = check_call(call, self.tools)
        if call.error:
            return call.error, False
        scope = asyncio.timeout(left)
        clock = _Clock(left, scope, self._passing)
        try:
            async with scope:
                clock.go()
                token = _CLOCK.set(clock)
                try:
                    shown = await self.environment.call(call.name, call.arguments)
                finally:
                    _CLOCK.reset(token)
                    clock.end()
            if not isinstance(shown, str):
                raise TypeError(f"it gave {type(shown).__name__}, no text")
            return shown, True
        except CodeError as error:
            return str(error), False
        except ToolError as error:
            return f"Error: {words(error, kind=False)}", False
        except BaseException as error:
            # an environment's own fault ends neither the episode nor the run
            lost = isinstance(error, SandboxError) and not isinstance(error, CallLost)
            if lost or not is_own_fault(error):
                raise
            late = f"gave no answer within {left:.1f} s"
            why = late if scope.expired() else f"failed ({words(error)})"
            return f"Error: {call.name} {why}", False


def is_own_fault(error: BaseException) -> bool:
    """Whether the called code raised this, and not a cancellation of the calling task. SystemExit
    counts: it would end the thread and with it all episodes.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, Exception | SystemExit)


def words(error: BaseException, kind: bool = True) -> str:
    """An error's type and message, also where its own __str__ raises."""
    try:
        message = str(error)
    except Exception:
        message = "its message cannot be shown"
    return f"{type(error).__name__}: {message}" if kind else message


def cut(text: str, characters: int) -> str:
    """At most this many characters, the beginning and the end of the text,
    with a mark between them.
    """
    if len(text) <= characters:
        return text
    tail = characters // 4
    gone = len(text) - characters
    return f"{text[: characters - tail]}\n[{gone} characters cut]\n{text[len(text) - tail :]}"


def find_environment(path: str) -> MakeEnvironment:
    """The callable of a dotted path. UserError: there is none."""
    make: MakeEnvironment = callable_at(
        path,
        "tools.environment",
        "a class or function that takes a Prompt; or python or calculator",
    )
    return make


def function_tool(
    name: str, description: str, properties: dict[str, Any], required: Sequence[str]
) -> Tool:
    """A tool's entry for the chat template. `properties`: a JSON schema for each argument."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
