"""Rollout and judgement of one step: sample groups until the batch is full of groups that carry signal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_stare.config import Config, NoSignalError
from megatron_stare.data.prompts import PromptStream
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.rollout.engine import Engine, EngineError, Request, SamplingParams
from megatron_stare.scoring.advantages import has_signal, with_advantages
from megatron_stare.scoring.rewards import Reward

# First word of every seed tuple, so that training and evaluation never share random numbers.
TRAINING, EVALUATION = 0, 1


@dataclass(frozen=True)
class Collected:
    """The groups to train on, and what sampling them cost. `signal` is false where no group's rewards differ."""

    groups: tuple[Group, ...]
    signal: bool
    metrics: dict[str, float]


def sample_groups(
    engine: Engine,
    reward: Reward,
    prompts: Sequence[Prompt],
    samples: int,
    params: SamplingParams,
    seed: tuple[int, ...],
    topology: Topology,
) -> list[Group]:
    """`samples` judged rollouts of each prompt, in prompt order, on every rank. Ranks share the work; collective."""
    mine = prompts[topology.rank :: topology.world_size]
    requests = [Request(p.token_ids, (*seed, p.index, number)) for p in mine for number in range(samples)]
    rollouts = engine.generate(requests, params)
    if any(rollout.status == "aborted" for rollout in rollouts):
        raise EngineError("the engine aborted a rollout that nobody asked it to abort")
    groups = []
    for number, prompt in enumerate(mine):
        own = rollouts[number * samples : (number + 1) * samples]
        judged = [dataclasses.replace(r, reward=reward(r.text, prompt.label, prompt.metadata)) for r in own]
        groups.append(Group(prompt, tuple(judged)))
    everyone = topology.gather(groups)
    return [everyone[place % topology.world_size][place // topology.world_size] for place in range(len(prompts))]


class Collector:
    """Fills batches of `rollout_batch_size` groups. Its state is the stream's position and the surplus groups."""

    def __init__(
        self, config: Config, stream: PromptStream, engine: Engine, reward: Reward, topology: Topology
    ) -> None:
        self.config, self.stream, self.engine, self.reward, self.topology = config, stream, engine, reward, topology
        self.surplus: list[Group] = []
        rollout = config.rollout
        self.params = SamplingParams(
            rollout.rollout_temperature,
            rollout.rollout_top_p,
            rollout.rollout_max_response_len,
            rollout.skip_special_tokens,
        )

    def collect(self, weight_version: int) -> Collected:
        """The next batch. Surplus groups of earlier steps come first, unless older than scoring.max_staleness.

        Where too few groups carry signal after max_generation_rounds: the groups there are, if
        scoring.accept_partial_batch (with none at all, the last round's, and `signal` false); else NoSignalError.
        """
        wanted, scoring = self.config.rollout.rollout_batch_size, self.config.scoring
        start = self.stream.position
        ready = [group for group in self.surplus if self._age(group, weight_version) <= scoring.max_staleness]
        dropped = len(self.surplus) - len(ready)
        sampled: list[Group] = []
        rounds = 0
        while len(ready) < wanted and rounds < scoring.max_generation_rounds:
            fresh = self._round()
            sampled += fresh
            ready += [group for group in fresh if not scoring.dynamic_sampling or has_signal(group)]
            rounds += 1
        if len(ready) < wanted and not scoring.accept_partial_batch:
            self.stream.position = start  # nothing is lost: a resumed run draws these problems again
            raise NoSignalError(self._too_few(len(ready), sampled, rounds))
        chosen, self.surplus = ready[:wanted] or fresh[:wanted], ready[wanted:]
        metrics = _sampling_metrics(sampled or chosen) | {
            "generation_rounds": float(rounds),
            "groups": float(len(chosen)),
            "surplus_groups": float(len(self.surplus)),
            "stale_groups_dropped": float(dropped),
        }
        groups = tuple(with_advantages(group, scoring.normalize_by_std) for group in chosen)
        return Collected(groups, any(has_signal(group) for group in chosen), metrics)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {"position": self.stream.position, "surplus": [dataclasses.asdict(group) for group in self.surplus]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.stream.position = state["position"]
        self.surplus = [
            Group(Prompt(**group["prompt"]), tuple(Rollout(**rollout) for rollout in group["rollouts"]))
            for group in state["surplus"]
        ]

    def _round(self) -> list[Group]:
        rollout = self.config.rollout
        prompts = self.stream.draw(rollout.over_sampling_batch_size or rollout.rollout_batch_size)
        seed = (self.config.run.seed, TRAINING)
        return sample_groups(
            self.engine, self.reward, prompts, rollout.n_samples_per_prompt, self.params, seed, self.topology
        )

    def _age(self, group: Group, weight_version: int) -> int:
        return weight_version - min(rollout.weight_version for rollout in group.rollouts)

    def _too_few(self, found: int, sampled: list[Group], rounds: int) -> str:
        histogram = Counter(rollout.reward for group in sampled for rollout in group.rollouts)
        rewards = ", ".join(f"{reward:g} x {count}" for reward, count in sorted(histogram.items()))
        return (
            f"only {found} of rollout.rollout_batch_size={self.config.rollout.rollout_batch_size} groups had differing "
            f"rewards after {rounds} generation rounds (rewards seen: {rewards}); choose problems of medium "
            "difficulty, check scoring.reward, raise scoring.max_generation_rounds, or set "
            "scoring.accept_partial_batch=true"
        )


def _sampling_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over all sampled rollouts, before any group was dropped."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    count = len(rollouts)
    return {
        "reward": sum(rollout.reward or 0.0 for rollout in rollouts) / count,
        "response_length": sum(len(rollout.response_ids) for rollout in rollouts) / count,
        "truncated_fraction": sum(rollout.status == "truncated" for rollout in rollouts) / count,
        "signal_fraction": sum(has_signal(group) for group in groups) / len(groups),
    }
