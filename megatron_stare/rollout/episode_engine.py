"""An engine over another one: a request is an episode, which asks the engine below many times.

Episodes are coroutines in one thread of their own. What an episode is, the tool engine and the
agent engine say.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_stare.event_loop import EventLoopThread
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import Engine, Request, SamplingParams

log = logging.getLogger(__name__)

Seed = tuple[int, ...]


def own_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy for the thread of episodes. A fast tokenizer raises "Already borrowed" where two
    threads encode with it at the same time.
    """
    return copy.deepcopy(tokenizer)


class EngineFailed(Exception):
    """The engine below raised `cause`: a fault of the system, not of the episode."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


class EpisodeEngine:
    """Implements rollout.engine.Engine over `engine`. A subclass plays an episode in `_play` and
    ends episodes in `_abort`; both run in the thread `name`.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self._thread = EventLoopThread(name)
        self._warned: set[str] = set()

    async def _play(self, request: Request, params: SamplingParams) -> Rollout:
        raise NotImplementedError

    def _abort(self, seeds: set[Seed] | None) -> None:
        raise NotImplementedError

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def sources(self) -> int:
        return self.engine.sources

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
        seeds = None if requests is None else {request.seed for request in requests}
        self._thread.loop.call_soon_threadsafe(self._abort, seeds)

    def _warn(self, cause: str, counter: str, error: object, raised: Any = None) -> None:
        """Log the first failed episode of each cause; `raised`: with its traceback."""
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning(
                "an episode failed; such are left out of the loss and counted as episode/%s, and "
                "this is the first %s: %s",
                counter,
                cause,
                error,
                exc_info=raised,
            )

    def counts(self) -> dict[str, float]:
        return self.engine.counts()
