"""A rollout worker samples and judges prompts while its rank trains.

prompt started -> rollouts in flight -> each finished and in the journal -> judged -> future done

The rollout buffer decides which prompts there are, which groups are trained, and when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from megatron_stare.collect.journal import Journal, PartialRollouts
from megatron_stare.collect.sampling_settings import (
    TRAINING,
    Resampling,
    sampling_digest,
    training_params,
)
from megatron_stare.config import Config, EngineError, UserError
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.engine import Engine, Request, SamplingParams
from megatron_stare.scoring.advantages import checked_estimator
from megatron_stare.scoring.judge import Judge

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0  # for the work that has arrived before the end


@dataclass
class _Open:
    """A prompt that is not judged. Its rollouts are kept by their numbers."""

    prompt: Prompt
    group: Future[Group]
    finished: dict[int, Rollout] = field(default_factory=dict)
    parts: dict[int, Rollout] = field(default_factory=dict)  # unfinished, to be continued
    in_flight: dict[int, Request] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)  # lowest version a token in flight can have
    resampling: Resampling | None = None  # set: these follow the prompt's first rollouts


class RolloutWorker:
    """Uses this rank's engine and judge. One thread handles the rollouts that arrive. Any thread
    may call the methods; the futures call back from a thread of the worker or of the engine.
    """

    def __init__(
        self, config: Config, engine: Engine, judge: Judge, journal: Journal | None = None
    ) -> None:
        self.config, self.engine, self.judge, self.journal = config, engine, judge, journal
        self.params, self.sampling = training_params(config), sampling_digest(config)
        self.samples = config.rollout.n_samples_per_prompt
        # The advantage's greedy baseline is one more rollout, after those that are trained.
        self.requested = self.samples + checked_estimator(config.scoring).greedy
        self.step, self.paused = -1, False  # no step yet
        self._held: Collection[int] = ()  # indices of prompts that wait for a later step
        self._counts: Counter[str] = Counter()
        self._open: dict[int, _Open] = {}
        self._judging: dict[int, _Open] = {}
        self._lock = threading.RLock()
        self._idle: Future[None] | None = None  # the future that `pause` returned
        self._stopped, self._closed = False, False
        self._failure: Exception | None = None
        self._arrived: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: what it waits for, such as a disk that hangs, must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="rollout-worker", daemon=True)
        self._thread.start()

    def set_step(self, step: int, held: Collection[int] = ()) -> None:
        """The weights are those of version `step`, or soon will be. Requests that are too old for
        them are aborted and sent again; requests that `pause` aborted are continued, except those
        of the prompts with the indices `held`, which wait for a later step.

        The first call opens the journal.
        """
        with self._lock:
            first, self.step, self.paused, self._held = self.step < 0, step, self._stopped, held
            if self.journal is not None and first:
                self.journal.open(step, self._oldest)
                self._counts["journal_lines_skipped"] = self.journal.skipped
            elif self.journal is not None:
                self.journal.start_step(step, self._oldest)
            self.engine.abort([r for entry in self._open.values() for r in self._too_old(entry)])
            self._resume(list(self._open.values()))

    def start(
        self,
        prompts: Sequence[Prompt],
        partial: PartialRollouts | None = None,
        resampling: Resampling | None = None,
    ) -> list[Future[Group]]:
        """Sample and judge these prompts; one future each. It fails where one of the prompt's
        rollouts, or the judge, fails. All requests of one call are submitted to the engine
        together.

        `partial`: rollouts that exist already. With `resampling` the rollouts get the numbers after
        the prompt's first ones, so that seeds and journal keys do not collide.
        """
        entries = []
        with self._lock:
            for prompt in prompts:
                entry = _Open(prompt, running_future(), resampling=resampling)
                found = (partial or {}).get(prompt.index, {})
                for number, rollout in self._usable(entry, found).items():
                    store = entry.parts if rollout.status == "aborted" else entry.finished
                    store[number] = rollout
                self._open[prompt.index] = entry
                entries.append(entry)
            if self._failure is None:
                self._resume(entries)
            else:
                self._fail_all(self._failure)
        return [entry.group for entry in entries]

    def pause(self) -> Future[None]:
        """Abort all requests and keep their tokens; done when all have returned. The next
        `set_step` continues them.
        """
        with self._lock:
            self.paused = True
            self.engine.abort(
                [request for entry in self._open.values() for request in entry.in_flight.values()]
            )
            idle = self._idle = self._idle or running_future()
            self._check_idle()
            return idle

    def stop(self) -> None:
        """`pause` for good, and fail the futures that are not done."""
        with self._lock:
            self._stopped = True
            self.pause()
            entries = [*self._open.values(), *self._judging.values()]
        for entry in entries:
            resolve(entry.group, EngineError("sampling was stopped"))

    def partial_rollouts(self) -> PartialRollouts:
        """The rollouts of the prompts that are not judged, without tokens that the engine is still
        producing; also after `stop`.
        """
        with self._lock:
            entries = [*self._open.values(), *self._judging.values()]
            return {entry.prompt.index: entry.parts | entry.finished for entry in entries}

    def counts(self) -> Mapping[str, int]:
        """Metrics by name since the start: rollouts dropped, rollouts read from the journal."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """End the thread. Closing the engine is its owner's job."""
        self._closed = True
        self._arrived.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("a rollout worker's thread does not end; it and the journal are left alone")
        elif self.journal is not None:
            self.journal.close()

    @property
    def _oldest(self) -> int:
        return self.step - self.config.rollout.staleness_limit

    def _check_idle(self) -> None:
        """Complete `pause` once no request is in flight."""
        if self._idle is not None and not any(entry.in_flight for entry in self._open.values()):
            self._idle.set_result(None)
            self._idle = None

    def _resume(self, entries: Sequence[_Open]) -> None:
        """Submit all rollouts of these prompts that are neither finished nor in flight."""
        if self.paused:
            return
        missing: list[tuple[_Open, int, Request]] = []
        for entry in entries:
            self._drop_stale(entry)
            if entry.prompt.index in self._held:
                continue
            requests = self._missing(entry)
            entry.in_flight |= requests
            missing += [(entry, number, request) for number, request in requests.items()]
            if self._is_whole(entry):
                self.in_turn(functools.partial(self._judge_when_complete, entry))
        if not missing:
            return
        try:
            futures = self._submit(missing)
        except Exception as error:
            for entry in {id(entry): entry for entry, *_ in missing}.values():
                entry.in_flight.clear()
                self.in_turn(functools.partial(self._fail, entry, error))
            return
        for (entry, number, _), future in zip(missing, futures, strict=True):
            future.add_done_callback(functools.partial(self._note, entry, number))

    def _numbers(self, entry: _Open) -> range:
        """The numbers of the rollouts to sample; a resampling continues the first count."""
        if entry.resampling is None:
            return range(self.requested)
        return range(self.requested, self.requested + entry.resampling.samples)

    def _is_whole(self, entry: _Open) -> bool:
        return entry.finished.keys() >= set(self._numbers(entry))

    def _params(self, entry: _Open, number: int) -> SamplingParams:
        """The sampling parameters of one rollout; the baseline is greedy."""
        if entry.resampling is not None:
            return dataclasses.replace(self.params, temperature=entry.resampling.temperature)
        if number < self.samples:
            return self.params
        return dataclasses.replace(self.params, temperature=0.0, top_p=1.0, routing=None)

    def _labels(self, entry: _Open, number: int) -> dict[str, Any]:
        """The fields of a rollout that say how it was sampled."""
        temperature = self._params(entry, number).temperature
        other = temperature if temperature != self.params.temperature else None
        return {"sampling": self.sampling, "temperature": other}

    def _usable(self, entry: _Open, found: Mapping[int, Rollout]) -> dict[int, Rollout]:
        """The rollouts that this run would sample in the same way; a resumed run may have other
        settings.
        """
        numbers, usable = self._numbers(entry), dict[int, Rollout]()
        for number, rollout in found.items():
            labels = self._labels(entry, number)
            if number in numbers and all(
                getattr(rollout, name) == value for name, value in labels.items()
            ):
                usable[number] = rollout
        self._count("changed_rollouts_dropped", len(found) - len(usable))
        return usable

    def _count(self, name: str, count: int = 1) -> None:
        if count:
            self._counts[name] += count

    def _submit(self, missing: Sequence[tuple[_Open, int, Request]]) -> list[Future[Rollout]]:
        """One future per request, in order. Requests of equal parameters are submitted together."""
        alike: dict[SamplingParams, list[int]] = {}
        for place, (entry, number, _) in enumerate(missing):
            alike.setdefault(self._params(entry, number), []).append(place)
        futures: dict[int, Future[Rollout]] = {}
        for params, own in alike.items():
            batch = self.engine.submit([missing[place][2] for place in own], params)
            futures |= zip(own, batch, strict=True)
        return [futures[place] for place in range(len(missing))]

    def _drop_stale(self, entry: _Open) -> None:
        """Drop the rollouts that became too old."""
        for store in (entry.finished, entry.parts):
            for number in [n for n, each in store.items() if each.oldest_version < self._oldest]:
                del store[number]
                self._count("stale_rollouts_dropped")

    def _missing(self, entry: _Open) -> dict[int, Request]:
        """Requests for rollouts that are neither finished, nor in flight, nor in the journal."""
        requests, index = dict[int, Request](), entry.prompt.index
        # At another temperature only tokens of the current weights can be compared with the policy.
        oldest = self._oldest if entry.resampling is None else self.step
        for number in self._numbers(entry):
            if number in entry.finished or number in entry.in_flight:
                continue
            found = self.journal and self.journal.pop((index, number), oldest)
            if found and (usable := self._usable(entry, {number: found})):
                entry.finished |= usable
                self._count("journal_rollouts")
                continue
            seed = (self.config.run.seed, TRAINING, index, number)
            part = entry.parts.pop(number, None)
            requests[number] = Request(entry.prompt.token_ids, seed, part, entry.prompt)
            entry.since[number] = part.oldest_version if part else self.engine.version
        return requests

    def _note(self, entry: _Open, number: int, future: Future[Rollout]) -> None:
        self.in_turn(functools.partial(self._receive, entry, number, future))

    def _too_old(self, entry: _Open) -> Sequence[Request]:
        """Requests in flight whose first token is older than rollout.max_staleness allows."""
        return [
            request
            for number, request in entry.in_flight.items()
            if entry.since[number] < self._oldest
        ]

    def in_turn(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread, after what has arrived; not once the worker is closed."""
        if not self._closed:
            self._arrived.put(work)

    def _work(self) -> None:
        """The thread. An error of its work fails all groups: none that the work would have
        completed waits for ever.
        """
        while (work := self._arrived.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._fail_all(error)

    def _receive(self, entry: _Open, number: int, future: Future[Rollout]) -> None:
        """Handle a request that has returned: finished, aborted or failed."""
        heartbeat.moved()
        with self._lock:
            entry.in_flight.pop(number, None)
        try:
            rollout = dataclasses.replace(future.result(), **self._labels(entry, number))
        except BaseException as error:
            self._fail(entry, error)
            return
        with self._lock:
            if rollout.status == "aborted":
                self._keep_part(entry, number, rollout)
                self._check_idle()
                return
            entry.finished[number] = rollout
            self._check_idle()
            if self.journal is not None:
                self.journal.write((entry.prompt.index, number), rollout)
        self._judge_when_complete(entry)

    def _keep_part(self, entry: _Open, number: int, part: Rollout) -> None:
        dropped = self.config.rollout.long_tail in ("restart", "gather")
        if len(part.response_ids) and not dropped:
            entry.parts[number] = part
        if not entry.group.done():  # unless paused, it was aborted for its age: start it again
            self._resume([entry])

    def _judge_when_complete(self, entry: _Open) -> None:
        """Send the prompt to the judge, once, when all its rollouts are finished."""
        index = entry.prompt.index
        with self._lock:
            open_ = self._open.get(index) is entry and not entry.group.done()
            if not open_ or not self._is_whole(entry):
                return
            self._judging[index] = self._open.pop(index)
        rollouts = [entry.finished[number] for number in self._numbers(entry)]
        try:
            judged = self.judge.start([(entry.prompt, rollout) for rollout in rollouts])
        except BaseException as error:
            self._fail(entry, error)
            return
        judged.add_done_callback(
            lambda done: self.in_turn(functools.partial(self._finish, entry, done))
        )

    def _finish(self, entry: _Open, judged: Future[list[Rollout]]) -> None:
        try:
            rollouts = judged.result()
            first = entry.resampling is None
            group = Group(entry.prompt, self._with_baseline(rollouts) if first else tuple(rollouts))
        except BaseException as error:
            self._fail(entry, error)
            return
        with self._lock:
            if self._stopped:  # its future has failed; `partial_rollouts` still has the rollouts
                return
            del self._judging[entry.prompt.index]
        # Outside the lock: the future's callbacks start the next prompt.
        resolve(entry.group, group)

    def _with_baseline(self, judged: list[Rollout]) -> tuple[Rollout, ...]:
        """The rollouts to train, with the reward of the greedy baseline, if there is one."""
        trained = judged[: self.samples]
        if self.requested == self.samples:
            return tuple(trained)
        return tuple(dataclasses.replace(each, baseline=judged[-1].reward) for each in trained)

    def _fail(self, entry: _Open, error: BaseException) -> None:
        with self._lock:
            if not self._stopped:
                self._open.pop(entry.prompt.index, None)
                self._judging.pop(entry.prompt.index, None)
            self._check_idle()
        resolve(entry.group, error)

    def _fail_all(self, error: BaseException) -> None:
        """Fail all groups; `partial_rollouts` still has their rollouts, for a last checkpoint."""
        with self._lock:
            self._failure = self._failure or as_engine_error("the rollout worker", error)
            entries = [*self._open.values(), *self._judging.values()]
            idle, self._idle = self._idle, None
        for entry in entries:
            resolve(entry.group, self._failure)
        if idle is not None:
            idle.set_exception(self._failure)


def running_future() -> Future[Any]:
    """A future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(group: Future[Group], outcome: Group | BaseException) -> None:
    """Set a future's result or exception, unless it is already done."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            group.set_exception(outcome)
        else:
            group.set_result(outcome)


def as_engine_error(what: str, error: BaseException) -> Exception:
    """The error for the futures of a thread: its own if it names a remedy, else one with the place
    of the fault, whose traceback is printed.
    """
    if isinstance(error, EngineError | UserError):
        return error
    log.error("%s failed", what, exc_info=error)
    return EngineError(f"{what} failed ({error!r}); its traceback stands above")
