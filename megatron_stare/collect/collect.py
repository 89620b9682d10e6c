"""The batch of one step: sample groups until there are enough that carry signal.

on_policy: a step's batch is sampled when the step asks for it, by the weights it trains.
one_step_off: it was sampled, by the weights before, while the step before trained; `finish_step`
sees it finished before new weights go to the engine, so that every batch is one step old and a run
can be repeated bit for bit.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy

from megatron_stare.collect import sampling
from megatron_stare.collect.frames import groups_in
from megatron_stare.collect.group_exchange import group_state, scatter_groups
from megatron_stare.collect.journal import forget, journal_directory
from megatron_stare.collect.resampling import Joined, Method, find_method
from megatron_stare.collect.rollout_worker import RolloutWorkers, decoded_together
from megatron_stare.collect.sampling import Sampling
from megatron_stare.config import Config, NoSignalError, RolloutConfig
from megatron_stare.data.prompts import PromptStream
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt
from megatron_stare.rollout.engine import Engine
from megatron_stare.scoring.advantages import has_gradient, has_signal, is_kept, with_advantages
from megatron_stare.scoring.judge import judgement_metrics

# ln pi_old of rollouts that a later step trains again: by group and rollout of a batch [length],
# NaN but for loss tokens; None where it is not to be, or where another rank has the rollout.
OldLogprobs = Sequence[Sequence[numpy.ndarray | None]]
_DROPPED = (
    "step {}: {} groups beyond the last batch are of older weights and are dropped, now and "
    "in later steps (stale_groups_dropped; rollout.max_staleness={}); a lower "
    "rollout.over_sampling_batch_size samples fewer of them, a higher max_staleness trains them"
)


@dataclass(frozen=True)
class Collected:
    """The groups to train on, and what sampling them cost.
    `signal` is false where no token has an advantage.
    """

    groups: tuple[Group, ...]
    signal: bool
    metrics: dict[str, float]


class Collector(Protocol):
    """Where a trainer's batches come from. Every method is collective."""

    def collect(self, step: int) -> Collected:
        """The batch of step `step`, to be trained by the weights of that version."""
        ...

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """Called before the engine gets new weights: finish what must not see them. `measured` and
        `old`: what the step has to say of its batch, on which later ones may depend.
        """
        ...

    def prefetch(self, step: int) -> None:
        """Called before the weights of version `step` are evaluated: go on sampling beside it."""
        ...

    def stop(self) -> None:
        """End what is being sampled, from any thread: whoever waits for it gets an EngineError."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep: from `collect` to `finish_step` that of before `collect`, so
        that a step which was not finished is taken again.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        ...

    def close(self) -> None:
        """End what is under way."""
        ...


class _Position(NamedTuple):
    """Where a RoundCollector stands: what its state is made of."""

    stream: int
    pending: tuple[int, ...]
    surplus: tuple[Group, ...]
    ahead: Collected | None


class RoundCollector:
    """Whole rounds of prompts. Its state is the stream's position, surplus groups,
    and the batch sampled ahead.
    """

    queues = False  # whether its surplus is of rollouts that wait, each with its advantage

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
        self.surplus: list[Group] = []
        self.ahead: Collected | None = None  # one_step_off: the next step's batch
        self.pending: list[int] = []  # draws of an earlier collector that should be sampled first
        self._round: Sampling | None = None  # a batch's first round, while it is being sampled
        # the stream's position and the pending draws before that round
        self._start: tuple[int, tuple[int, ...]] = (0, ())
        self._failure: NoSignalError | None = None
        self._step, self._told, self._saved_version = 0, False, 0
        self._before: _Position | None = None  # of the step that is being trained
        self.resampling = find_method(config)
        self._surprisal = 0.0  # mean, of the last step that was measured

    def collect(self, step: int) -> Collected:
        """The next batch. Surplus groups of earlier steps come first,
        unless older than rollout.max_staleness.

        Where too few groups carry signal after max_generation_rounds: the groups there are, if
        rollout.accept_partial_batch (with none at all, the last round's, and `signal` false); else
        NoSignalError.
        """
        if self._failure is not None:
            raise self._failure
        self._step, self._before = step, self._position()
        collected, self.ahead = self.ahead or self._filled(step), None
        if self._one_step_off and step + 1 < self.config.train.num_rollout:
            self._begin_round()
        return collected

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """one_step_off: sample the next step's batch to its end.
        What goes wrong is that step's, and raised there.
        """
        self._before, self._surprisal = None, measured.get("surprisal", self._surprisal)
        if self._round is not None:
            try:
                self.ahead = self._filled(self._step + 1)
            except NoSignalError as error:
                self._failure = error

    def prefetch(self, step: int) -> None:
        """Begin the next round, on servers;
        on one embedded engine the two would only share its time, in any order.
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
        """Of numbers, and of groups as bytes (frames.py).
        A round under way is drawn again by the run that continues from here.
        """
        if self.topology.is_first:
            before = self._saved_version - self.config.rollout.staleness_limit
            forget(journal_directory(self.config), before)
            self._saved_version = self.engine.version
        position, pending, surplus, ahead = self._before or self._position()
        return {
            "position": position,
            "pending": list(pending),
            "surplus": group_state(surplus, self.topology),
            "ahead": vars(ahead) | {"groups": group_state(ahead.groups, self.topology)}
            if ahead
            else None,
            "surprisal": self._surprisal,
        }

    def stop(self) -> None:
        """Have the shares end what is in flight, and fail whoever waits for it."""
        for worker in self.workers.own:
            worker.stop()

    def _position(self) -> _Position:
        position, pending = self._start if self._round else self._place()
        return _Position(position, pending, tuple(self.surplus), self.ahead)

    def _place(self) -> tuple[int, tuple[int, ...]]:
        return self.stream.position, tuple(self.pending)

    def _go_back(self) -> None:
        """Nothing is lost: whoever continues draws the problems since `_start` again."""
        self.stream.position, self.pending = self._start[0], list(self._start[1])

    def _draw(self, count: int) -> list[Prompt]:
        first, self.pending = self.pending[:count], self.pending[count:]
        rest = self.stream.draw(count - len(first)) if count > len(first) else []
        return [*(self.stream.at(index) for index in first), *rest]

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave, here or of a StreamCollector: its ready groups are surplus here, and
        its open prompts are drawn again, first.
        """
        self.stream.position = state["position"]
        if "ready" in state:
            self.surplus = self._scattered(state["ready"])
            self.pending = sorted(entry["index"] for entry in state["open"])
            return
        self.pending = list(state.get("pending", ()))
        self._surprisal = state.get("surprisal", 0.0)
        self.surplus = self._scattered(state["surplus"])
        if self.queues != ("put_by" in state):  # the one's groups are no rollouts of the other's
            self.pending = sorted({*self.pending, *(one.prompt.index for one in self.surplus)})
            self.surplus = []
        if state["ahead"]:
            groups = tuple(self._scattered(state["ahead"]["groups"]))
            self.ahead = Collected(**(state["ahead"] | {"groups": groups}))

    def close(self) -> None:
        """End the shares; the engine's owner ends what is in flight."""
        self.workers.close()

    def _scattered(self, content: Any) -> list[Group]:
        return scatter_groups(groups_in(content), self.topology)

    def _filled(self, step: int) -> Collected:
        """A batch for the weights of version `step`."""
        rollout = self.config.rollout
        wanted = rollout.rollout_batch_size
        ready, dropped = self._fresh_or_told(step)
        sampled: list[Group] = []
        rounds = 0
        if self._round is None:
            self._start = self._place()
        while self._round or (len(ready) < wanted and rounds < rollout.max_generation_rounds):
            under_way, self._round = self._round or self._begin(), None
            try:
                fresh = under_way.finish()
            except Exception:
                self._go_back()
                raise
            sampled += fresh
            ready += [group for group in fresh if is_wanted(group, rollout)]
            rounds += 1
        if len(ready) < wanted and not rollout.accept_partial_batch:
            self._go_back()
            raise NoSignalError(
                too_few(self.config, len(ready), sampled, f"{rounds} generation rounds")
            )
        chosen, self.surplus = ready[:wanted] or fresh[:wanted], ready[wanted:]
        counts = {
            "generation_rounds": rounds,
            "surplus_groups": len(self.surplus),
            "stale_groups_dropped": dropped,
            **self._counts(),
        }
        return self._resampled(collected_of(chosen, sampled or chosen, counts, self.config))

    def _resampled(self, collected: Collected) -> Collected:
        """The batch, and what joins it of the prompts that are sampled again."""
        if self.resampling is None:
            return collected
        groups, metrics = self._joined(self.resampling, collected.groups)
        signal = any(has_gradient(group) for group in groups)
        return Collected(groups, signal, collected.metrics | metrics)

    def _joined(self, method: Method, groups: Sequence[Group]) -> Joined:
        """What a method makes of these groups. Every rank goes by rank 0's figure."""
        surprisal = self.topology.gather(self._surprisal)[0]
        indices, again = method.asks(groups, surprisal)
        fresh: Sequence[Group] = ()
        if indices:
            prompts = [self.stream.at(index) for index in indices]
            together = self.workers.together
            if together > 1:
                together = decoded_together(self.config, again.samples)
            begun = sampling.begin(
                self.engine, self.workers, prompts, self.topology, again, together
            )
            fresh = with_advantages(begun.finish(), self.config.scoring)
        return method.joined(groups, fresh, surprisal)

    def _counts(self) -> Counter[str]:
        """Of all shares, added up."""
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

    def _fresh_or_told(self, step: int) -> tuple[list[Group], int]:
        """These, and how many others there are, which are dropped and told of once."""
        ready = self._fresh(step)
        dropped = len(self.surplus) - len(ready)
        if dropped and not self._told and self.topology.is_first:
            self._told, limit = True, self.config.rollout.staleness_limit
            print(_DROPPED.format(step + 1, dropped, limit), file=sys.stderr)
        return ready, dropped

    def _begin_round(self) -> None:
        if self._round is None:
            self._start = self._place()
            self._round = self._begin()

    def _begin(self) -> Sampling:
        rollout = self.config.rollout
        prompts = self._draw(rollout.over_sampling_batch_size or rollout.rollout_batch_size)
        return sampling.begin(self.engine, self.workers, prompts, self.topology)


def collected_of(
    chosen: Sequence[Group], sampled: Sequence[Group], counts: dict[str, int], config: Config
) -> Collected:
    """The chosen groups with their advantages,
    and the metrics of all that were sampled for them.
    """
    groups = with_advantages(chosen, config.scoring)
    metrics = metrics_of(chosen, sampled, counts, config)
    return Collected(groups, any(has_gradient(group) for group in groups), metrics)


def metrics_of(
    chosen: Sequence[Group], sampled: Sequence[Group], counts: dict[str, int], config: Config
) -> dict[str, float]:
    """Of a batch, and of all that were sampled for it, if any were."""
    if not sampled:
        return {"groups": float(len(chosen))} | {name: float(n) for name, n in counts.items()}
    metrics = _sampling_metrics(sampled) | {"groups": float(len(chosen))}
    kept = sum(is_kept(group, config.rollout.dynamic_sampling_metric) for group in sampled)
    metrics["signal_fraction"] = kept / len(sampled)
    return metrics | {name: float(count) for name, count in counts.items()}


def added(many: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sum of counts by name."""
    total: Counter[str] = Counter()
    for counts in many:
        total.update(counts)
    return total


def is_wanted(group: Group, rollout: RolloutConfig) -> bool:
    """Whether the group may be trained: all are without dynamic sampling."""
    return not rollout.dynamic_sampling or is_kept(group, rollout.dynamic_sampling_metric)


def too_few(config: Config, found: int, sampled: Sequence[Group], effort: str) -> str:
    """Why a batch could not be filled, with the rewards that were seen."""
    histogram = Counter(rollout.reward for group in sampled for rollout in group.rollouts)
    unverifiable = histogram.pop(None, 0)
    rewards = ", ".join(f"{reward:g} x {count}" for reward, count in sorted(histogram.items()))
    rewards += f"{', ' if rewards else ''}unverifiable x {unverifiable}" if unverifiable else ""
    rollout, what = config.rollout, "rewards"
    if rollout.dynamic_sampling_metric == "accuracy":
        what = "verdicts"
        others = sum(has_signal(group) and not is_wanted(group, rollout) for group in sampled)
        if others:
            rewards += f"; {others} groups differ in their rewards alone, which "
            rewards += "rollout.dynamic_sampling_metric=reward would keep"
    return (
        f"only {found} of rollout.rollout_batch_size={rollout.rollout_batch_size} groups "
        f"had differing {what} after {effort} (rewards seen: {rewards}); choose problems of "
        "medium difficulty, check scoring.reward, raise rollout.max_generation_rounds, or set "
        "rollout.accept_partial_batch=true"
    )


def _sampling_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over all sampled rollouts, before any group was dropped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    count = len(rollouts)
    return (
        judgement_metrics(rollouts)
        | {
            "response_length": sum(rollout.length for rollout in rollouts) / count,
            "truncated_fraction": sum(rollout.status == "truncated" for rollout in rollouts)
            / count,
        }
        | {
            f"episode/{name}": sum(rollout.episode.get(name, 0.0) for rollout in rollouts) / count
            for name in sorted({name for rollout in rollouts for name in rollout.episode})
        }
    )
