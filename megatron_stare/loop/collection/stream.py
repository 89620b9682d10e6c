"""Batches from a stream of rollouts that runs beside the steps:
what rank 0's producer has ready, on every rank in outline.

fully_async: sampling never stops; a step takes the oldest groups there are, new weights reach
rollouts in flight, and every token knows the version that sampled it. on_policy with
rollout.abort_long_tail: sampling goes on until the batch is full, then what is in flight is ended,
and (rollout.partial_rollout) continued in the next step.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from megatron_stare.config import Config
from megatron_stare.data.prompts import PromptStream
from megatron_stare.loop.agreement import agreed
from megatron_stare.loop.collection.collect import Collected, collected_of
from megatron_stare.loop.collection.journal import forget, journal_directory
from megatron_stare.loop.collection.outlines import shared
from megatron_stare.loop.collection.producer import Producer
from megatron_stare.loop.collection.shares import Shares
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group
from megatron_stare.rollout.engine import Engine


class StreamCollector:
    """Implements loop.collect.Collector."""

    def __init__(
        self,
        config: Config,
        stream: PromptStream,
        engine: Engine,
        shares: Shares,
        topology: Topology,
    ) -> None:
        self.config, self.engine, self.topology = config, engine, topology
        self.producer: Producer | None = None
        if topology.is_first:
            self.producer = Producer(config, stream, shares.own)
        self._saved_step = 0
        self._training: list[Group] = []  # of the step under way
        self._taken: tuple[list[Group], list[Group]] = ([], [])  # chosen, and all judged; on rank 0

    def collect(self, step: int) -> Collected:
        """The oldest ready groups, once there are enough. NoSignalError as RoundCollector's."""
        counts = agreed(self.topology, lambda: self._take(step))[0]
        self._training = self._taken[0]
        chosen, judged = (shared(part, self.topology)[0] for part in self._taken)
        self._taken = ([], [])
        collected = collected_of(chosen, judged or chosen, counts, self.config)
        return Collected(
            collected.groups, collected.signal, collected.metrics | _staleness(chosen, step)
        )

    def settle(self) -> None:
        """Sampling goes on under the new weights."""
        self._training = []

    def begin(self, step: int) -> None:
        """fully_async: sampling goes on anyway. abort_long_tail:
        what was ended begins again with the step.
        """

    def state(self) -> dict[str, Any]:
        """Rank 0's; the journal keeps what is finished after it."""
        if self.producer is None:
            return {}
        before = self._saved_step - self.config.rollout.staleness_limit
        forget(journal_directory(self.config), before)
        self._saved_step = self.producer.step
        return self.producer.state(self._training)

    def stop(self) -> None:
        """Have the producer end what is in flight, and fail whoever waits for it."""
        if self.producer is not None:
            self.producer.stop()

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave on rank 0."""
        if self.producer is not None:
            self.producer.load_state(state)

    def close(self) -> None:
        """End the producer; the engine's owner ends what is in flight."""
        if self.producer is not None:
            self.producer.close()

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


def _staleness(groups: list[Group], step: int) -> dict[str, float]:
    """Steps between the weights that sampled a token and those that train on it:
    mean over tokens, and largest.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(rollout.length for rollout in rollouts)
    total = sum(step * rollout.length - rollout.version_sum for rollout in rollouts)
    oldest = min(rollout.oldest_version for rollout in rollouts)
    return {"staleness_mean": total / max(1, tokens), "staleness_max": float(step - oldest)}
