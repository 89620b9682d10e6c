"""A share of the prompts in this process: its rollouts are asked for, kept in the journal, judged.

begun -> its rollouts in flight -> finished, each in the journal -> judged -> the group is there
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from megatron_stare.collect.frames import numbered_frames, whole_frames
from megatron_stare.collect.journal import Journal
from megatron_stare.collect.shares import (
    TRAINING,
    Again,
    Known,
    greedily,
    running_future,
    settle,
    training_params,
)
from megatron_stare.config import Config, EngineError
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.rollout.engine import Engine, Request, SamplingParams
from megatron_stare.scoring.advantages import checked_estimator
from megatron_stare.scoring.judge import Judge


@dataclass
class _Open:
    """A prompt whose rollouts are not all there:
    by number, finished ones, parts to go on with, requests in flight.

    `since` is the version of the oldest token that a request in flight can have.
    """

    prompt: Prompt
    group: Future[Group]
    finished: dict[int, Rollout] = field(default_factory=dict)
    parts: dict[int, Rollout] = field(default_factory=dict)
    in_flight: dict[int, Request] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    again: Again | None = None  # these are not its first ones


class OwnShare:
    """Implements Share in this process, on its engine and its judge.
    One thread does the work that finished rollouts ask for.
    """

    def __init__(
        self, config: Config, engine: Engine, judge: Judge, journal: Journal | None = None
    ) -> None:
        self.config, self.engine, self.judge, self.journal = config, engine, judge, journal
        self.params = training_params(config)
        self.samples = config.rollout.n_samples_per_prompt
        # The advantage's baseline is one more rollout of a prompt, behind those that are trained.
        self.asked = self.samples + checked_estimator(config.scoring).greedy
        self.step, self.halted = 0, False
        self._counts: Counter[str] = Counter()
        self._open: dict[int, _Open] = {}
        self._at_judge: dict[int, _Open] = {}
        self._lock = threading.RLock()
        self._arrived: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle: Future[None] | None = None  # what `halt` waits for
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="share", daemon=True)

    def advance(self, step: int) -> None:
        """See Share. The first one opens the journal."""
        with self._lock:
            self._begin_work(step)
            self.step, self.halted = step, self._stopped
            if self.journal is not None:
                self.journal.turn(step)
            self.engine.abort([r for entry in self._open.values() for r in self._too_old(entry)])
            self._resume(list(self._open.values()))

    def begin(
        self,
        prompts: Sequence[Prompt],
        known: Mapping[int, Known] | None = None,
        again: Again | None = None,
    ) -> list[Future[Group]]:
        """See RankShare. What is asked for together is submitted together."""
        entries = []
        with self._lock:
            for prompt in prompts:
                entry = _Open(prompt, running_future(), again=again)
                if known and prompt.index in known:
                    entry.finished, entry.parts = map(_from_bytes, known[prompt.index])
                self._open[prompt.index] = entry
                entries.append(entry)
            self._resume(entries)
        return [entry.group for entry in entries]

    def halt(self) -> Future[None]:
        """See Share. The next `advance` goes on with it."""
        with self._lock:
            self.halted = True
            self.engine.abort(
                [request for entry in self._open.values() for request in entry.in_flight.values()]
            )
            idle = self._idle = self._idle or running_future()
            self._look()
            return idle

    def stop(self) -> None:
        """See Share."""
        with self._lock:
            self._stopped = True
            self.halt()
            entries = [*self._open.values(), *self._at_judge.values()]
        for entry in entries:
            settle(entry.group, EngineError("sampling was stopped"))

    def known(self) -> dict[int, Known]:
        """See Share. Parts in flight are the engine's, and are not among it."""
        with self._lock:
            return {
                entry.prompt.index: Known(
                    numbered_frames(entry.finished), numbered_frames(entry.parts)
                )
                for entry in [*self._open.values(), *self._at_judge.values()]
            }

    def counts(self) -> Mapping[str, int]:
        """See Share."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End the thread; the engine's owner ends what is in flight."""
        if self._thread.is_alive():
            self._arrived.put(None)
            self._thread.join()
        if self.journal is not None:
            self.journal.close()

    @property
    def _oldest(self) -> int:
        return self.step - self.config.rollout.staleness_limit

    def _begin_work(self, step: int) -> None:
        if self._thread.is_alive():
            return
        if self.journal is not None:
            self.journal.open(step)
            self._counts["journal_lines_skipped"] = self.journal.skipped
        self._thread.start()

    def _look(self) -> None:
        """Whether what `halt` waits for has come."""
        if self._idle is not None and not any(entry.in_flight for entry in self._open.values()):
            self._idle.set_result(None)
            self._idle = None

    def _resume(self, entries: Sequence[_Open]) -> None:
        """Submit whatever of these prompts is neither finished nor in flight."""
        if self.halted:
            return
        asked: list[tuple[_Open, int, Request]] = []
        for entry in entries:
            missing = self._missing(entry)
            entry.in_flight |= missing
            asked += [(entry, number, request) for number, request in missing.items()]
            if len(entry.finished) == len(self._numbers(entry)):
                self._arrived.put(functools.partial(self._begin_judging, entry))
        if not asked:
            return
        try:
            futures = self._submit(asked)
        except Exception as error:
            for entry in {id(entry): entry for entry, *_ in asked}.values():
                entry.in_flight.clear()
                self._arrived.put(functools.partial(self._give_up, entry, error))
            return
        for (entry, number, _), future in zip(asked, futures, strict=True):
            future.add_done_callback(functools.partial(self._note, entry, number))

    def _numbers(self, entry: _Open) -> range:
        """Of the prompt's rollouts; those that are sampled again follow its first ones."""
        if entry.again is None:
            return range(self.asked)
        return range(self.asked, self.asked + entry.again.samples)

    def _params(self, entry: _Open, number: int) -> SamplingParams:
        """How one of its rollouts is sampled: the baseline greedily."""
        if entry.again is not None:
            return dataclasses.replace(self.params, temperature=entry.again.temperature)
        return self.params if number < self.samples else greedily(self.params)

    def _temperature(self, entry: _Open) -> float | None:
        """Rollout.temperature of its rollouts."""
        if entry.again is None or entry.again.temperature == self.params.temperature:
            return None
        return entry.again.temperature

    def _submit(self, asked: Sequence[tuple[_Open, int, Request]]) -> list[Future[Rollout]]:
        """All of them at once, those that are sampled alike together; in their order."""
        alike: dict[SamplingParams, list[int]] = {}
        for place, (entry, number, _) in enumerate(asked):
            alike.setdefault(self._params(entry, number), []).append(place)
        futures: dict[int, Future[Rollout]] = {}
        for params, own in alike.items():
            its = self.engine.submit([asked[place][2] for place in own], params)
            futures |= zip(own, its, strict=True)
        return [futures[place] for place in range(len(asked))]

    def _missing(self, entry: _Open) -> dict[int, Request]:
        """The requests for what is neither finished nor in flight, nor in the journal."""
        for store in (entry.finished, entry.parts):
            for number in [n for n, each in store.items() if each.oldest_version < self._oldest]:
                del store[number]
                self._counts["stale_rollouts_dropped"] += 1
        requests, index = dict[int, Request](), entry.prompt.index
        # at another temperature only the current weights' tokens have a ratio
        oldest = self._oldest if entry.again is None else self.step
        for number in self._numbers(entry):
            if number in entry.finished or number in entry.in_flight:
                continue
            found = self.journal and self.journal.take((index, number), oldest)
            if found and found.temperature == self._temperature(entry):
                entry.finished[number] = found
                self._counts["journal_rollouts"] += 1
                continue
            seed = (self.config.run.seed, TRAINING, index, number)
            part = entry.parts.pop(number, None)
            requests[number] = Request(entry.prompt.token_ids, seed, part, entry.prompt)
            entry.since[number] = part.oldest_version if part else self.engine.version
        return requests

    def _note(self, entry: _Open, number: int, future: Future[Rollout]) -> None:
        self._arrived.put(functools.partial(self._take_in, entry, number, future))

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
            arrival()
            with self._lock:
                self._look()

    def _take_in(self, entry: _Open, number: int, future: Future[Rollout]) -> None:
        """A rollout that is back."""
        try:
            rollout = future.result()
        except BaseException as error:
            with self._lock:
                entry.in_flight.pop(number, None)
            self._give_up(entry, error)
            return
        with self._lock:
            entry.in_flight.pop(number, None)
            if rollout.status == "aborted":
                self._keep_part(entry, number, rollout)
                return
            if entry.again is not None:
                rollout = dataclasses.replace(rollout, temperature=self._temperature(entry))
            entry.finished[number] = rollout
            if self.journal is not None:
                self.journal.write((entry.prompt.index, number), rollout)
        self._begin_judging(entry)

    def _keep_part(self, entry: _Open, number: int, part: Rollout) -> None:
        if len(part.response_ids) and self.config.rollout.partial_rollout:
            entry.parts[number] = part
        if not entry.group.done():  # ended for its age, if not by `halt`: begin it again at once
            self._resume([entry])

    def _begin_judging(self, entry: _Open) -> None:
        """Once, when all the prompt's rollouts are there."""
        index = entry.prompt.index
        with self._lock:
            whole = len(entry.finished) == len(self._numbers(entry))
            if not whole or entry.group.done() or self._open.get(index) is not entry:
                return
            self._at_judge[index] = self._open.pop(index)
        rollouts = [entry.finished[number] for number in self._numbers(entry)]
        try:
            judged = self.judge.start([(entry.prompt, rollout) for rollout in rollouts])
        except BaseException as error:
            self._give_up(entry, error)
            return
        judged.add_done_callback(
            lambda done: self._arrived.put(functools.partial(self._take_judged, entry, done))
        )

    def _take_judged(self, entry: _Open, judged: Future[list[Rollout]]) -> None:
        try:
            rollouts = judged.result()
            first = entry.again is None
            group = Group(entry.prompt, self._compared(rollouts) if first else tuple(rollouts))
        except BaseException as error:
            self._give_up(entry, error)
            return
        with self._lock:
            if self._stopped:  # who asked has been told so; `known` still has it
                return
            del self._at_judge[entry.prompt.index]
        # outside of the lock: whoever hears of it asks for the next prompt
        settle(entry.group, group)

    def _compared(self, judged: list[Rollout]) -> tuple[Rollout, ...]:
        """Those that are trained, with the reward of the greedy one, where there is one."""
        trained = judged[: self.samples]
        if self.asked == self.samples:
            return tuple(trained)
        return tuple(dataclasses.replace(each, baseline=judged[-1].reward) for each in trained)

    def _give_up(self, entry: _Open, error: BaseException) -> None:
        with self._lock:
            if not self._stopped:
                self._open.pop(entry.prompt.index, None)
                self._at_judge.pop(entry.prompt.index, None)
        settle(entry.group, error)


def _from_bytes(content: Tensor) -> dict[int, Rollout]:
    return {found.beside["number"]: found.record for found in whole_frames(content)}  # type: ignore[misc]
