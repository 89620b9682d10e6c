"""From prompts to judged groups: requests to the engine, their rollouts, a reward for each.

The ranks that an engine takes requests on (engine.sources) share the prompts; every rank ends up
with its own groups, and with an outline of all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megatron_stare.config import Config, NoSignalError, UserError
from megatron_stare.loop.collection.outlines import shared
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.rollout.engine import Engine, EngineError, Request, SamplingParams
from megatron_stare.scoring.judge import Judge

# First word of every seed tuple, so that training and evaluation never share random numbers.
TRAINING, EVALUATION = 0, 1


def training_params(config: Config) -> SamplingParams:
    """How training rollouts are sampled."""
    rollout = config.rollout
    return SamplingParams(
        rollout.rollout_temperature,
        rollout.rollout_top_p,
        rollout.rollout_max_response_len,
        rollout.skip_special_tokens,
    )


@dataclass(frozen=True)
class Sampling:
    """`samples` rollouts of each prompt, under way since `begin`."""

    engine: Engine
    topology: Topology
    count: int
    futures: Sequence[Future[Rollout]]
    mine: Sequence[Future[Group]]

    def finish(self) -> list[Group]:
        """The judged groups in prompt order, on every rank: whole on the one that sampled them,
        in outline on the others (outlines.py). Collective.

        What fails on one rank fails on all of them alike, as `agreed` says.
        """
        mine: list[Group] = []
        agreed(self.topology, lambda: mine.extend(self._mine()))
        everyone, sources = shared(mine, self.topology), self.engine.sources
        return [everyone[place % sources][place // sources] for place in range(self.count)]

    def _mine(self) -> list[Group]:
        self.engine.wait(self.futures)
        return [group.result() for group in self.mine]


def agreed[T](topology: Topology, work: Callable[[], T]) -> list[T]:
    """What `work` returns on each rank, on every rank; nothing that grows with tokens. Collective.

    What it raises on one rank is raised on all of them, so that they can save together: a UserError
    as it is, anything else as an EngineError that names the rank.
    """
    outcome: tuple[str, Any] = ("", None)
    failure: Exception | None = None
    try:
        outcome = ("", work())
    except Exception as error:
        failure, outcome = error, (type(error).__name__, str(error))
    everyone = topology.gather(outcome)
    if isinstance(failure, UserError | EngineError):
        raise failure
    for rank, (kind, text) in enumerate(everyone):
        if kind == "NoSignalError":
            raise NoSignalError(text)
        if kind == "UserError":
            raise UserError(text)
        if kind:
            raise EngineError(f"rank {rank}: {kind}: {text}") from failure
    return [value for _, value in everyone]


def begin(
    engine: Engine,
    judge: Judge,
    prompts: Sequence[Prompt],
    samples: int,
    params: SamplingParams,
    seed: tuple[int, ...],
    topology: Topology,
) -> Sampling:
    """Submit this rank's share of the prompts;
    a rollout's seed is `seed`, the prompt's index, its number.
    """
    mine = prompts[topology.rank :: engine.sources] if topology.rank < engine.sources else []
    requests = [
        Request(p.token_ids, (*seed, p.index, number), prompt=p)
        for p in mine
        for number in range(samples)
    ]
    futures = engine.submit(requests, params) if requests else []
    shares = [futures[place : place + samples] for place in range(0, len(futures), samples)]
    groups = [
        judged_group(prompt, share, judge) for prompt, share in zip(mine, shares, strict=True)
    ]
    return Sampling(engine, topology, len(prompts), futures, groups)


def judged_group(
    prompt: Prompt, rollouts: Sequence[Future[Rollout]], judge: Judge
) -> Future[Group]:
    """The group, judged as soon as its last rollout is there,
    while those of others are still being sampled.
    """
    group: Future[Group] = Future()
    left = itertools.count(len(rollouts) - 1, -1)

    def conclude(judged: Future[list[Rollout]]) -> None:
        try:
            group.set_result(Group(prompt, tuple(judged.result())))
        except BaseException as error:
            group.set_exception(error)

    def note(_: Future[Rollout]) -> None:
        if next(left):
            return
        try:
            finished = [rollout.result() for rollout in rollouts]
            if any(rollout.status == "aborted" for rollout in finished):
                raise EngineError("the engine aborted a rollout that nobody asked it to abort")
            judge.begin([(prompt, rollout) for rollout in finished]).add_done_callback(conclude)
        except BaseException as error:
            group.set_exception(error)

    for rollout in rollouts:
        rollout.add_done_callback(note)
    return group
