"""Prompts that are sampled continuously, on rank 0 (see rollout_buffer.py).

fully_async: sampling never stops. New weights reach rollouts in flight, and every token knows the
version that sampled it. on_policy with rollout.long_tail: prompts are sampled until a batch is
full; then `pause` aborts all requests. With long_tail=continue or restart their prompts are in
flight again in the next step; with gather they form the tail:

    short round   fresh prompts only; the tail is held, and grows by the prompts that are stopped
    long round    as soon as the tail has rollout_batch_size prompts: these, and fresh ones only in
                  the place of those without signal or still judged by then; so it ends when the
                  longest of them has ended

(tail batching of RollPacker, arXiv 2509.21009). Every prompt with signal is trained once, by the
weights that sampled all its rollouts, whatever its length; the tail of the last step is not.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from concurrent.futures import Future

from megatron_stare.collect.journal import PartialRollouts
from megatron_stare.collect.resampling import is_wanted
from megatron_stare.collect.rollout_worker import as_engine_error, running_future
from megatron_stare.collect.rounds import RolloutWorkers
from megatron_stare.config import Config, EngineError
from megatron_stare.data.prompts import PromptStream
from megatron_stare.records import Group, Prompt


class PromptDispatcher:
    """Keeps prompts in flight on the worker of rank 0: as one is judged, the next is drawn.

    At most `limit` prompts are in flight, ready, or `kept` by the buffer, so that each is trained
    before it is older than rollout.max_staleness; 0 draws none. A rollout in flight that gets too
    old is aborted and sampled again.
    """

    def __init__(self, config: Config, stream: PromptStream, workers: RolloutWorkers) -> None:
        self.config, self.stream = config, stream
        assert workers.own is not None, "rank 0 has a worker"
        self.worker = workers.own
        self._partial: PartialRollouts = {}  # of earlier attempts
        self.step, self.limit, self.kept = 0, 0, 0
        self.gathers = config.rollout.long_tail == "gather"
        self.is_long_round = False
        # Prompts by index: those to start, of an earlier attempt or a second time; those started
        # whose groups are not finished; of these, those that wait for a long round.
        self._unstarted: list[int] = []
        self._begun: set[int] = set()
        self._held: set[int] = set()
        self._ready: list[Group] = []  # of these, those that may be trained
        self._judged: list[Group] = []  # since the last `next_groups`
        self._lock = threading.RLock()
        self._wanted, self._enough = 0, running_future()  # of the last call of `enough`
        self._failure: BaseException | None = None

    def set_step(self, step: int, limit: int, kept: int = 0) -> None:
        """The trainer is at `step`: drop what is too old, and start prompts up to `limit`."""
        with self._lock:
            self.step, self.limit, self.kept = step, limit, kept
            self._ready = [group for group in self._ready if group.oldest_version >= self._oldest]
            first = self._divided_tail() if self.gathers else self._unstarted
            self.worker.set_step(step, frozenset(self._held))
            self._unstarted = [index for index in self._unstarted if index not in first]
            self._begin([self.stream.at(index) for index in first])
            self._partial = {}
            self._fill()

    def enough(self, count: int) -> Future[None]:
        """A future that is done when `count` groups are ready, or when
        rollout.max_generation_rounds rounds of them were judged without filling a batch; it fails
        where sampling failed.
        """
        with self._lock:
            self._wanted, self._enough = count, running_future()
            self._look()
            return self._enough

    def next_groups(self) -> list[Group]:
        """All groups that were judged since the last time, with and without signal."""
        with self._lock:
            judged, self._judged, self._ready = self._judged, [], []
            return sorted(judged, key=lambda group: group.prompt.index)

    def keep(self, count: int) -> None:
        """The buffer keeps `count` of the groups that it took; draw for the others."""
        with self._lock:
            self.kept = count
            self._fill()

    def pause(self) -> Future[None]:
        """Abort all requests and start nothing; done when all have returned. The next `set_step`
        continues them.
        """
        with self._lock:
            self.limit = 0
            return self.worker.pause()

    @property
    def open_prompts(self) -> int:
        """Prompts that are neither judged nor in a batch."""
        return len(self._begun) + len(self._unstarted)

    def stop(self) -> None:
        """Abort all requests and fail the futures of `enough`; `state` has what is finished."""
        with self._lock:
            self.limit = 0
            self._fail(EngineError("sampling was stopped"))
            self.worker.stop()

    def state(self) -> tuple[int, list[int], list[Group]]:
        """The stream's position, the indices of prompts that are not judged, the ready groups."""
        with self._lock:
            return self.stream.position, sorted({*self._begun, *self._unstarted}), [*self._ready]

    def load_state(self, position: int, open_: Sequence[int], partial: PartialRollouts) -> None:
        """Restore a state before the first `set_step`: the stream's position, and the prompts to
        start first, with their partial rollouts.
        """
        self.stream.position = position
        self._unstarted, self._partial = list(open_), partial

    def _divided_tail(self) -> list[int]:
        """Decide whether the step is a long round; the prompts to start. The rest is held."""
        tail = sorted({*self._begun, *self._unstarted})
        size = self.config.rollout.rollout_batch_size
        self.is_long_round = len(tail) >= size
        chosen = tail[:size] if self.is_long_round else []
        if self.is_long_round:
            self.limit = size
        self._held = self._begun.difference(chosen)
        return [index for index in chosen if index not in self._begun]

    @property
    def _oldest(self) -> int:
        return self.step - self.config.rollout.staleness_limit

    @property
    def _is_full(self) -> bool:
        """Whether the step's batch is ready or taken."""
        there = self.kept + len(self._ready)
        return self.limit == 0 or there >= self.config.rollout.rollout_batch_size

    @property
    def _bound(self) -> int:
        """The most groups that are judged for one batch."""
        rollout = self.config.rollout
        round_size = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        return self.config.rollout.max_generation_rounds * round_size

    def _look(self) -> None:
        """Complete the future of `enough` if sampling failed or its condition holds."""
        if self._enough.done():
            return
        if self._failure is not None:
            self._enough.set_exception(self._failure)
        elif len(self._ready) >= self._wanted or len(self._judged) >= self._bound:
            self._enough.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._look()

    def _fill(self) -> None:
        """Draw and begin prompts while there is room for them."""
        in_flight = self._begun - self._held
        room = self.limit - self.kept - len(in_flight) - len(self._ready)
        if room > 0 and len(self._judged) < self._bound and self._failure is None:
            self._begin(self.stream.draw(room))

    def _begin(self, prompts: Sequence[Prompt]) -> None:
        if not prompts:
            return
        self._begun |= {prompt.index for prompt in prompts}
        for prompt, group in zip(prompts, self.worker.start(prompts, self._partial), strict=True):
            group.add_done_callback(functools.partial(self._take_in, prompt.index))

    def _take_in(self, index: int, judged: Future[Group]) -> None:
        try:
            self._add(index, judged.result())
        except BaseException as error:  # a future only logs what its callback raises
            with self._lock:
                self._fail(as_engine_error("the next prompts", error))

    def _add(self, index: int, group: Group) -> None:
        with self._lock:
            self._begun.discard(index)
            fresh = group.oldest_version >= self._oldest
            if self.gathers and (self._is_full or not fresh):  # too late for its step's batch
                self._unstarted.append(index)
            else:
                self._judged.append(group)
                if fresh and is_wanted(group, self.config.rollout):
                    self._ready.append(group)
            self._fill()
            self._look()
