"""The settings that decide how training rollouts are sampled, and what a rollout must have been
sampled with so that a resumed run may train on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_stare.config import Config
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.experts import routing_shape
from megatron_stare.records import Group
from megatron_stare.rollout.engine import SamplingParams
from megatron_stare.scoring.advantages import checked_estimator
from megatron_stare.system import digest

# First word of every seed tuple, so that training and evaluation never share random numbers.
TRAINING, EVALUATION = 0, 1
# Settings of agents that decide where they run and how they end, and so nothing of an episode.
_OF_HOSTS = (
    *("hosts", "episodes_per_host", "address", "port"),
    *("grace_seconds", "heartbeat_seconds"),
)


class Resampling(NamedTuple):
    """A request for more rollouts of judged prompts: their number per prompt and temperature."""

    samples: int
    temperature: float


def is_streamed(config: Config) -> bool:
    """Whether prompts are sampled continuously instead of in rounds (rollout_buffer.py)."""
    return config.rollout.asynchrony == "fully_async" or config.rollout.stops_the_tail


def episode_settings(config: Config) -> dict[str, Any]:
    """The settings of the agent or of the tools that decide what an episode may look like; {} where
    a rollout is one response.
    """
    if config.agents.active:
        own = dataclasses.asdict(config.agents)
        return {name: value for name, value in own.items() if name not in _OF_HOSTS}
    return dataclasses.asdict(config.tools) if config.tools.environment else {}


def sampling_digest(config: Config) -> str:
    """Names the settings that decide what a rollout of a prompt may look like. A rollout of other
    settings has log-probs, a length limit, tools, an agent or a greedy baseline that this run does
    not have.
    """
    episodes = episode_settings(config) or None
    greedy = checked_estimator(config.scoring).greedy
    return digest(repr((training_params(config), episodes, greedy)), 8)


def split_by_settings(
    groups: Sequence[Group], config: Config, whole: bool
) -> tuple[list[Group], list[Group]]:
    """The groups of a checkpoint that were sampled under this run's settings, and the other ones.
    With `whole`, a group has as many rollouts as this run samples of a prompt.
    """
    now, samples = sampling_digest(config), config.rollout.n_samples_per_prompt
    fitting, other = list[Group](), list[Group]()
    for group in groups:
        fits = all(rollout.sampling == now for rollout in group.rollouts)
        fits = fits and (not whole or len(group.rollouts) == samples)
        (fitting if fits else other).append(group)
    return fitting, other


def training_params(config: Config) -> SamplingParams:
    """The sampling parameters of training rollouts."""
    rollout, routing = config.rollout, None
    if config.policy.routing_replay == "rollout":
        routing = routing_shape(read_hf_config(config.policy.hf_checkpoint))
    return SamplingParams(
        rollout.rollout_temperature,
        rollout.rollout_top_p,
        rollout.rollout_max_response_len,
        rollout.skip_special_tokens,
        stop=tuple(rollout.stop),
        routing=routing,
    )
