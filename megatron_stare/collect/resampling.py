"""Filters of the rollout buffer: which groups may be trained, methods that sample some prompts
again with other seeds and at another temperature, and the replay buffer.

A method is two pure functions of groups, so that all ranks agree: which prompts are sampled again,
and how; and what the batch is then. Their rollouts are judged as all others are. Their engine's
log-probs are of the other temperature (Rollout.temperature), so that their ratio starts at the
trainer's scores, and nothing compares the two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy

from megatron_stare.collect.sampling_settings import Resampling
from megatron_stare.config import Config, ResamplingConfig, RolloutConfig, UserError
from megatron_stare.losses import find_objective
from megatron_stare.records import Group, Rollout, RolloutMeta
from megatron_stare.scoring.advantages import is_kept

# ln pi_old of rollouts that a later step trains again, by group and rollout of a batch [length];
# NaN except for loss tokens; None for rollouts that are not replayed or that another rank holds.
OldLogprobs = Sequence[Sequence[numpy.ndarray | None]]


def is_wanted(group: Group, rollout: RolloutConfig) -> bool:
    """Whether a group may be trained; without dynamic sampling every group may."""
    return not rollout.dynamic_sampling or is_kept(group, rollout.dynamic_sampling_metric)


class Joined(NamedTuple):
    """A batch's groups after a method, and the method's metrics."""

    groups: tuple[Group, ...]
    metrics: dict[str, float]


class Method(Protocol):
    """`by_rollout`: it chooses single rollouts as they are judged, and batches are made of these.
    Otherwise it changes a batch of whole groups.

    Its functions get groups that have advantages; other ranks' groups hold metadata only.
    `surprisal`: the last step's mean [nats], 0 before the first.
    """

    by_rollout: ClassVar[bool]

    def asks(self, groups: Sequence[Group], surprisal: float) -> tuple[list[int], Resampling]:
        """The indices of the prompts to sample again; samples per prompt and temperature."""
        ...

    def joined(self, groups: Sequence[Group], fresh: Sequence[Group], surprisal: float) -> Joined:
        """The batch, made of its own groups and of the groups that were sampled again."""
        ...


@dataclass(frozen=True)
class Aepo:
    """Arbitrary Entropy Policy Optimization (arXiv 2510.08141 and its code): REINFORCE on correct
    responses sampled at T pulls entropy to where T has it.

        T = 1.2 if S <= target else 0.8             S: the last step's mean surprisal
        the first quarter of the batch's prompts is sampled again at T
        of their rollouts those with A > 0.05 join, the first k of them, with A = 1
        k = min(60, how many there are), halved where S > target
        the batch's own first k rollouts leave it

    Where a rollout has no loss token (scoring.overlong_filter) it does not join.
    """

    by_rollout: ClassVar[bool] = False
    settings: ResamplingConfig
    samples: int

    def asks(self, groups: Sequence[Group], surprisal: float) -> tuple[list[int], Resampling]:
        count = math.ceil(self.settings.prompt_share * len(groups))
        again = Resampling(self.samples, self._temperature(surprisal))
        return [group.prompt.index for group in groups[:count]], again

    def joined(self, groups: Sequence[Group], fresh: Sequence[Group], surprisal: float) -> Joined:
        above = [_only(group, map(self._may_join, group.rollouts)) for group in fresh]
        there = count_rollouts(above)
        count = min(self.settings.max_rollouts, there)
        if surprisal > self.settings.target_entropy:
            count //= 2
        joining = [_rewarded(group) for group in cut(above, 0, count)]
        metrics = {
            "resampling_temperature": self._temperature(surprisal),
            "resampled_reward": _mean_reward(fresh),
            "resampled_above": float(there),
            "resampled_trained": float(count),
        }
        return Joined((*joining, *cut(groups, count, count_rollouts(groups))), metrics)

    def _temperature(self, surprisal: float) -> float:
        settings = self.settings
        below = surprisal <= settings.target_entropy
        return settings.high_temperature if below else settings.low_temperature

    def _may_join(self, rollout: RolloutMeta) -> bool:
        return (rollout.advantage or 0.0) > self.settings.min_advantage and rollout.loss_tokens > 0


@dataclass(frozen=True)
class UecRl:
    """UEC-RL (arXiv 2604.14646; its older form EFRame's code): prompts without any right answer are
    sampled again, 20 times at T = 1.1.

        of these rollouts those with |A| > 0.5 among their own are trained
        of the first ones of all prompts those with |A| > 0.05
        none with A > 0 that fills the response length

    and none without a loss token.
    """

    by_rollout: ClassVar[bool] = True
    settings: ResamplingConfig

    def asks(self, groups: Sequence[Group], surprisal: float) -> tuple[list[int], Resampling]:
        wrong = [
            group.prompt.index
            for group in groups
            if all(rollout.verdict == "wrong" for rollout in group.rollouts)
        ]
        return wrong, Resampling(self.settings.samples, self.settings.temperature)

    def joined(self, groups: Sequence[Group], fresh: Sequence[Group], surprisal: float) -> Joined:
        """The groups that were sampled again come first, as in the authors' code."""
        again = [
            _only(group, self._trained(group, self.settings.min_resampled_advantage))
            for group in fresh
        ]
        first = [
            _only(group, self._trained(group, self.settings.min_advantage)) for group in groups
        ]
        metrics = {
            "resampled_prompts": float(len(fresh)),
            "resampled_reward": _mean_reward(fresh),
            "resampled_trained": float(count_rollouts(again)),
        }
        return Joined(tuple(group for group in (*again, *first) if group.rollouts), metrics)

    def _trained(self, group: Group, least: float) -> Iterable[bool]:
        for rollout in group.rollouts:
            advantage = rollout.advantage or 0.0
            endless = advantage > 0 and rollout.status == "truncated"
            yield abs(advantage) > least and not endless and rollout.loss_tokens > 0


def is_replayed(settings: ResamplingConfig, rollout: RolloutMeta) -> bool:
    """Whether a rollout that was trained enters the replay buffer."""
    advantage = rollout.advantage or 0.0
    size = abs(advantage) if settings.replay_negative else advantage
    return size > settings.replay_advantage and rollout.loss_tokens > 0


class ReplayBuffer:
    """Rollouts of UEC-RL that are trained a second time, against the log-probs of their first.

        trained with A > 1 -> the newest replay_batches batches -> every fifth time a batch

    All of them are trained. If the buffer holds fewer than replay_batches batches, a random subset
    of whole batches is trained; with less than one batch the replay is left out.
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self.settings, self.seed = rollout.resampling, config.run.seed
        self.full = rollout.rollout_batch_size * rollout.n_samples_per_prompt  # of a batch
        self.groups: list[Group] = []
        self.trained = 0  # batches of fresh rollouts
        self.replayed = 0  # `trained` when the last batch was replayed

    @property
    def is_turn(self) -> bool:
        """Whether the next batch is one of these rollouts."""
        if not self.settings.replays or self.trained == self.replayed:
            return False
        due = self.trained % self.settings.replay_interval == 0
        return due and count_rollouts(self.groups) >= self.full

    def batch(self, step: int) -> list[Group]:
        """The batch of step `step`; the same on every rank."""
        there = count_rollouts(self.groups)
        if there >= self.settings.replay_batches * self.full:
            return self.groups
        random = numpy.random.default_rng((self.seed, step))
        places = random.choice(there, there // self.full * self.full, replace=False)
        return at_places(self.groups, set(places.tolist()))

    def finish_step(self, groups: Sequence[Group], old: OldLogprobs) -> None:
        """A batch was trained: fresh rollouts may enter, with `old` for their log-probs."""
        if self.is_turn:
            self.replayed = self.trained
            return
        self.trained += 1
        for group, logprobs in zip(groups, old, strict=False):  # none without an update
            rollouts = tuple(
                _scored(rollout, own)
                for rollout, own in zip(group.rollouts, logprobs, strict=True)
                if is_replayed(self.settings, rollout)
            )
            if rollouts:
                self.groups.append(dataclasses.replace(group, rollouts=rollouts))
        there, most = count_rollouts(self.groups), self.settings.replay_batches * self.full
        self.groups = cut(self.groups, max(0, there - most), there)

    def load_state(self, groups: Sequence[Group], state: Mapping[str, Any]) -> None:
        """Continue with these groups; `state` has the counts."""
        self.groups = list(groups)
        self.trained, self.replayed = state["trained"], state["replayed"]


def _scored(rollout: RolloutMeta, logprobs: numpy.ndarray | None) -> RolloutMeta:
    """The rollout with ln pi_old in the place of its engine's log-probs."""
    if not isinstance(rollout, Rollout):
        return dataclasses.replace(rollout, scored=True, temperature=None)
    assert logprobs is not None, "the rank that holds a rollout has its log-probs"
    logprobs = numpy.where(numpy.isnan(logprobs), rollout.logprobs, logprobs)
    return dataclasses.replace(rollout, logprobs=logprobs, scored=True, temperature=None)


def find_method(config: Config) -> Method | None:
    """The method of rollout.resampling.method. UserError: other settings contradict it."""
    rollout, settings = config.rollout, config.rollout.resampling
    if settings.method == "none":
        return None
    chosen = f"rollout.resampling.method={settings.method}"
    if rollout.asynchrony != "on_policy" or rollout.stops_the_tail:
        other = f"rollout.asynchrony={rollout.asynchrony}"
        if rollout.stops_the_tail:
            other = f"rollout.long_tail={rollout.long_tail}"
        raise UserError(
            f"{chosen} samples again what the step before asks for, once the batch is there, and "
            f"{other} samples ahead of it; set rollout.asynchrony=on_policy and "
            "rollout.long_tail=wait"
        )
    if config.scoring.advantage == "dcpo":
        raise UserError(
            f"{chosen} gives some rollouts their advantages before the batch is chosen, and "
            "scoring.advantage=dcpo remembers the batch of each step; choose one of the two"
        )
    if config.scoring.advantage == "remax" or rollout.n_samples_per_prompt < 2:
        raise UserError(
            f"{chosen} compares the rollouts of a prompt that is sampled again with one another, "
            f"which scoring.advantage={config.scoring.advantage} with "
            f"rollout.n_samples_per_prompt={rollout.n_samples_per_prompt} does not; set "
            "scoring.advantage=grpo and 2 samples or more"
        )
    if config.mismatch.old_policy == "rollout":
        raise UserError(
            f"{chosen} samples at another temperature, whose log-probs are not the policy's, and "
            "mismatch.old_policy=rollout starts ratios there; set it to auto or trainer"
        )
    if "rollout_log_prob" in find_objective(config.loss.name).needs:
        raise UserError(
            f"{chosen} samples at another temperature, and loss.name={config.loss.name} compares "
            "the policy with the engine's log-probs; choose another loss (python -m megatron_stare "
            "algorithms lists what each needs)"
        )
    if settings.method == "aepo":
        return Aepo(settings, rollout.n_samples_per_prompt)
    if rollout.dynamic_sampling:
        raise UserError(
            f"{chosen} chooses rollouts by their advantages, and rollout.dynamic_sampling=true "
            "drops whole groups; set rollout.dynamic_sampling=false"
        )
    if rollout.staleness_limit < 2:
        raise UserError(
            f"{chosen} has rollouts wait for a batch, which rollout.max_staleness="
            f"{rollout.staleness_limit} drops; set it to 2 or more"
        )
    return UecRl(settings)


def _only(group: Group, chosen: Iterable[bool]) -> Group:
    """The group with its chosen rollouts only."""
    pairs = zip(group.rollouts, chosen, strict=True)
    return dataclasses.replace(group, rollouts=tuple(each for each, is_in in pairs if is_in))


def cut(groups: Sequence[Group], start: int, stop: int) -> list[Group]:
    """Rollouts start .. stop - 1 of all the groups', in their groups; none is left empty."""
    return at_places(groups, range(start, stop))


def at_places(groups: Sequence[Group], places: Container[int]) -> list[Group]:
    """The rollouts at these places among all the groups', in their groups; none is left empty."""
    found, first = [], 0
    for group in groups:
        own = range(first, first + len(group.rollouts))
        found.append(_only(group, (place in places for place in own)))
        first = own.stop
    return [group for group in found if group.rollouts]


def count_rollouts(groups: Sequence[Group]) -> int:
    """The number of rollouts of all groups."""
    return sum(len(group.rollouts) for group in groups)


def _rewarded(group: Group) -> Group:
    """The group with advantages of 1: REINFORCE."""
    rollouts = tuple(dataclasses.replace(each, advantage=1.0) for each in group.rollouts)
    return dataclasses.replace(group, rollouts=rollouts)


def _mean_reward(groups: Sequence[Group]) -> float:
    """Over those that could be judged; 0 without any."""
    rewards = [each.reward for group in groups for each in group.rollouts]
    known = [reward for reward in rewards if reward is not None]
    return sum(known) / max(1, len(known))
