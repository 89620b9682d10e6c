"""The rollout buffer: prompts are sampled, judged, and handed to the trainer in batches.

           drawn            sent to a worker        judged, passes the filter     in a batch
    prompt -----> WAITING -------------> IN_FLIGHT ---------------------> READY ----------> CONSUMED
                     ^                       |                              |
                     +---- resumed run ------+---- no signal, too old ------+-----> dropped

How prompts are sampled follows from rollout.asynchrony:

    on_policy       rounds of prompts on every rank with a worker, when a step asks for its batch
    one_step_off    the same, while the step before trains; every batch is one step old
    fully_async     without end, by a dispatcher on rank 0 (dispatcher.py); max_staleness bounds the
                    age of a group
    long_tail       on_policy with a dispatcher: what is in flight when a batch is full is aborted,
                    unless long_tail=wait

A filter (resampling.py) chooses what becomes ready: groups with signal, or single rollouts.

Invariants:
- A drawn prompt is consumed once at most; a checkpoint keeps every prompt that is not consumed.
  Only rollouts of the replay buffer are trained again.
- No group older than rollout.max_staleness is trained; 0 is synchronous.
- A group holds all rollouts of its prompt, from one judge call.
- All ranks choose the same batch; each group's tokens are on one rank.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from megatron_stare.collect.batch import (
    Collected,
    carries_signal,
    metrics_of,
    staleness,
    too_few,
)
from megatron_stare.collect.dispatcher import PromptDispatcher
from megatron_stare.collect.journal import PartialRollouts, forget, journal_directory
from megatron_stare.collect.resampling import (
    Joined,
    Method,
    OldLogprobs,
    ReplayBuffer,
    count_rollouts,
    cut,
    find_method,
    is_wanted,
)
from megatron_stare.collect.rounds import (
    RolloutWorkers,
    SamplingRound,
    all_gather_groups,
    group_state,
    groups_of,
    partial_of,
    partial_state,
    scatter_groups,
    start_round,
)
from megatron_stare.collect.sampling_settings import is_streamed, split_by_settings
from megatron_stare.config import Config, NoSignalError
from megatron_stare.data.prompts import PromptStream
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group, Rollout
from megatron_stare.rollout.engine import Engine
from megatron_stare.scoring.advantages import PromptHistory, with_advantages

_DROPPED = (
    "step {}: {} groups beyond the last batch are of older weights and are dropped, now and "
    "in later steps (stale_groups_dropped; rollout.max_staleness={}); a lower "
    "rollout.over_sampling_batch_size samples fewer of them, a higher max_staleness trains them"
)


class _Position(NamedTuple):
    """The prompts of a buffer that samples in rounds, by their states."""

    stream: int
    waiting: tuple[int, ...]
    ready: tuple[Group, ...]
    ahead: Collected | None
    history: PromptHistory


class RolloutBuffer:
    """The batches of a run, in order. Every method but `stop` is collective."""

    def __init__(
        self,
        config: Config,
        stream: PromptStream,
        engine: Engine,
        workers: RolloutWorkers,
        topology: Topology,
    ) -> None:
        self.config, self.stream, self.engine = config, stream, engine
        self.workers, self.topology = workers, topology
        self.streamed = is_streamed(config)
        self.dispatcher: PromptDispatcher | None = None
        if self.streamed and topology.is_first:
            self.dispatcher = PromptDispatcher(config, stream, workers)
        self.history = PromptHistory()
        self.method = find_method(config)
        self.by_rollout = self.method is not None and self.method.by_rollout
        self.replay = ReplayBuffer(config) if self.by_rollout else None
        self.full = self.replay.full if self.replay else config.rollout.rollout_batch_size
        self.waiting: list[int] = []  # prompts of an interrupted run, drawn first
        self.ready: list[Group] = []  # not in a batch yet; with `by_rollout`, of what is left
        self.ahead: Collected | None = None  # one_step_off: the next step's batch
        self._round: SamplingRound | None = None  # a batch's first round, while it is sampled
        # the stream's position and the waiting prompts before that round
        self._start: tuple[int, tuple[int, ...]] = (0, ())
        self._batch: Collected | None = None  # the one that is being trained
        self._before: _Position | None = None  # before that batch
        self._failure: NoSignalError | None = None
        self._step, self._warned, self._saved_version = 0, False, 0
        self._surprisal = 0.0  # mean, of the last step that was measured
        self._changed = 0  # rollouts of the checkpoint that other settings sampled

    def collect(self, step: int) -> Collected:
        """The batch of step `step`, to be trained by the weights of that version: the oldest ready
        groups, unless older than rollout.max_staleness.

        Where too few carry signal after max_generation_rounds: what there is, if
        rollout.accept_partial_batch (with none at all, the last groups, and `signal` false); else
        NoSignalError, and TaskSolved where the reason is that nearly every response is right.
        """
        if self._failure is not None:
            raise self._failure
        self._step, self._before = step, self._position()
        if self.replay is not None and self.replay.is_turn:
            groups = tuple(self.replay.batch(step))
            metrics = {"groups": len(groups), "replayed_rollouts": count_rollouts(groups)}
            batch = Collected(groups, True, {key: float(n) for key, n in metrics.items()})
        else:
            batch, self.ahead = self.ahead or self._filled(step), None
        if self.streamed or self.config.rollout.staleness_limit:
            aged = batch.metrics | staleness(batch.groups, step)
            batch = dataclasses.replace(batch, metrics=aged)
        self._batch = batch
        if self._one_step_off and step + 1 < self.config.train.num_rollout:
            self._begin_round()
        return batch

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """Called before the engine gets new weights: finish sampling that must not see them. An
        error is raised by the next `collect`. `measured`, `old`: the step's metrics and old
        log-probs, which later batches may need.
        """
        self._surprisal = measured.get("surprisal", self._surprisal)
        if self.replay is not None:
            assert self._batch is not None, "collect came before"
            self.replay.finish_step(self._batch.groups, old)
        self._batch = self._before = None
        if self._round is not None:
            try:
                self.ahead = self._filled(self._step + 1)
            except NoSignalError as error:
                self._failure = error

    def prefetch(self, step: int) -> None:
        """Called before the weights of version `step` are evaluated: start the next round, on
        servers. An embedded engine would only share its time between the round and the evaluation.
        """
        if self.streamed or self.config.rollout.engine != "sglang" or self._failure is not None:
            return
        if self._one_step_off:
            needed = self.ahead is not None and step + 1 < self.config.train.num_rollout
        else:
            needed = step < self.config.train.num_rollout and not self._has_batch(step)
        if needed:
            self._begin_round()

    def stop(self) -> None:
        """Abort sampling, from any thread: a waiting `collect` raises an EngineError."""
        if self.dispatcher is not None:
            self.dispatcher.stop()
        elif self.workers.own is not None:
            self.workers.own.stop()

    def close(self) -> None:
        """End this rank's worker. Closing the engine is its owner's job."""
        if self.workers.own is not None:
            self.workers.own.close()

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, with groups as bytes (journal.py). Between `collect` and
        `finish_step` a step that was not finished is trained again: on the batch of a dispatcher,
        or from the state before `collect`, with the same prompts.

        The partial rollouts of a dispatcher's prompts are kept; tokens that the engine is still
        producing are not. The prompts of a round in flight are drawn again.
        """
        if self.topology.is_first:
            before = self._saved_version - self.config.rollout.staleness_limit
            forget(journal_directory(self.config), before)
            self._saved_version = self.engine.version
        partial: PartialRollouts = {}
        if self.streamed:
            (position, waiting, ready, ahead, history), partial = self._streamed_position()
        else:
            position, waiting, ready, ahead, history = self._before or self._position()
        groups = group_state(ahead.groups, self.topology) if ahead else None
        state = {
            "position": position,
            "open": sorted(waiting),
            "partial": partial_state(partial, self.topology),
            "ready": group_state(ready, self.topology),
            "ahead": vars(ahead) | {"groups": groups} if ahead else None,
            "surprisal": self._surprisal,
            "history": dict(history),
            "by_rollout": self.by_rollout,
        }
        if self.replay is not None:
            replay = group_state(self.replay.groups, self.topology)
            counts = {"trained": self.replay.trained, "replayed": self.replay.replayed}
            state["replay"] = counts | {"groups": replay}
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state, also of a run with another number of ranks, another way of
        sampling or other settings. Prompts whose groups this run would not sample in the same way
        are sampled again.
        """
        ahead = groups_of(state["ahead"]["groups"]) if state["ahead"] else []
        groups, replay = [*ahead, *groups_of(state["ready"])], state.get("replay")
        fits = state["by_rollout"] == self.by_rollout  # groups and single rollouts do not mix
        whole = not self.by_rollout
        usable, other = split_by_settings(groups, self.config, whole) if fits else ([], groups)
        open_ = sorted({*state["open"], *(group.prompt.index for group in other)})
        self.stream.position, self._surprisal = state["position"], state["surprisal"]
        self.history = PromptHistory(state["history"])
        # Only one_step_off trains a batch of the weights before; else it must be fresh enough.
        size = len(ahead) if self._one_step_off and not other else 0
        self.ready = scatter_groups(usable[size:], self.topology, [0] if self.streamed else ())
        if not self.streamed:
            self.waiting = open_
        elif self.dispatcher is not None:
            partial = partial_of(state["partial"]) if "partial" in state else {}
            self.dispatcher.load_state(state["position"], open_, partial)
        if size:
            batch = tuple(scatter_groups(usable[:size], self.topology))
            self.ahead = Collected(**(state["ahead"] | {"groups": batch}))
        if self.replay is not None and replay is not None:
            usable, old = split_by_settings(groups_of(replay["groups"]), self.config, whole)
            self.replay.load_state(scatter_groups(usable, self.topology), replay)
            other = [*other, *old]
        self._changed = count_rollouts(other)

    def _position(self) -> _Position:
        position, waiting = self._start if self._round else self._place()
        return _Position(position, waiting, tuple(self.ready), self.ahead, self.history.copy())

    def _place(self) -> tuple[int, tuple[int, ...]]:
        return self.stream.position, tuple(self.waiting)

    def _go_back(self) -> None:
        """Return to the state before the round, so that a resumed run draws its prompts again."""
        if not self.streamed:
            self.stream.position, self.waiting = self._start[0], list(self._start[1])

    def _streamed_position(self) -> tuple[_Position, PartialRollouts]:
        """The position, in which the batch that is being trained is ready again, and the partial
        rollouts of the prompts that wait.
        """
        worker, own = self.workers.own, dict[int, Mapping[int, Rollout]]()
        # Before rank 0 says what is open: what is judged meanwhile is among its ready groups.
        agreed(self.topology, lambda: own.update(worker.partial_rollouts() if worker else {}))
        position, open_, judged = self.dispatcher.state() if self.dispatcher else (0, [], [])
        position, open_ = self.topology.gather((position, open_))[0]
        partial = {index: own[index] for index in open_ if index in own}
        training = self._batch.groups if self._batch else ()
        ready = (*training, *self.ready, *self._broadcast(judged))
        history = self._before.history if self._before else self.history
        return _Position(position, tuple(open_), ready, None, history), partial

    def _filled(self, step: int) -> Collected:
        """A batch for the weights of version `step`."""
        ready, dropped = self._fresh_or_warned(step)
        sampled, joined, rounds = list[Group](), dict[str, float](), 0
        fresh: Sequence[Group] = ()
        if self._round is None:
            self._start = self._place()
        while self._needs_more(ready, rounds):
            fresh = self._judged(step, ready, sampled, rounds)
            fresh, (groups, metrics) = self._filtered(fresh)
            sampled += fresh
            current = [g for g in groups if not (self.streamed and self._is_stale(g, step))]
            dropped += len(groups) - len(current)
            ready += current
            joined = {key: joined.get(key, 0.0) + value for key, value in metrics.items()}
            rounds += 1
        if self.streamed:
            ready.sort(key=lambda group: (group.oldest_version, group.prompt.index))
            self.ready = ready
        there = self._count(ready)
        if there < self.full and not self.config.rollout.accept_partial_batch:
            self._go_back()
            raise self._too_few(there, sampled, rounds)
        chosen, self.ready = self._part(ready, 0, self.full), self._part(ready, self.full, there)
        if self.dispatcher is not None:
            self.dispatcher.keep(len(self.ready))
        counts = self._counts() | {"stale_groups_dropped": dropped}
        if not self.streamed:
            counts["generation_rounds"] = rounds
        if self.by_rollout:
            return self._of_rollouts(chosen, fresh, sampled, counts, joined)
        chosen = chosen or list(fresh[: self.full])  # measured, and not trained
        metrics = metrics_of(chosen, sampled or chosen, counts, self.config)
        batch = with_advantages(chosen, self.config.scoring, self.history)
        if self.method is not None:
            batch, more = self._joined(self.method, batch)
            metrics |= more
        return Collected(batch, carries_signal(batch, self.config), metrics)

    def _needs_more(self, ready: Sequence[Group], rounds: int) -> bool:
        """Whether a batch needs another round. A dispatcher is asked once for each batch."""
        if self.streamed:
            return not rounds
        missing = self._count(ready) < self.full
        return bool(self._round) or (missing and rounds < self.config.rollout.max_generation_rounds)

    def _judged(
        self, step: int, ready: Sequence[Group], sampled: Sequence[Group], rounds: int
    ) -> list[Group]:
        """More judged groups, on every rank; only the rank that sampled a group has its tokens."""
        if self.streamed:
            return self._taken(step, len(ready))
        missing = self.full - self._count(ready)
        size = self._size() if self.by_rollout else self._size(missing, sampled, rounds)
        current, self._round = self._round or self._begin(size), None
        try:
            return current.finish()
        except Exception:
            self._go_back()
            raise

    def _taken(self, step: int, kept: int) -> list[Group]:
        """Groups that the dispatcher's worker judged, once they fill a batch with `kept` more."""
        dispatcher, judged = self.dispatcher, list[Group]()

        def wait() -> None:
            waiting: list[Future[None]] = []
            if dispatcher is not None:
                dispatcher.set_step(step, self._limit(step), kept)
                waiting = [dispatcher.enough(self.full - kept)]
            self.engine.wait(waiting)
            if self.config.rollout.asynchrony != "fully_async":
                self.engine.wait([dispatcher.pause()] if dispatcher is not None else [])
            if dispatcher is not None:
                judged.extend(dispatcher.next_groups())

        agreed(self.topology, wait)
        return self._broadcast(judged)

    def _limit(self, step: int) -> int:
        """Prompts between drawn and consumed, for a dispatcher: as many as are consumed before they
        are too old, or before the run ends.
        """
        rollout, left = self.config.rollout, self.config.train.num_rollout - step
        if rollout.asynchrony != "fully_async":
            return rollout.over_sampling_batch_size
        return min(rollout.staleness_limit + 1, left) * rollout.rollout_batch_size

    def _broadcast(self, groups: Sequence[Group]) -> list[Group]:
        """Rank 0's groups, on every rank."""
        own = groups if self.topology.is_first else []
        return all_gather_groups(own, self.topology)[0]

    def _filtered(self, fresh: Sequence[Group]) -> tuple[Sequence[Group], Joined]:
        """Judged groups, and what of them becomes ready."""
        if self.method is None or not self.by_rollout:
            wanted = [group for group in fresh if is_wanted(group, self.config.rollout)]
            return fresh, Joined(tuple(wanted), {})
        fresh = with_advantages(fresh, self.config.scoring)
        groups, metrics = self._joined(self.method, fresh)
        # every prompt that is sampled again is sampled equally often
        weighted = metrics["resampled_reward"] * metrics["resampled_prompts"]
        return fresh, Joined(groups, metrics | {"resampled_reward": weighted})

    def _of_rollouts(
        self,
        chosen: Sequence[Group],
        fresh: Sequence[Group],
        sampled: Sequence[Group],
        counts: dict[str, int],
        joined: dict[str, float],
    ) -> Collected:
        """A batch of single rollouts, which have their advantages."""
        signal = carries_signal(chosen, self.config)
        chosen = chosen or list(fresh)  # measured, and not trained
        if joined:
            joined["resampled_reward"] /= max(1.0, joined["resampled_prompts"])
        metrics = metrics_of(chosen, sampled, counts, self.config) | joined
        metrics["buffered_rollouts"] = float(count_rollouts(self.ready))
        replay = self.replay.groups if self.replay else ()
        metrics["replay_buffer_rollouts"] = float(count_rollouts(replay))
        return Collected(tuple(chosen), signal, metrics)

    def _joined(self, method: Method, groups: Sequence[Group]) -> Joined:
        """The groups after a resampling method. Every rank uses rank 0's surprisal."""
        surprisal = self.topology.gather(self._surprisal)[0]
        indices, again = method.asks(groups, surprisal)
        fresh: Sequence[Group] = ()
        if indices:
            prompts = [self.stream.at(index) for index in indices]
            begun = start_round(self.engine, self.workers, prompts, self.topology, again)
            fresh = with_advantages(begun.finish(), self.config.scoring)
        return method.joined(groups, fresh, surprisal)

    def _too_few(self, there: int, sampled: Sequence[Group], rounds: int) -> NoSignalError:
        effort = f"{rounds} generation rounds"
        if self.streamed:
            effort = f"{len(sampled)} sampled groups (rollout.max_generation_rounds)"
        return too_few(self.config, there, sampled, effort, self.by_rollout)

    def _counts(self) -> Counter[str]:
        """The counts of all workers of all ranks, summed, and of the prompts by their states."""
        found = Counter(self.workers.own.counts() if self.workers.own is not None else {})
        if self.dispatcher is not None:
            found["open_prompts"] = self.dispatcher.open_prompts
            if self.dispatcher.gathers:
                found["long_round"] = int(self.dispatcher.is_long_round)
        if self.streamed or len(self.workers.ranks) > 1:
            everyone, found = self.topology.gather(found), Counter[str]()
            for counts in everyone:
                found.update(counts)
        found["surplus_groups"] = len(self.ready)
        if self._changed:
            found["changed_rollouts_dropped"] += self._changed
        return found

    @property
    def _one_step_off(self) -> bool:
        return self.config.rollout.asynchrony == "one_step_off"

    def _count(self, groups: Sequence[Group]) -> int:
        return count_rollouts(groups) if self.by_rollout else len(groups)

    def _part(self, groups: Sequence[Group], start: int, stop: int) -> list[Group]:
        return cut(groups, start, stop) if self.by_rollout else list(groups[start:stop])

    def _is_stale(self, group: Group, step: int) -> bool:
        return step - group.oldest_version > self.config.rollout.staleness_limit

    def _fresh(self, step: int) -> list[Group]:
        """The ready groups that the weights of version `step` may train on."""
        return [group for group in self.ready if not self._is_stale(group, step)]

    def _has_batch(self, step: int) -> bool:
        replays = self.replay is not None and self.replay.is_turn
        return replays or self._count(self._fresh(step)) >= self.full

    def _fresh_or_warned(self, step: int) -> tuple[list[Group], int]:
        """`_fresh`, and the number of other groups, which are dropped; a warning says so once."""
        ready = self._fresh(step)
        dropped = len(self.ready) - len(ready)
        silent = self.streamed or self._warned or not self.topology.is_first
        if dropped and not silent:
            self._warned, limit = True, self.config.rollout.staleness_limit
            print(_DROPPED.format(step + 1, dropped, limit), file=sys.stderr)
        return ready, dropped

    def _begin_round(self) -> None:
        if self._round is None:
            self._start = self._place()
            self._round = self._begin(self._size())

    def _size(self, missing: int = 0, sampled: Sequence[Group] = (), rounds: int = 0) -> int:
        """The number of prompts of a step's next round. With over-sampling, later rounds, except
        the last one allowed, ask for as many as the missing groups need at the rate at which the
        step's groups so far carried signal.
        """
        rollout = self.config.rollout
        whole = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        last = rounds + 1 == rollout.max_generation_rounds
        if not sampled or last or not rollout.over_sampling_batch_size:
            return whole
        useful = sum(is_wanted(group, rollout) for group in sampled)
        return min(whole, -(-missing * len(sampled) // max(1, useful)))

    def _begin(self, size: int) -> SamplingRound:
        first, self.waiting = self.waiting[:size], self.waiting[size:]
        rest = self.stream.draw(size - len(first)) if size > len(first) else []
        prompts = [*(self.stream.at(index) for index in first), *rest]
        return start_round(self.engine, self.workers, prompts, self.topology)
