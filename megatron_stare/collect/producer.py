"""Rollouts without end, beside the training:
as one prompt is finished the next is begun, within a bound on their age.

    drawn -> begun on a share (shares.py) -> judged -> ready -> taken by a step

No more than `limit` prompts are between drawn and taken, so that (rollout.max_staleness + 1)
batches in the pipe are each taken before they are too old. What is older than rollout.max_staleness
anyway is forgotten by rule and counted: a ready group is dropped, a rollout in flight is ended and
sampled again. Runs on rank 0, over the shares of all ranks; of what other ranks hold it knows the
outlines.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from megatron_stare.collect.collect import is_wanted, too_few
from megatron_stare.collect.rollout_worker import PartialState, RolloutWorkers, running_future
from megatron_stare.config import Config, EngineError, NoSignalError
from megatron_stare.data.prompts import PromptStream
from megatron_stare.records import Group, Prompt


class Taken(NamedTuple):
    """The groups to train on, and all that were judged since the last time."""

    chosen: list[Group]
    judged: list[Group]


class Producer:
    """Everything between the stream of prompts and the batch.

    `limit` prompts at most are begun or ready; 0 stops the beginning of new ones.
    """

    def __init__(self, config: Config, stream: PromptStream, workers: RolloutWorkers) -> None:
        self.config, self.stream = config, stream
        self.workers = workers.own
        self._partial: Mapping[int, PartialState] = {}  # of earlier attempts, by prompt index
        self.step, self.limit = 0, 0
        self._dropped = 0
        self._restored: list[int] = []  # of an earlier life, to be begun first
        self._begun: set[int] = set()  # indices of prompts whose groups are not there
        self._ready: list[Group] = []
        self._judged: list[Group] = []  # since the last `take`: with and without signal
        self._lock = threading.RLock()
        self._waiting: list[tuple[Callable[[], bool], Future[None]]] = []
        self._failure: BaseException | None = None

    def advance(self, step: int, limit: int) -> None:
        """The trainer is at `step`: forget what is too old for it,
        and fill up to `limit` prompts.
        """
        with self._lock:
            self.step, self.limit = step, limit
            for worker in self.workers:
                worker.set_step(step)
            old = [group for group in self._ready if group.oldest_version < self._oldest]
            self._dropped += len(old)
            self._ready = [group for group in self._ready if group.oldest_version >= self._oldest]
            restored, self._restored = self._restored, []
            self._begin([self.stream.at(index) for index in restored])
            self._partial = {}
            self._fill()

    def enough(self, count: int) -> Future[None]:
        """Done when `take(count)` gives a batch, or cannot any more;
        failed where sampling failed.
        """
        return self._when(lambda: len(self._ready) >= count or len(self._judged) >= self._bound)

    def take(self, count: int) -> Taken:
        """Up to `count` groups with signal, oldest first.

        Where the bound of rollout.max_generation_rounds was met: NoSignalError, or, with
        accept_partial_batch, what there is (without any signal at all: the newest groups there
        are).
        """
        with self._lock:
            if len(self._ready) < count and not self.config.rollout.accept_partial_batch:
                effort = f"{len(self._judged)} sampled groups (rollout.max_generation_rounds)"
                raise NoSignalError(too_few(self.config, len(self._ready), self._judged, effort))
            self._ready.sort(key=lambda group: (group.oldest_version, group.prompt.index))
            chosen, self._ready = self._ready[:count] or self._judged[-count:], self._ready[count:]
            judged, self._judged = self._judged, []
            self._fill()
            return Taken(chosen, judged)

    def halt(self) -> list[Future[None]]:
        """End what is in flight, and begin nothing;
        done when all is back. The next `advance` goes on with it.
        """
        with self._lock:
            self.limit = 0
            return [worker.pause() for worker in self.workers]

    def counts(self) -> Mapping[str, int]:
        """What is there, and what was dropped or found in the journal: metrics by name."""
        with self._lock:
            found = Counter({"stale_groups_dropped": self._dropped})
            for worker in self.workers:
                found.update(worker.counts())
            return {
                "open_prompts": len(self._begun),
                "surplus_groups": len(self._ready),
                **found,
            }

    def stop(self) -> None:
        """End what is in flight, begin nothing, and fail whoever waits; `state` holds all that was
        finished.
        """
        with self._lock:
            self.limit = 0
            self._fail(EngineError("sampling was stopped"))
            for worker in self.workers:
                worker.stop()

    def state(self) -> tuple[int, list[int], list[Group]]:
        """All that is drawn and not taken: the stream's position, the indices of prompts that are
        not judged, and the ready groups.
        """
        with self._lock:
            return self.stream.position, sorted({*self._begun, *self._restored}), [*self._ready]

    def load_state(
        self,
        position: int,
        open_: Sequence[int],
        ready: Sequence[Group],
        partial: Mapping[int, PartialState],
    ) -> None:
        """What `state` gave, before the first `advance`, and the open prompts' partial states."""
        self.stream.position = position
        self._restored, self._ready, self._partial = list(open_), list(ready), partial

    @property
    def _oldest(self) -> int:
        return self.step - self.config.rollout.staleness_limit

    @property
    def _bound(self) -> int:
        """Groups judged without filling a batch, after which more of the same will not help."""
        rollout = self.config.rollout
        round_size = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        return self.config.rollout.max_generation_rounds * round_size

    def _when(self, condition: Callable[[], bool]) -> Future[None]:
        with self._lock:
            future: Future[None] = running_future()
            self._waiting.append((condition, future))
            self._look()
            return future

    def _look(self) -> None:
        """Whether what is waited for has come."""
        if self._failure is not None:
            for _, future in self._waiting:
                future.set_exception(self._failure)
            self._waiting = []
        for condition, future in self._waiting:
            if condition():
                future.set_result(None)
        self._waiting = [pair for pair in self._waiting if not pair[1].done()]

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._look()

    def _fill(self) -> None:
        """Draw and begin prompts while there is room for them."""
        room = self.limit - len(self._begun) - len(self._ready)
        if room > 0 and len(self._judged) < self._bound and self._failure is None:
            self._begin(self.stream.draw(room))

    def _begin(self, prompts: Sequence[Prompt]) -> None:
        """Each on the share that its index names, so that a journal knows whose it is."""
        self._begun |= {prompt.index for prompt in prompts}
        for number, worker in enumerate(self.workers):
            own = [prompt for prompt in prompts if prompt.index % len(self.workers) == number]
            for prompt, group in zip(
                own, worker.start(own, self._partial) if own else (), strict=True
            ):
                group.add_done_callback(functools.partial(self._take_in, prompt.index))

    def _take_in(self, index: int, judged: Future[Group]) -> None:
        with self._lock:
            error = judged.exception()
            if error is not None:
                self._fail(error)
                return
            group = judged.result()
            self._begun.discard(index)
            self._judged.append(group)
            if group.oldest_version < self._oldest:
                self._dropped += 1
            elif is_wanted(group, self.config.rollout):
                self._ready.append(group)
            self._fill()
            self._look()
