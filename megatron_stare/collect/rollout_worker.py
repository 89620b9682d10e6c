"""A rollout worker samples and judges prompts. Every prompt belongs to exactly one worker.

The rollout buffer decides which prompts there are, which groups are trained, and when. A worker
runs in the trainer's process (local_worker.py) or in a process of its own next to it, on the first
node (process_worker.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, Protocol

from megatron_stare.collect.journal import PartialRollouts
from megatron_stare.config import Config, EngineError, UserError
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.experts import routing_shape
from megatron_stare.records import Group, Prompt
from megatron_stare.rollout.engine import SamplingParams
from megatron_stare.scoring.advantages import checked_estimator
from megatron_stare.system import digest

log = logging.getLogger(__name__)

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


class RolloutWorker(Protocol):
    """Any thread may call it. Its futures may call back from a thread of its own."""

    def set_step(self, step: int, held: Collection[int] = ()) -> None:
        """The weights are those of version `step`, or soon will be. Requests that are too old for
        them are aborted and sent again; requests that `pause` aborted are continued, except those
        of the prompts with the indices `held`, which wait for a later step.
        """
        ...

    def start(
        self,
        prompts: Sequence[Prompt],
        partial: PartialRollouts | None = None,
        resampling: Resampling | None = None,
    ) -> list[Future[Group]]:
        """Sample and judge these prompts; one future each. It fails where one of the prompt's
        rollouts, or the judge, fails.

        `partial`: rollouts that exist already. With `resampling` the rollouts get the numbers after
        the prompt's first ones, so that seeds and journal keys do not collide.
        """
        ...

    def pause(self) -> Future[None]:
        """Abort all requests and keep their tokens; done when all have returned."""
        ...

    def stop(self) -> None:
        """`pause` for good, and fail the futures that are not done."""
        ...

    def partial_rollouts(self) -> PartialRollouts:
        """The rollouts of the prompts that are not judged; also after `stop`."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Metrics by name since the start: rollouts dropped, rollouts read from the journal."""
        ...

    def close(self) -> None:
        """End the worker."""
        ...


def added(many: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sum of counts by name."""
    total: Counter[str] = Counter()
    for counts in many:
        total.update(counts)
    return total


def is_streamed(config: Config) -> bool:
    """Whether prompts are sampled continuously instead of in rounds (rollout_buffer.py)."""
    return config.rollout.asynchrony == "fully_async" or config.rollout.stops_the_tail


def running_future() -> Future[Any]:
    """A future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(group: Future[Group], outcome: Group | BaseException) -> None:
    """Set a future's result or exception, unless it is already done."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            group.set_exception(outcome)
        else:
            group.set_result(outcome)


def as_engine_error(what: str, error: BaseException) -> Exception:
    """The error for the futures of a thread: its own if it names a remedy, else one with the place
    of the fault, whose traceback is printed.
    """
    if isinstance(error, EngineError | UserError):
        return error
    log.error("%s failed", what, exc_info=error)
    return EngineError(f"{what} failed ({error!r}); its traceback stands above")


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
