"""From prompts to judged groups: requests to the engine, their rollouts, a reward for each.

The ranks that an engine takes requests on (engine.sources) share the prompts; every rank ends up with all groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_stare.config import Config
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


def judged(parts: Sequence[tuple[Prompt, Sequence[Rollout]]], judge: Judge) -> list[Group]:
    """The groups, their rollouts judged, all at once so that the verifiers' processes share the work."""
    verdicts = iter(judge.judge([(prompt, rollout) for prompt, rollouts in parts for rollout in rollouts]))
    return [Group(prompt, tuple(itertools.islice(verdicts, len(rollouts)))) for prompt, rollouts in parts]


@dataclass(frozen=True)
class Sampling:
    """`samples` rollouts of each prompt, under way since `begin`."""

    engine: Engine
    judge: Judge
    topology: Topology
    count: int
    mine: Sequence[Prompt]
    futures: Sequence[Sequence[Future[Rollout]]]

    def finish(self) -> list[Group]:
        """The judged groups in prompt order, on every rank. Collective."""
        self.engine.wait([future for part in self.futures for future in part])
        parts = []
        for prompt, futures in zip(self.mine, self.futures, strict=True):
            rollouts = [future.result() for future in futures]
            if any(rollout.status == "aborted" for rollout in rollouts):
                raise EngineError("the engine aborted a rollout that nobody asked it to abort")
            parts.append((prompt, rollouts))
        everyone, sources = self.topology.gather(judged(parts, self.judge)), self.engine.sources
        return [everyone[place % sources][place // sources] for place in range(self.count)]


def begin(
    engine: Engine,
    judge: Judge,
    prompts: Sequence[Prompt],
    samples: int,
    params: SamplingParams,
    seed: tuple[int, ...],
    topology: Topology,
) -> Sampling:
    """Submit this rank's share of the prompts; a rollout's seed is `seed`, the prompt's index, its number."""
    mine = prompts[topology.rank :: engine.sources] if topology.rank < engine.sources else []
    requests = [Request(p.token_ids, (*seed, p.index, number), prompt=p) for p in mine for number in range(samples)]
    futures = engine.submit(requests, params) if requests else []
    shares = [futures[place : place + samples] for place in range(0, len(futures), samples)]
    return Sampling(engine, judge, topology, len(prompts), mine, shares)
