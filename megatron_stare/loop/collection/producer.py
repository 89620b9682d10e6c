"""Rollouts without end, beside the training:
as one prompt is finished the next is begun, within a bound on their age.

    drawn -> its rollouts in flight -> finished, each in the journal -> judged -> ready -> taken by
    a step

No more than `limit` prompts are between drawn and taken, so that (rollout.max_staleness + 1)
batches in the pipe are each taken before they are too old. What is older than rollout.max_staleness
anyway is forgotten by rule and
counted: a ready group is dropped, a rollout in flight is ended and sampled again. Runs on rank 0.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron_stare.config import Config, NoSignalError
from megatron_stare.data.prompts import PromptStream
from megatron_stare.loop.collection import sampling
from megatron_stare.loop.collection.collect import is_wanted, too_few
from megatron_stare.loop.collection.frames import (
    as_tensor,
    frame,
    group_frames,
    groups_in,
    whole_frames,
)
from megatron_stare.loop.collection.journal import Journal
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.rollout.engine import Engine, EngineError, Request
from megatron_stare.scoring.judge import Judge


@dataclass
class _Open:
    """A prompt whose rollouts are not all there:
    by number, finished ones, parts to go on with, requests in flight.

    `since` is the version of the oldest token that a request in flight can have.
    """

    prompt: Prompt
    finished: dict[int, Rollout] = field(default_factory=dict)
    parts: dict[int, Rollout] = field(default_factory=dict)
    in_flight: dict[int, Request] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)


class Producer:
    """Everything between the stream of prompts and the batch;
    one thread does the work that finished rollouts ask for.

    `limit` prompts at most are open or ready; 0 stops the beginning of new ones.
    """

    def __init__(
        self, config: Config, stream: PromptStream, engine: Engine, judge: Judge, journal: Journal
    ) -> None:
        self.config, self.stream, self.engine, self.judge, self.journal = (
            config,
            stream,
            engine,
            judge,
            journal,
        )
        self.params = sampling.training_params(config)
        self.samples = config.rollout.n_samples_per_prompt
        self.step, self.limit = 0, 0
        self.counts: Counter[str] = Counter()
        self._open: dict[int, _Open] = {}
        self._at_judge: dict[int, _Open] = {}
        self._ready: list[Group] = []
        self._judged: list[Group] = []  # since the last `take`: with and without signal
        self._lock = threading.RLock()
        self._arrived: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._watch: tuple[Callable[[], bool], Future[None]] | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="producer", daemon=True)

    def advance(self, step: int, limit: int) -> None:
        """The trainer is at `step`: forget what is too old for it,
        and fill up to `limit` prompts.
        """
        with self._lock:
            if not self._thread.is_alive():
                self.journal.open(step)
                self.counts["journal_lines_skipped"] = self.journal.skipped
                self._thread.start()
            self.step, self.limit = step, limit
            self.journal.turn(step)
            young = [group for group in self._ready if group.oldest_version >= self._oldest]
            self.counts["stale_groups_dropped"] += len(self._ready) - len(young)
            self._ready = young
            self.engine.abort([r for entry in self._open.values() for r in self._too_old(entry)])
            for entry in list(self._open.values()):
                self._resume(entry)
            self._fill()

    def enough(self, count: int) -> Future[None]:
        """Done when `take(count)` gives a batch, or cannot any more;
        failed where sampling failed.
        """
        return self._when(lambda: len(self._ready) >= count or len(self._judged) >= self._bound)

    def take(self, count: int) -> tuple[list[Group], list[Group]]:
        """Up to `count` groups with signal, oldest first,
        and all that were judged since the last time.

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
            return chosen, judged

    def halt(self) -> Future[None]:
        """End what is in flight, and begin nothing;
        done when all is back. The next `advance` goes on with it.
        """
        with self._lock:
            self.limit = 0
            self.engine.abort(
                [request for entry in self._open.values() for request in entry.in_flight.values()]
            )
        return self._when(lambda: not any(entry.in_flight for entry in self._open.values()))

    @property
    def open_count(self) -> int:
        """Prompts begun and not finished."""
        return len(self._open)

    @property
    def ready_count(self) -> int:
        """Groups that wait to be taken."""
        return len(self._ready)

    def stop(self) -> None:
        """End what is in flight, begin nothing, and fail whoever waits; `state` holds all that was
        finished.
        """
        with self._lock:
            if self._failure is None:
                self._failure = EngineError("sampling was stopped")
        self.halt()

    def state(self, taken: Sequence[Group] = ()) -> dict[str, Any]:
        """All that is drawn and not trained, of which `taken` is in the step under way;
        parts in flight are the engine's, and are begun again by a later life.
        """
        with self._lock:
            entries = [*self._open.values(), *self._at_judge.values()]
            open_ = [
                {
                    "index": entry.prompt.index,
                    "finished": _as_bytes(entry.finished),
                    "parts": _as_bytes(entry.parts),
                }
                for entry in entries
            ]
            ready = group_frames([*taken, *self._ready])
            return {"position": self.stream.position, "open": open_, "ready": ready}

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave, here or of a RoundCollector, before the first `advance`."""
        self.stream.position = state["position"]
        if "surplus" in state:
            ahead = state["ahead"]["groups"] if state["ahead"] else []
            self._ready = [*groups_in(ahead), *groups_in(state["surplus"])]
            for index in state.get("pending", ()):
                self._open[index] = _Open(self.stream.at(index))
            return
        self._ready = groups_in(state["ready"])
        for entry in state["open"]:
            finished, parts = _from_bytes(entry["finished"]), _from_bytes(entry["parts"])
            self._open[entry["index"]] = _Open(self.stream.at(entry["index"]), finished, parts)

    def close(self) -> None:
        """End the thread; the engine's owner ends what is in flight."""
        if self._thread.is_alive():
            self._arrived.put(None)
            self._thread.join()
        self.journal.close()

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
            future: Future[None] = Future()
            self._watch = (condition, future)
            self._look()
            return future

    def _look(self) -> None:
        """Whether what is waited for has come."""
        if self._watch is not None and not self._watch[1].done():
            condition, future = self._watch
            if self._failure is not None:
                future.set_exception(self._failure)
            elif condition():
                future.set_result(None)

    def _fill(self) -> None:
        """Draw and begin prompts while there is room for them."""
        while (
            len(self._open) + len(self._at_judge) + len(self._ready) < self.limit
            and len(self._judged) < self._bound
        ):
            (prompt,) = self.stream.draw(1)
            entry = self._open[prompt.index] = _Open(prompt)
            self._resume(entry)

    def _resume(self, entry: _Open) -> None:
        """Submit whatever of this prompt is neither finished nor in flight."""
        for store in (entry.finished, entry.parts):
            for number in [
                n for n, rollout in store.items() if rollout.oldest_version < self._oldest
            ]:
                del store[number]
                self.counts["stale_rollouts_dropped"] += 1
        requests = {}
        for number in range(self.samples):
            if number in entry.finished or number in entry.in_flight:
                continue
            known = self.journal.take((entry.prompt.index, number), self._oldest)
            if known is not None:
                entry.finished[number] = known
                self.counts["journal_rollouts"] += 1
                continue
            seed = (self.config.run.seed, sampling.TRAINING, entry.prompt.index, number)
            part = entry.parts.pop(number, None)
            requests[number] = Request(entry.prompt.token_ids, seed, part, entry.prompt)
            entry.since[number] = part.oldest_version if part else self.engine.version
        entry.in_flight |= requests
        futures = self.engine.submit(list(requests.values()), self.params) if requests else []
        for number, future in zip(requests, futures, strict=True):
            future.add_done_callback(functools.partial(self._note, entry.prompt.index, number))
        if len(entry.finished) == self.samples:
            self._arrived.put(functools.partial(self._begin_judging, entry.prompt.index))

    def _note(self, index: int, number: int, future: Future[Rollout]) -> None:
        self._arrived.put(functools.partial(self._take_in, index, number, future))

    def _too_old(self, entry: _Open) -> Sequence[Request]:
        """Requests in flight whose first token is older than the rule allows."""
        return [
            request
            for number, request in entry.in_flight.items()
            if entry.since[number] < self._oldest
        ]

    def _work(self) -> None:
        """The thread: take in what arrives, until it is told to end."""
        while (arrival := self._arrived.get()) is not None:
            try:
                arrival()
            except BaseException as error:
                with self._lock:
                    self._failure = error
            with self._lock:
                self._look()

    def _take_in(self, index: int, number: int, future: Future[Rollout]) -> None:
        """A finished rollout."""
        with self._lock:
            entry = self._open[index]
            del entry.in_flight[number]
            rollout = future.result()
            if rollout.status == "aborted":
                self._keep_part(entry, number, rollout)
            else:
                entry.finished[number] = rollout
                self.journal.write((index, number), rollout)
                self._begin_judging(index)

    def _begin_judging(self, index: int) -> None:
        """Once, when all the prompt's rollouts are there."""
        with self._lock:
            entry = self._open.get(index)
            if entry is None or len(entry.finished) < self.samples:
                return
            self._at_judge[index] = self._open.pop(index)
        judged = self.judge.begin(
            [(entry.prompt, entry.finished[number]) for number in range(self.samples)]
        )
        judged.add_done_callback(
            lambda done: self._arrived.put(functools.partial(self._take_judged, index, done))
        )

    def _take_judged(self, index: int, judged: Future[list[Rollout]]) -> None:
        with self._lock:
            group = Group(self._at_judge[index].prompt, tuple(judged.result()))
            del self._at_judge[index]
            self._judged.append(group)
            if group.oldest_version < self._oldest:
                self.counts["stale_groups_dropped"] += 1
            elif is_wanted(group, self.config.rollout):
                self._ready.append(group)
            self._fill()

    def _keep_part(self, entry: _Open, number: int, part: Rollout) -> None:
        if len(part.response_ids) and self.config.rollout.partial_rollout:
            entry.parts[number] = part
        if self.limit:  # ended for its age, not by `halt`: begin it again at once
            self._resume(entry)


def _as_bytes(rollouts: dict[int, Rollout]) -> Tensor:
    return as_tensor(frame(rollout, number=number) for number, rollout in rollouts.items())


def _from_bytes(content: Tensor | list[Any]) -> dict[int, Rollout]:
    """Of `_as_bytes`, or of version 0.1.0: (number, fields) of each."""
    if isinstance(content, list):
        return {number: Rollout(**fields) for number, fields in content}
    return {found.beside["number"]: found.record for found in whole_frames(content)}  # type: ignore[misc]
