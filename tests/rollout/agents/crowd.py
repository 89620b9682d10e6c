"""Many sessions at the same time: an engine that answers in the order in which it was asked."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_stare.records import Rollout
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from megatron_stare.rollout.agents.session import AgentSession, Delivery, Node
from megatron_stare.rollout.engine import Request, SamplingParams
from tests.rollout.agents.scripted import PARAMS, Scripted, agents, request

_TICK = 0.002  # seconds between two batches of answers


class Queueing(Scripted):
    """Answers `places` requests at a time, first come, first served; after `hold(n)` none before n
    wait. `answered`: the number of the episode of each answer, in order.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, places: int = 64) -> None:
        super().__init__(tokenizer, lambda *_: "12<|end|>")
        self.together, self.places = 0, places
        self.answered: list[int] = []
        self.queue: deque[tuple[Request, SamplingParams, Future[Rollout]]] = deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _one(self, request: Request, params: SamplingParams) -> Future[Rollout]:
        future: Future[Rollout] = Future()
        self.queue.append((request, params, future))
        return future

    def hold(self, together: int) -> None:
        """Answer nothing until `together` requests wait."""
        self.together = together

    def _serve(self) -> None:
        while not self._stopped.wait(_TICK):
            if len(self.queue) < self.together:
                continue
            self.together = 0
            for _ in range(min(self.places, len(self.queue))):
                request, params, future = self.queue.popleft()
                self.answered.append(request.seed[3])
                future.set_result(super()._one(request, params).result())

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


class Crowd:
    """An engine of agents for `sessions` episodes of `turns` calls at a time, in one host."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sessions: int, turns: int) -> None:
        self.tokenizer, self.sessions, self.turns = tokenizer, sessions, turns
        self.inner = Queueing(tokenizer)
        settings = {"function": "drops", "heartbeat_seconds": 5.0, "episodes_per_host": sessions}
        self.engine: AgentEngine = agents(self.inner, tokenizer, **settings)

    def play(self, drops: bool, turns: int = 0) -> list[Rollout]:
        """Every session's rollout; with `drops`, every second one loses connections. `turns`: other
        than the crowd's.
        """
        turns = turns or self.turns
        asked = [
            request(self.tokenizer, number, turns=turns, drops=drops and number % 2 == 1)
            for number in range(self.sessions)
        ]
        futures = self.engine.submit(asked, PARAMS)
        return [future.result(timeout=300) for future in futures]

    def held(self) -> dict[str, Any]:
        """Resources that episodes take and must give back: sessions, places, running tasks, open
        files of the trainer and of the host, and objects in memory.
        """
        (host,) = self.engine.hosts.hosts
        return {
            "sessions": len(self.engine.endpoint.sessions) + len(self.engine._sessions),
            "episodes": len(self.engine._tasks) + len(host.running),
            "places": self.engine.hosts._places._value,
            "open files": len(os.listdir("/proc/self/fd")),
            "open files of the host": len(os.listdir(f"/proc/{host.process.pid}/fd")),
            "objects": _count(AgentSession, Node, Delivery),
        }

    def held_at_last(self, before: dict[str, Any], seconds: float = 30.0) -> dict[str, Any]:
        """`held`, once it equals `before` or after some seconds: connections close by themselves
        shortly after the last answer. Some of an earlier test may have been open in `before`: fewer
        open files count as equal.
        """
        end = time.monotonic() + seconds
        while (found := self._at_least(before)) != before and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def _at_least(self, before: dict[str, Any]) -> dict[str, Any]:
        found = self.held()
        files = ("open files", "open files of the host")
        return found | {key: max(found[key], before[key]) for key in files}


def _count(*classes: type) -> int:
    gc.collect()
    return sum(type(each) in classes for each in gc.get_objects())
