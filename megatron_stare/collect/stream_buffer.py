"""Batches from a stream of rollouts that rank 0 samples during training (see rollout_buffer.py).

fully_async: sampling never stops. A step takes the oldest ready groups, new weights reach rollouts
in flight, and every token knows the version that sampled it. on_policy with
rollout.abort_long_tail: prompts are sampled until the batch is full; then all requests are aborted,
and (rollout.partial_rollout) continued in the next step.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_stare.collect.group_exchange import (
    all_gather_groups,
    concatenated,
    group_state,
    scatter_groups,
)
from megatron_stare.collect.journal import forget, groups_in, journal_directory
from megatron_stare.collect.rollout_buffer import (
    Collected,
    OldLogprobs,
    collected_of,
    is_wanted,
    too_few,
)
from megatron_stare.collect.rollout_worker import (
    PartialState,
    RolloutWorkers,
    as_engine_error,
    running_future,
)
from megatron_stare.config import Config, EngineError
from megatron_stare.data.prompts import PromptStream
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group, Prompt
from megatron_stare.rollout.engine import Engine
from megatron_stare.scoring.advantages import PromptHistory


class Taken(NamedTuple):
    """The groups to train on, and all that were judged since the last time."""

    chosen: list[Group]
    judged: list[Group]


class PromptDispatcher:
    """Keeps prompts in flight on the workers of rank 0: as one is judged, the next is drawn.

    At most `limit` prompts are in flight or ready, so that each is trained before it is older than
    rollout.max_staleness; 0 draws none. Whatever gets too old is dropped and counted: a ready group
    is dropped, a rollout in flight is aborted and sampled again.
    """

    def __init__(self, config: Config, stream: PromptStream, workers: RolloutWorkers) -> None:
        self.config, self.stream = config, stream
        self.workers = workers.own
        self._partial: Mapping[int, PartialState] = {}  # of earlier attempts, by prompt index
        self.step, self.limit = 0, 0
        self._dropped = 0
        self._restored: list[int] = []  # of an earlier attempt, to be started first
        self._begun: set[int] = set()  # indices of prompts whose groups are not there
        self._ready: list[Group] = []
        self._judged: list[Group] = []  # since the last `next_batch`: with and without signal
        self._lock = threading.RLock()
        self._waiting: list[tuple[Callable[[], bool], Future[None]]] = []
        self._failure: BaseException | None = None

    def set_step(self, step: int, limit: int) -> None:
        """The trainer is at `step`: drop groups that are too old and fill up to `limit`."""
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
        """Done when `next_batch(count)` gives a batch, or cannot any more;
        failed where sampling failed.
        """
        return self._when(lambda: len(self._ready) >= count or len(self._judged) >= self._bound)

    def next_batch(self, count: int) -> Taken:
        """Up to `count` groups with signal, oldest first.

        Where the bound of rollout.max_generation_rounds was met: NoSignalError, or, with
        accept_partial_batch, what there is (without any signal at all: the newest groups there
        are).
        """
        with self._lock:
            if len(self._ready) < count and not self.config.rollout.accept_partial_batch:
                effort = f"{len(self._judged)} sampled groups (rollout.max_generation_rounds)"
                raise too_few(self.config, len(self._ready), self._judged, effort)
            self._ready.sort(key=lambda group: (group.oldest_version, group.prompt.index))
            chosen, self._ready = self._ready[:count] or self._judged[-count:], self._ready[count:]
            judged, self._judged = self._judged, []
            self._fill()
            return Taken(chosen, judged)

    def pause(self) -> list[Future[None]]:
        """Abort all requests and start nothing; done when all have returned. The next `set_step`
        continues them.
        """
        with self._lock:
            self.limit = 0
            return [worker.pause() for worker in self.workers]

    def counts(self) -> Mapping[str, int]:
        """Metrics by name: open prompts, ready groups, and the workers' counts."""
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
        """Abort all requests and fail the futures of `enough`; `state` has all finished groups."""
        with self._lock:
            self.limit = 0
            self._fail(EngineError("sampling was stopped"))
            for worker in self.workers:
                worker.stop()

    def state(self) -> tuple[int, list[int], list[Group]]:
        """The stream's position, the indices of prompts that are not judged, the ready groups."""
        with self._lock:
            return self.stream.position, sorted({*self._begun, *self._restored}), [*self._ready]

    def load_state(
        self,
        position: int,
        open_: Sequence[int],
        ready: Sequence[Group],
        partial: Mapping[int, PartialState],
    ) -> None:
        """What `state` gave, before the first `set_step`, and the open prompts' partial states."""
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
        """Complete the futures whose condition holds."""
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
        """Start each prompt on the worker that its index names, so that the journal knows it."""
        self._begun |= {prompt.index for prompt in prompts}
        for number, worker in enumerate(self.workers):
            own = [prompt for prompt in prompts if prompt.index % len(self.workers) == number]
            for prompt, group in zip(
                own, worker.start(own, self._partial) if own else (), strict=True
            ):
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
            self._judged.append(group)
            if group.oldest_version < self._oldest:
                self._dropped += 1
            elif is_wanted(group, self.config.rollout):
                self._ready.append(group)
            self._fill()
            self._look()


