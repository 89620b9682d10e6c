"""Batches from whole rounds of prompts (see rollout_buffer.py).

on_policy: a step's batch is sampled when the step asks for it, by the weights that it trains.
one_step_off: it is sampled while the step before trains, by the weights before. `finish_step` waits
for it before new weights go to the engine, so that every batch is one step old and a run can be
repeated bit for bit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_stare.collect.group_exchange import all_gather_groups, group_state, scatter_groups
from megatron_stare.collect.journal import forget, groups_in, journal_directory
from megatron_stare.collect.resampling import Joined, Method, find_method
from megatron_stare.collect.rollout_buffer import (
    Collected,
    OldLogprobs,
    added,
    collected_of,
    is_wanted,
    too_few,
)
from megatron_stare.collect.rollout_worker import Resampling, RolloutWorkers, decoded_together
from megatron_stare.config import Config, NoSignalError
from megatron_stare.data.prompts import PromptStream
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group, Prompt
from megatron_stare.rollout.engine import Engine
from megatron_stare.scoring.advantages import PromptHistory, has_gradient, with_advantages

_DROPPED = (
    "step {}: {} groups beyond the last batch are of older weights and are dropped, now and "
    "in later steps (stale_groups_dropped; rollout.max_staleness={}); a lower "
    "rollout.over_sampling_batch_size samples fewer of them, a higher max_staleness trains them"
)


@dataclass(frozen=True)
class _SamplingRound:
    """Prompts in flight since `_start_round`."""

    engine: Engine
    topology: Topology
    ranks: Sequence[int]  # that samples each prompt
    mine: Sequence[Future[Group]]  # those of this rank

    def finish(self) -> list[Group]:
        """The judged groups in prompt order, on every rank; only the rank that sampled a group has
        its tokens. A failure on one rank is raised on all. Collective.
        """
        mine: list[Group] = []
        agreed(self.topology, lambda: mine.extend(self._mine()))
        everyone = [iter(groups) for groups in all_gather_groups(mine, self.topology)]
        return [next(everyone[rank]) for rank in self.ranks]

    def _mine(self) -> list[Group]:
        self.engine.wait(self.mine)
        return [group.result() for group in self.mine]


def _start_round(
    engine: Engine,
    workers: RolloutWorkers,
    prompts: Sequence[Prompt],
    topology: Topology,
    again: Resampling | None = None,
    together: int = 0,
) -> _SamplingRound:
    """Send each prompt to its worker, under the engine's weights; with `again` for more rollouts of
    a judged prompt. `together` replaces RolloutWorkers.together.
    """
    places = workers.assigned(prompts, together)
    groups: dict[int, Future[Group]] = {}
    for number, worker in enumerate(workers.own):
        worker.set_step(engine.version)
        own = [
            p for p, place in zip(prompts, places, strict=True) if place == (topology.rank, number)
        ]
        groups |= zip([p.index for p in own], worker.start(own, resampling=again), strict=True)
    mine = [groups[prompt.index] for prompt in prompts if prompt.index in groups]
    return _SamplingRound(engine, topology, [rank for rank, _ in places], mine)


class _Position(NamedTuple):
    """The state of a RoundBuffer, without its resampling method's."""

    stream: int
    pending: tuple[int, ...]
    surplus: tuple[Group, ...]
    ahead: Collected | None
    history: PromptHistory


