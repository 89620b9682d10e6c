"""Batches from a stream of rollouts that runs beside the steps: what rank 0's producer has ready,
whole on the rank whose share sampled it, on the others in outline.

fully_async: sampling never stops; a step takes the oldest groups there are, new weights reach
rollouts in flight, and every token knows the version that sampled it. on_policy with
rollout.abort_long_tail: sampling goes on until the batch is full, then what is in flight is ended,
and (rollout.partial_rollout) continued in the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from megatron_stare.collect.collect import Collected, OldLogprobs, collected_of
from megatron_stare.collect.frames import groups_in
from megatron_stare.collect.group_exchange import (
    all_gather_groups,
    concatenated,
    group_state,
    scatter_groups,
)
from megatron_stare.collect.journal import forget, journal_directory
from megatron_stare.collect.producer import Producer, Taken
from megatron_stare.collect.rollout_worker import PartialState, RolloutWorkers
from megatron_stare.config import Config
from megatron_stare.data.prompts import PromptStream
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group
from megatron_stare.rollout.engine import Engine


class StreamCollector:
    """Implements loop.collect.Collector."""

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
        self.producer: Producer | None = None
        if topology.is_first:
            self.producer = Producer(config, stream, workers)
        self._saved_step = 0
        self._training: list[Group] = []  # of the step under way
        self._taken = Taken([], [])  # on rank 0

    def collect(self, step: int) -> Collected:
        """The oldest ready groups, once there are enough. NoSignalError as RoundCollector's."""
        counts = agreed(self.topology, lambda: self._take(step))[0]
        taken, self._taken = self._taken, Taken([], [])
        self._training = chosen = self._broadcast(taken.chosen)
        judged = self._broadcast(taken.judged)
        collected = collected_of(chosen, judged or chosen, counts, self.config)
        return Collected(
            collected.groups, collected.signal, collected.metrics | _staleness(chosen, step)
        )

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """Sampling goes on under the new weights."""
        self._training = []

    def prefetch(self, step: int) -> None:
        """fully_async: sampling goes on anyway. abort_long_tail:
        what was ended begins again with the step.
        """

    def state(self) -> dict[str, Any]:
        """Of every rank what it holds, as bytes; the journal keeps what is finished after it. Parts
        in flight are the engine's, and are begun again by a later life.
        """
        if self.producer is not None:
            before = self._saved_step - self.config.rollout.staleness_limit
            forget(journal_directory(self.config), before)
            self._saved_step = self.producer.step
        known: dict[int, PartialState] = {}
        # Before rank 0 says what is open: what is judged meanwhile is among its ready groups.
        agreed(self.topology, lambda: known.update(self._own_known()))
        position, open_, ready = self.producer.state() if self.producer else (0, [], [])
        position, open_ = self.topology.gather((position, open_))[0]
        ready = [*self._training, *self._broadcast(ready)]
        return {
            "position": position,
            **self._open_state({index: known[index] for index in open_ if index in known}, open_),
            "ready": group_state(ready, self.topology),
        }

    def stop(self) -> None:
        """Have the producer end what is in flight, and fail whoever waits for it."""
        if self.producer is not None:
            self.producer.stop()

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave, for any number of ranks; or a RoundCollector, whose surplus is ready
        here.
        """
        open_: Mapping[int, PartialState | None]
        if "surplus" in state:
            ahead = state["ahead"]["groups"] if state["ahead"] else None
            surplus = groups_in(state["surplus"])
            again = [group.prompt.index for group in surplus] if "put_by" in state else []
            groups = [*(groups_in(ahead) if ahead is not None else ()), *([] if again else surplus)]
            open_ = dict.fromkeys(sorted({*state.get("pending", ()), *again}))
        else:
            groups, open_ = groups_in(state["ready"]), _open_of(state)
        ready = scatter_groups(groups, self.topology, [0])
        if self.producer is not None:
            partial = {index: state for index, state in open_.items() if state is not None}
            self.producer.load_state(state["position"], list(open_), ready, partial)

    def close(self) -> None:
        """End the shares; the engine's owner ends what is in flight."""
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
        producer = self.producer
        waiting: list[Future[None]] = []
        if producer is not None:
            producer.advance(step, self._limit(step))
            waiting = [producer.enough(wanted)]
        self.engine.wait(waiting)
        if rollout.asynchrony != "fully_async":
            self.engine.wait(producer.halt() if producer is not None else [])
        if producer is None:
            return {}
        self._taken = producer.take(wanted)
        return dict(producer.counts())

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
