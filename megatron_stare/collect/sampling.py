"""From prompts to judged groups: every share samples its prompts, and every rank ends up with the
groups of its own shares, and with an outline of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_stare.collect.group_exchange import all_gather_groups
from megatron_stare.collect.rollout_worker import Resampling, RolloutWorkers
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group, Prompt
from megatron_stare.reporting import heartbeat
from megatron_stare.rollout.engine import Engine


@dataclass(frozen=True)
class Sampling:
    """Groups under way since `begin`: on which rank each is, and those of this one."""

    engine: Engine
    topology: Topology
    ranks: Sequence[int]
    mine: Sequence[Future[Group]]

    def finish(self) -> list[Group]:
        """The judged groups in prompt order, on every rank: whole on the one that sampled them,
        in outline on the others (outlines.py). Collective.

        What fails on one rank fails on all of them alike, as `agreed` says.
        """
        mine: list[Group] = []
        agreed(self.topology, lambda: mine.extend(self._mine()))
        everyone = [iter(groups) for groups in all_gather_groups(mine, self.topology)]
        return [next(everyone[rank]) for rank in self.ranks]

    def _mine(self) -> list[Group]:
        self.engine.wait(self.mine)
        return [group.result() for group in self.mine]


def begin(
    engine: Engine,
    workers: RolloutWorkers,
    prompts: Sequence[Prompt],
    topology: Topology,
    again: Resampling | None = None,
    together: int = 0,
) -> Sampling:
    """Have each share begin its prompts, or sample them `again`, under the weights that the engine
    has. `together`: as RolloutWorkers.together, where it is another.
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
    for group in mine:  # whoever waits for worker processes goes on while groups come
        group.add_done_callback(lambda _: heartbeat.moved())
    return Sampling(engine, topology, [rank for rank, _ in places], mine)
