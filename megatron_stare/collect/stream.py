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
from megatron_stare.collect.frames import groups_in, numbered_frames
from megatron_stare.collect.journal import forget, journal_directory
from megatron_stare.collect.outlines import dealt_out, in_parts, kept, told
from megatron_stare.collect.producer import Producer, Taken
from megatron_stare.collect.shares import Known, Shares
from megatron_stare.config import Config
from megatron_stare.data.prompts import PromptStream
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group, Rollout
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
        self.shares, self.holding = shares, shares.holding
        self.producer: Producer | None = None
        if topology.is_first:
            self.producer = Producer(config, stream, shares)
        self._saved_step = 0
        self._training: list[Group] = []  # of the step under way
        self._taken = Taken([], [], [])  # on rank 0

    def collect(self, step: int) -> Collected:
        """The oldest ready groups, once there are enough. NoSignalError as RoundCollector's."""
        counts, gone = agreed(self.topology, lambda: self._take(step))[0]
        taken, self._taken = self._taken, Taken([], [], [])
        self._training = chosen = told(taken.chosen, self.holding.groups, self.topology)
        judged = told(taken.judged, None, self.topology)
        self._let_go(gone)
        collected = collected_of(chosen, judged or chosen, counts, self.config)
        return Collected(
            collected.groups, collected.signal, collected.metrics | _staleness(chosen, step)
        )

    def finish_step(self, measured: Mapping[str, float], old: OldLogprobs) -> None:
        """Sampling goes on under the new weights."""
        self._let_go([group.prompt.index for group in self._training])
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
        known = dict(self.holding.known)
        # Before rank 0 says what is open: what is judged meanwhile is among its ready groups.
        agreed(self.topology, lambda: known.update(self._own_known()))
        position, open_, ready = self.producer.state() if self.producer else (0, [], [])
        position, open_ = self.topology.gather((position, open_))[0]
        ready = [*self._training, *told(ready, self.holding.groups, self.topology)]
        return {
            "position": position,
            **self._open_state({index: known[index] for index in open_ if index in known}, open_),
            "ready": kept(ready, self.topology),
        }

    def stop(self) -> None:
        """Have the producer end what is in flight, and fail whoever waits for it."""
        if self.producer is not None:
            self.producer.stop()

    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave, for any number of ranks; or a RoundCollector, whose surplus is ready
        here.
        """
        open_: Mapping[int, Known | None]
        if "surplus" in state:
            ahead = state["ahead"]["groups"] if state["ahead"] else []
            surplus = groups_in(state["surplus"])
            again = [group.prompt.index for group in surplus] if "put_by" in state else []
            groups = [*groups_in(ahead), *([] if again else surplus)]
            open_ = dict.fromkeys(sorted({*state.get("pending", ()), *again}))
        else:
            groups, open_ = groups_in(state["ready"]), _open_of(state)
        ready = dealt_out(groups, self.topology, self.shares.ranks)
        self.holding.known |= {
            index: known
            for index, known in open_.items()
            if known is not None and self.shares.holder(index) == self.topology.rank
        }
        if self.producer is not None:
            self.producer.load_state(state["position"], list(open_), ready)
        else:
            mine = [group for group in ready if group.holder == self.topology.rank]
            self.holding.groups |= {group.prompt.index: group for group in mine}

    def close(self) -> None:
        """End the shares; the engine's owner ends what is in flight."""
        self.shares.close()

    def _limit(self, step: int) -> int:
        """Prompts between drawn and taken:
        as many as are taken before they are too old, or before the run ends.
        """
        rollout, left = self.config.rollout, self.config.train.num_rollout - step
        if rollout.asynchrony != "fully_async":
            return rollout.over_sampling_batch_size
        return min(self.config.rollout.staleness_limit + 1, left) * rollout.rollout_batch_size

    def _take(self, step: int) -> tuple[dict[str, int], list[int]]:
        """Have `_taken` once there are enough, on rank 0; its counts, and what is gone."""
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
            return {}, []
        self._taken = producer.take(wanted)
        return dict(producer.counts()), self._taken.gone

    def _let_go(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.holding.groups.pop(index, None)

    def _own_known(self) -> dict[int, Known]:
        return {index: known for share in self.shares.own for index, known in share.known().items()}

    def _open_state(self, known: Mapping[int, Known], open_: Sequence[int]) -> dict[str, Any]:
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
            "open": [dict(zip(("index", *Known._fields), entry, strict=True)) for entry in listed],
            "known": in_parts(_joined(parts), self.topology),
        }


def _open_of(state: Mapping[str, Any]) -> dict[int, Known | None]:
    """What there is of every open prompt, by its index, in the order of these. Version 0.1.0 kept
    it in the entries themselves, as lists of (number, fields).
    """
    found, at = dict[int, Known | None](), 0
    for entry in state["open"]:
        index, *parts = (entry[name] for name in ("index", *Known._fields))
        if "known" in state:
            ends = (at + parts[0], at + sum(parts))
            parts = [state["known"][at : ends[0]], state["known"][ends[0] : ends[1]]]
            at = ends[1]
        parts = [_as_frames(part) if isinstance(part, list) else part for part in parts]
        found[index] = Known(*parts) if any(len(part) for part in parts) else None
    return {index: found[index] for index in sorted(found)}


def _as_frames(listed: Sequence[Any]) -> Tensor:
    return numbered_frames({number: Rollout(**fields) for number, fields in listed})


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