class StreamBuffer:
    """Implements RolloutBuffer."""

    def __init__(
        self,
        config: Config,
        stream: PromptStream,
        engine: Engine,
        workers: RolloutWorkers,
        topology: Topology,
    ) -> None:
        self.config, self.engine, self.topology = config, engine, topology
        self.workers = workers
        self.dispatcher: PromptDispatcher | None = None
        if topology.is_first:
            self.dispatcher = PromptDispatcher(config, stream, workers)
        self._saved_step = 0
        self._training: list[Group] = []  # of the step under way
        self.history = PromptHistory()
        self._before: PromptHistory | None = None  # of the step under way
        self._taken = Taken([], [])  # on rank 0

    def collect(self, step: int) -> Collected:
        """The oldest ready groups, once there are enough. NoSignalError as RoundBuffer's."""
        counts = agreed(self.topology, lambda: self._take(step))[0]
        taken, self._taken = self._taken, Taken([], [])
        self._training = chosen = self._broadcast(taken.chosen)
        judged = self._broadcast(taken.judged)
        self._before = self.history.copy()
        collected = collected_of(chosen, judged or chosen, counts, self.config, self.history)
        return Collected(
            collected.groups, collected.signal, collected.metrics | _staleness(chosen, step)
        )

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """Sampling continues under the new weights."""
        self._training, self._before = [], None

    def prefetch(self, step: int) -> None:
        """fully_async samples anyway; abort_long_tail continues with the next step."""

    def state(self) -> dict[str, Any]:
        """Groups and partial states as bytes; the journal keeps rollouts that finish later. Tokens
        that the engine is still producing are not kept.
        """
        if self.dispatcher is not None:
            before = self._saved_step - self.config.rollout.staleness_limit
            forget(journal_directory(self.config), before)
            self._saved_step = self.dispatcher.step
        known: dict[int, PartialState] = {}
        # Before rank 0 says what is open: what is judged meanwhile is among its ready groups.
        agreed(self.topology, lambda: known.update(self._own_known()))
        position, open_, ready = self.dispatcher.state() if self.dispatcher else (0, [], [])
        position, open_ = self.topology.gather((position, open_))[0]
        ready = [*self._training, *self._broadcast(ready)]
        return {
            "position": position,
            **self._open_state({index: known[index] for index in open_ if index in known}, open_),
            "ready": group_state(ready, self.topology),
            "history": (self._before or self.history).rows,
        }

    def stop(self) -> None:
        """Stop the dispatcher: a waiting `collect` raises an EngineError."""
        if self.dispatcher is not None:
            self.dispatcher.stop()

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave, for any number of ranks; or a RoundBuffer, whose surplus is ready
        here.
        """
        open_: Mapping[int, PartialState | None]
        self.history = PromptHistory(state["history"])
        if "surplus" in state:
            ahead = state["ahead"]["groups"] if state["ahead"] else None
            surplus = groups_in(state["surplus"])
            again = [group.prompt.index for group in surplus] if "replay" in state else []
            groups = [*(groups_in(ahead) if ahead is not None else ()), *([] if again else surplus)]
            open_ = dict.fromkeys(sorted({*state.get("pending", ()), *again}))
        else:
            groups, open_ = groups_in(state["ready"]), _open_of(state)
        ready = scatter_groups(groups, self.topology, [0])
        if self.dispatcher is not None:
            partial = {index: state for index, state in open_.items() if state is not None}
            self.dispatcher.load_state(state["position"], list(open_), ready, partial)

    def close(self) -> None:
        """End the workers. Closing the engine is its owner's job."""
        self.workers.close()

    def _limit(self, step: int) -> int:
        """Prompts between drawn and taken:
        as many as are taken before they are too old, or before the run ends.
        """
        rollout, left = self.config.rollout, self.config.train.num_rollout - step
        if rollout.asynchrony != "fully_async":
            return rollout.over_sampling_batch_size
        return min(self.config.rollout.staleness_limit + 1, left) * rollout.rollout_batch_size

    def _take(self, step: int) -> dict[str, int]:
        """Have `_taken` once there are enough, on rank 0; its counts."""
        rollout, wanted = self.config.rollout, self.config.rollout.rollout_batch_size
        dispatcher = self.dispatcher
        waiting: list[Future[None]] = []
        if dispatcher is not None:
            dispatcher.set_step(step, self._limit(step))
            waiting = [dispatcher.enough(wanted)]
        self.engine.wait(waiting)
        if rollout.asynchrony != "fully_async":
            self.engine.wait(dispatcher.pause() if dispatcher is not None else [])
        if dispatcher is None:
            return {}
        self._taken = dispatcher.next_batch(wanted)
        return dict(dispatcher.counts())

    def _broadcast(self, groups: Sequence[Group]) -> list[Group]:
        """Rank 0's groups, on every rank."""
        own = groups if self.topology.is_first else []
        return all_gather_groups(own, self.topology)[0]

    def _own_known(self) -> dict[int, PartialState]:
        return {
            index: known
            for worker in self.workers.own
            for index, known in worker.partial_states().items()
        }

    def _open_state(
        self, known: Mapping[int, PartialState], open_: Sequence[int]
    ) -> dict[str, Any]:
        """The open prompts: how many bytes of finished rollouts and of parts there are of each, and
        these bytes, in the prompts' order. Collective.
        """
        sizes = {index: tuple(map(len, parts)) for index, parts in known.items()}
        everyone = self.topology.gather(sizes)
        listed = [(index, *size) for each in everyone for index, size in each.items()]
        unknown = set(open_) - {index for index, *_ in listed}
        listed += [(index, 0, 0) for index in sorted(unknown)]
        parts = [part for both in known.values() for part in both]
        return {
            "open": [
                dict(zip(("index", *PartialState._fields), entry, strict=True)) for entry in listed
            ],
            "known": concatenated(_joined(parts), self.topology),
        }


def _open_of(state: Mapping[str, Any]) -> dict[int, PartialState | None]:
    """The partial state of every open prompt, by its index and in the order of these."""
    found, at = dict[int, PartialState | None](), 0
    for entry in state["open"]:
        sizes = [entry[name] for name in PartialState._fields]
        ends = (at + sizes[0], at + sum(sizes))
        parts = [state["known"][at : ends[0]], state["known"][ends[0] : ends[1]]]
        at = ends[1]
        found[entry["index"]] = PartialState(*parts) if sum(sizes) else None
    return {index: found[index] for index in sorted(found)}


def _joined(parts: Sequence[Any]) -> Tensor:
    return torch.cat([torch.zeros(0, dtype=torch.uint8), *parts])


def _staleness(groups: list[Group], step: int) -> dict[str, float]:
    """Steps between the weights that sampled a token and those that train on it:
    mean over tokens, and largest.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(rollout.length for rollout in rollouts)
    total = sum(step * rollout.length - rollout.version_sum for rollout in rollouts)
    oldest = min(rollout.oldest_version for rollout in rollouts)
    return {"staleness_mean": total / max(1, tokens), "staleness_max": float(step - oldest)}
