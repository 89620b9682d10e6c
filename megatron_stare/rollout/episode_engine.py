"""An engine over another one: a request is an episode, which asks the engine below many times.

Episodes are coroutines in one thread of their own. What an episode is, the tool engine and the
agent engine say.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from torch import Tensor

from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Engine, Request, SamplingParams

Seed = tuple[int, ...]
Result = TypeVar("Result")


class EpisodeEngine:
    """Implements rollout.engine.Engine over `engine`. A subclass plays an episode in `_play` and
    ends episodes in `_abort`; both run in the thread `name`.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def _play(self, request: Request, params: SamplingParams) -> Rollout:
        raise NotImplementedError

    def _abort(self, seeds: set[Seed] | None) -> None:
        raise NotImplementedError

    @property
    def version(self) -> int:
        """The version of the weights in the engine below."""
        return self.engine.version

    @property
    def sources(self) -> int:
        """The number of ranks on which requests may be submitted."""
        return self.engine.sources

    def submit(self, requests: Sequence[Request], params: SamplingParams) -> list[Future[Rollout]]:
        """One future per episode. A request with a part starts again: the environment or the agent
        of the part no longer exists.
        """
        whole = [dataclasses.replace(request, part=None) for request in requests]
        return [
            asyncio.run_coroutine_threadsafe(self._play(request, params), self._loop)
            for request in whole
        ]

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        """Wait as the engine below does."""
        self.engine.wait(futures)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load weights into the engine below; episodes continue under them."""
        self.engine.load_weights(weights, version)

    def release_memory(self) -> None:
        """Release the memory of the engine below."""
        self.engine.release_memory()

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        """End these episodes, or all: they come back `aborted`, without tokens."""
        seeds = None if requests is None else {request.seed for request in requests}
        self._loop.call_soon_threadsafe(self._abort, seeds)

    def counts(self) -> dict[str, float]:
        """The faults of the engine below."""
        return self.engine.counts()

    @property
    def _running(self) -> bool:
        return self._thread.is_alive()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which runs in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait until they have ended."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)