class RoundBuffer:
    """Implements RolloutBuffer with rounds of rollout.over_sampling_batch_size prompts."""

    by_rollout = False  # whether `surplus` holds single rollouts, which have advantages already

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
        self.surplus: list[Group] = []  # ready, not in a batch yet
        self.ahead: Collected | None = None  # one_step_off: the next step's batch
        self.pending: list[int] = []  # prompts of an interrupted run, drawn first
        self._round: _SamplingRound | None = (
            None  # a batch's first round, while it is being sampled
        )
        # the stream's position and the pending draws before that round
        self._start: tuple[int, tuple[int, ...]] = (0, ())
        self._failure: NoSignalError | None = None
        self._step, self._warned, self._saved_version = 0, False, 0
        self._before: _Position | None = None  # of the step that is being trained
        self.history = PromptHistory()
        self.resampling = find_method(config)
        self._surprisal = 0.0  # mean, of the last step that was measured

    def collect(self, step: int) -> Collected:
        """The next batch. Surplus groups of earlier steps come first,
        unless older than rollout.max_staleness.

        Where too few groups carry signal after max_generation_rounds: the groups there are, if
        rollout.accept_partial_batch (with none at all, the last round's, and `signal` false); else
        NoSignalError, and TaskSolved where the reason is that nearly every response is right.
        """
        if self._failure is not None:
            raise self._failure
        self._step, self._before = step, self._position()
        collected, self.ahead = self.ahead or self._filled(step), None
        if self._one_step_off and step + 1 < self.config.train.num_rollout:
            self._begin_round()
        return collected

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """one_step_off: wait for the next step's batch. An error is raised by its `collect`."""
        self._before, self._surprisal = None, measured.get("surprisal", self._surprisal)
        if self._round is not None:
            try:
                self.ahead = self._filled(self._step + 1)
            except NoSignalError as error:
                self._failure = error

    def prefetch(self, step: int) -> None:
        """Start the next round, on servers. An embedded engine would only share its time between
        the round and the evaluation.
        """
        if self.config.rollout.engine != "sglang" or self._failure is not None:
            return
        if self._one_step_off:
            needed = self.ahead is not None and step + 1 < self.config.train.num_rollout
        else:
            needed = step < self.config.train.num_rollout and not self._has_batch(step)
        if needed:
            self._begin_round()

    def state(self) -> dict[str, Any]:
        """Numbers, and groups as bytes (journal.py). A resumed run draws the prompts of a round in
        flight again.
        """
        if self.topology.is_first:
            before = self._saved_version - self.config.rollout.staleness_limit
            forget(journal_directory(self.config), before)
            self._saved_version = self.engine.version
        position, pending, surplus, ahead, history = self._before or self._position()
        return {
            "position": position,
            "pending": list(pending),
            "surplus": group_state(surplus, self.topology),
            "ahead": vars(ahead) | {"groups": group_state(ahead.groups, self.topology)}
            if ahead
            else None,
            "surprisal": self._surprisal,
            "history": history.rows,
        }

    def stop(self) -> None:
        """Stop this rank's workers."""
        for worker in self.workers.own:
            worker.stop()

    def _position(self) -> _Position:
        position, pending = self._start if self._round else self._place()
        return _Position(position, pending, tuple(self.surplus), self.ahead, self.history.copy())

    def _place(self) -> tuple[int, tuple[int, ...]]:
        return self.stream.position, tuple(self.pending)

    def _go_back(self) -> None:
        """Return to the state before the round, so that a resumed run draws its prompts again."""
        self.stream.position, self.pending = self._start[0], list(self._start[1])

    def _draw(self, count: int) -> list[Prompt]:
        first, self.pending = self.pending[:count], self.pending[count:]
        rest = self.stream.draw(count - len(first)) if count > len(first) else []
        return [*(self.stream.at(index) for index in first), *rest]

    def load_state(self, state: dict[str, Any]) -> None:
        """The state of this class or of a StreamBuffer, whose ready groups become surplus and whose
        open prompts are drawn first.
        """
        self.stream.position = state["position"]
        self.history = PromptHistory(state["history"])
        if "ready" in state:
            self.surplus = self._scattered(state["ready"])
            self.pending = sorted(entry["index"] for entry in state["open"])
            return
        self.pending = list(state.get("pending", ()))
        self._surprisal = state.get("surprisal", 0.0)
        self.surplus = self._scattered(state["surplus"])
        # Groups and single rollouts do not mix: their prompts are sampled again.
        if self.by_rollout != ("replay" in state):
            self.pending = sorted({*self.pending, *(one.prompt.index for one in self.surplus)})
            self.surplus = []
        if state["ahead"]:
            groups = tuple(self._scattered(state["ahead"]["groups"]))
            self.ahead = Collected(**(state["ahead"] | {"groups": groups}))

    def close(self) -> None:
        """End the workers. Closing the engine is its owner's job."""
        self.workers.close()

    def _scattered(self, content: Any) -> list[Group]:
        return scatter_groups(groups_in(content), self.topology)

    def _filled(self, step: int) -> Collected:
        """A batch for the weights of version `step`."""
        rollout = self.config.rollout
        wanted = rollout.rollout_batch_size
        ready, dropped = self._fresh_or_warned(step)
        sampled: list[Group] = []
        rounds = 0
        if self._round is None:
            self._start = self._place()
        while self._round or (len(ready) < wanted and rounds < rollout.max_generation_rounds):
            size = self._size(wanted - len(ready), sampled, rounds)
            current, self._round = self._round or self._begin(size), None
            try:
                fresh = current.finish()
            except Exception:
                self._go_back()
                raise
            sampled += fresh
            ready += [group for group in fresh if is_wanted(group, rollout)]
            rounds += 1
        if len(ready) < wanted and not rollout.accept_partial_batch:
            self._go_back()
            raise too_few(self.config, len(ready), sampled, f"{rounds} generation rounds")
        chosen, self.surplus = ready[:wanted] or fresh[:wanted], ready[wanted:]
        counts = {
            "generation_rounds": rounds,
            "surplus_groups": len(self.surplus),
            "stale_groups_dropped": dropped,
            **self._counts(),
        }
        return self._resampled(
            collected_of(chosen, sampled or chosen, counts, self.config, self.history)
        )

    def _resampled(self, collected: Collected) -> Collected:
        """The batch after the resampling method, if there is one."""
        if self.resampling is None:
            return collected
        groups, metrics = self._joined(self.resampling, collected.groups)
        signal = any(has_gradient(group) for group in groups)
        return Collected(groups, signal, collected.metrics | metrics)

    def _joined(self, method: Method, groups: Sequence[Group]) -> Joined:
        """The groups after a resampling method. Every rank uses rank 0's surprisal."""
        surprisal = self.topology.gather(self._surprisal)[0]
        indices, again = method.asks(groups, surprisal)
        fresh: Sequence[Group] = ()
        if indices:
            prompts = [self.stream.at(index) for index in indices]
            together = self.workers.together
            if together > 1:
                together = decoded_together(self.config, again.samples)
            begun = _start_round(self.engine, self.workers, prompts, self.topology, again, together)
            fresh = with_advantages(begun.finish(), self.config.scoring)
        return method.joined(groups, fresh, surprisal)

    def _counts(self) -> Counter[str]:
        """The counts of all workers of all ranks, summed."""
        own = added(worker.counts() for worker in self.workers.own)
        return added(self.topology.gather(own)) if len(self.workers.ranks) > 1 else own

    @property
    def _one_step_off(self) -> bool:
        return self.config.rollout.asynchrony == "one_step_off"

    def _fresh(self, step: int) -> list[Group]:
        """The surplus groups that the weights of version `step` may train on."""
        limit = self.config.rollout.staleness_limit
        return [group for group in self.surplus if step - group.oldest_version <= limit]

    def _has_batch(self, step: int) -> bool:
        return len(self._fresh(step)) >= self.config.rollout.rollout_batch_size

    def _fresh_or_warned(self, step: int) -> tuple[list[Group], int]:
        """`_fresh`, and the number of other groups, which are dropped; a warning says so once."""
        ready = self._fresh(step)
        dropped = len(self.surplus) - len(ready)
        if dropped and not self._warned and self.topology.is_first:
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

    def _begin(self, size: int) -> _SamplingRound:
        return _start_round(self.engine, self.workers, self._draw(size), self.topology)
