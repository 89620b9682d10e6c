"""Episodes of any agent, on top of any rollout engine; itself an engine.

    request -> session with a key -> agent in a host process -> its model calls through the endpoint
            -> tree of calls -> one rollout of one or several sequences, with the outcome

The engine below answers each call from token ids. New weights do not end a call: its client waits.
An episode that fails for a reason that is not the model's (a host that dies, an agent that raises,
a reward that is not a number) has no loss token and no reward, and is counted by its cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stare.config import AgentsConfig
from megatron_stare.event_loop import cancel
from megatron_stare.records import Rollout, Status
from megatron_stare.rollout.agents.endpoint import Endpoint
from megatron_stare.rollout.agents.hosts import HostLost, Hosts
from megatron_stare.rollout.agents.messages import Renderer
from megatron_stare.rollout.agents.session import AgentSession
from megatron_stare.rollout.engine import Engine, Request, SamplingParams
from megatron_stare.rollout.episodes import EpisodeEngine, Seed
from megatron_stare.rollout.tools.calls import FORMATS
from megatron_stare.system import raise_file_limit

TRIES = 2  # an episode whose host dies is begun once more
WORK_SECONDS = 1.0  # between two looks whether an agent works


class AgentEngine(EpisodeEngine):
    """Episodes of agents. Close it at the end."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        settings: AgentsConfig,
        context_length: int,
        variables: Mapping[str, Any] = MappingProxyType({}),
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """`variables`: of the chat template. `moved` shows a watchdog that a wait is no hang: while
        `wait` lasts and an agent works between its calls, which agents.max_seconds bounds.
        """
        super().__init__(engine, tokenizer, "agent-engine")
        self.settings, self.context_length, self.moved = settings, context_length, moved
        self._sessions: dict[Seed, AgentSession] = {}
        self._tasks: dict[Seed, asyncio.Task[Any]] = {}
        self._awaited = False
        try:
            self.renderer = Renderer(self.tokenizer, FORMATS[settings.format], variables)
            self._thread.run(self._start())
        except BaseException:
            self._thread.stop()
            raise

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        self._awaited = True
        try:
            super().wait(futures)
        finally:
            self._awaited = False

    def counts(self) -> dict[str, float]:
        """The faults of the engine below, and those of hosts and keys."""
        own = {f"agents/{name}": float(n) for name, n in self.endpoint.counts.items()}
        return self.engine.counts() | own | {"agents/host_restarts": float(self.hosts.restarts)}

    def close(self) -> None:
        """End the episodes, the hosts, the endpoint and the engine below."""
        if self._thread.running:
            self._thread.run(self._end())
            self._thread.stop()
        self.engine.close()

    # --- in the thread
    # ----------------------------------------------------------------------------------------------

    async def _abort(self, requests: Sequence[Request] | None) -> None:
        seeds = None if requests is None else {request.seed for request in requests}
        for seed, session in self._sessions.items():
            if (seeds is None or seed in seeds) and not session.closed:
                if in_flight := session.end("aborted"):
                    self.engine.abort(in_flight)
                self._tasks[seed].cancel()

    async def _start(self) -> None:
        raise_file_limit()  # each call in flight is a connection
        self.endpoint = Endpoint(self.settings.heartbeat_seconds, self.context_length)
        self.hosts = Hosts(self.settings)
        await self.endpoint.start(self.settings.address, self.settings.port)
        try:
            await self.hosts.start()
        except BaseException:
            await self.hosts.close()
            await self.endpoint.close()
            raise
        self._work = asyncio.create_task(self._note_work())

    async def _note_work(self) -> None:
        while True:
            await asyncio.sleep(WORK_SECONDS)
            calling = sum(session.calling for session in self._sessions.values())
            if self._awaited and self.hosts.running > calling:
                self.moved()

    async def _end(self) -> None:
        await cancel(self._tasks.values())
        await self.hosts.close()
        await self.endpoint.close()

    async def _play(self, request: Request, params: SamplingParams) -> Rollout:
        """The episode's rollout. A host that dies costs a try; the engine's error is raised."""
        for attempt in range(TRIES):
            session = AgentSession(
                self.engine, self.renderer, self.settings, request, params, self.context_length
            )
            self.endpoint.open(session)
            self._sessions[request.seed] = session
            play = asyncio.ensure_future(self._outcome(session, attempt))
            self._tasks[request.seed] = play
            try:
                outcome = await play
            except asyncio.CancelledError:
                return Rollout.inserted((), "aborted", self.version)
            except HostLost as error:
                if attempt + 1 < TRIES:
                    continue
                outcome = {"failed": "host", "message": str(error)}
            finally:
                if in_flight := session.end():
                    self.engine.abort(in_flight)
                self.endpoint.forget(session)
                self._sessions.pop(request.seed, None)
                self._tasks.pop(request.seed, None)
            if session.failure is not None:
                raise session.failure
            if session.refused:
                fate = "an engine takes fewer tokens than the model; such an episode ends"
                self._warn("prompt", "ended/context", session.refused, fate)
            return self._finished(session, outcome)
        raise AssertionError("the last try returns")

    async def _outcome(self, session: AgentSession, attempt: int) -> dict[str, Any]:
        """The host's result of the episode; at agents.max_seconds the agent is stopped."""
        prompt = session.request.prompt
        assert prompt is not None, "an episode's request names its prompt"
        asked = [{"role": "user", "content": prompt.text}]  # of a row that is plain text
        episode = {
            "row": {
                "index": prompt.index,
                "prompt": prompt.text,
                "messages": list(prompt.messages) or asked,
                "tools": list(prompt.tools),
                "label": prompt.label,
                "metadata": prompt.metadata,
            },
            "endpoint": {
                "base_url": f"{self.endpoint.url}/v1",
                "api_key": session.key,
                "model": "policy",
                "context_length": self.context_length,
            },
            "attempt": attempt,
        }

        def late() -> None:
            session.ended = session.ended or "agents.max_seconds"

        outcome = await self.hosts.run(episode, self.settings.max_seconds, late)
        return {"reward": None} if outcome is None else outcome

    def _finished(self, session: AgentSession, outcome: dict[str, Any]) -> Rollout:
        """The rollout of an episode that ended, as its outcome says."""
        cut = session.ended or outcome.get("truncated") is True
        status: Status = "truncated" if cut else "completed"
        if session.given_up:
            outcome = {"failed": "invalid_answer", "message": "no server could sample an answer"}
        reward, failed = _reward_of(outcome)
        if failed and session.ended and "reward" not in outcome:
            failed = ""  # the agent met the limit; verifiers may still judge its last answer
        counts = _numbers(outcome.get("metrics"))
        if session.ended:
            counts[f"ended/{session.ended.removeprefix('agents.')}"] = 1.0
        try:
            rollout = session.rollout(counts, status=status, outcome=reward)
        except ValueError:
            failed = failed or "no_call"
            empty = Rollout.inserted((), "truncated", self.version)
            rollout = dataclasses.replace(empty, episode=counts)
        if failed:
            self._warn(failed, f"failed/{failed}", outcome.get("message") or outcome)
            marked = rollout.episode | {"errors": 1.0, f"failed/{failed}": 1.0}
            rollout = rollout.without_loss(status="truncated", outcome=None, episode=marked)
        return rollout


def _reward_of(outcome: dict[str, Any]) -> tuple[float | None, str]:
    """The reward (None: the agent gave none) and the reason why the episode failed ("": it did
    not).
    """
    if cause := outcome.get("failed"):
        return None, str(cause)
    if outcome.get("reward") is None:
        return None, ""
    reward = _number(outcome["reward"])
    return reward, "reward" if reward is None else ""


def _numbers(metrics: Any) -> dict[str, float]:
    found = metrics if isinstance(metrics, dict) else {}
    numbers = {f"agent/{name}": _number(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _number(value: Any) -> float | None:
    """A finite number; None: it is none."""
    with contextlib.suppress(OverflowError):  # an integer beyond all floats
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None
