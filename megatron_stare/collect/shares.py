"""Shares of the prompts: what may be asked of one, and whose each prompt is.

Which prompts there are, which groups are trained and when is decided elsewhere, over all shares
(collect.py, producer.py). A share runs in the trainer's process (own_share.py), or in a worker
process of its own (loop/workers/), on this node or on another.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron_stare.config import Config
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.experts import routing_shape
from megatron_stare.records import Group, Prompt
from megatron_stare.rollout.engine import SamplingParams

# First word of every seed tuple, so that training and evaluation never share random numbers.
TRAINING, EVALUATION = 0, 1


class Known(NamedTuple):
    """What there is of a prompt's rollouts, as bytes (frames.py): those that are finished, and
    parts of others to go on with.
    """

    finished: Tensor
    parts: Tensor


class Again(NamedTuple):
    """Further rollouts of prompts that are judged: how many of each, and at which temperature."""

    samples: int
    temperature: float


class Share(Protocol):
    """Any thread may call it. Its futures may call back from a thread of its own."""

    def advance(self, step: int) -> None:
        """The weights are those of version `step`, or soon will be: end what is too old for them
        and begin it anew, and go on with what `halt` ended.
        """
        ...

    def begin(
        self, prompts: Sequence[Prompt], known: Mapping[int, Known] | None = None
    ) -> list[Future[Group]]:
        """Sample and judge these; one future for each. `known`: by index, what there is already.

        A future fails where one of its rollouts, or the judge, did.
        """
        ...

    def halt(self) -> Future[None]:
        """End what is in flight, keeping its tokens; done when all is back."""
        ...

    def stop(self) -> None:
        """`halt` for good, and fail what is not finished."""
        ...

    def counts(self) -> Mapping[str, int]:
        """What was dropped, and what the journal gave, since the start: metrics by name."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class RankShare(Share, Protocol):
    """One of this rank's."""

    def begin(
        self,
        prompts: Sequence[Prompt],
        known: Mapping[int, Known] | None = None,
        again: Again | None = None,
    ) -> list[Future[Group]]:
        """See Share. `again`: sample others, whose numbers follow those of the first ones, so that
        their seeds and places in the journal are their own.
        """
        ...

    def known(self) -> dict[int, Known]:
        """By index, what there is of every prompt that is not judged, also after `stop`."""
        ...


@dataclass
class Holding:
    """What this rank has of prompts that another one decides about, by their indices."""

    # judged, until they are trained or let go
    groups: dict[int, Group] = field(default_factory=dict)
    # of an earlier life of the run, until they are begun
    known: dict[int, Known] = field(default_factory=dict)

    def take_known(self, indices: Sequence[int]) -> dict[int, Known]:
        """What there is of these prompts, which are begun."""
        return {index: self.known.pop(index) for index in indices if index in self.known}


@dataclass(frozen=True)
class Shares:
    """The shares of all ranks: `per_rank` on each of `ranks`, and `own` those of this one."""

    ranks: Sequence[int]
    per_rank: int
    own: Sequence[RankShare]
    # How many prompts an engine whose log-probs depend, in their last bits, on what is decoded
    # beside them is to decode together, whoever does; 1: any.
    together: int = 1
    # Other ranks' too, on the one that decides about a stream of rollouts: first those with number
    # 0, in the order of the ranks, then those with number 1. None: there are no others.
    everywhere: Sequence[Share] | None = None
    holding: Holding = field(default_factory=Holding)
    ending: Callable[[], None] | None = None  # what ends `own`, where it is not done one by one

    def close(self) -> None:
        """End this rank's."""
        if self.ending is not None:
            self.ending()
            return
        for share in self.own:
            share.close()

    def holder(self, index: int) -> int:
        """The rank of the prompt with this index, where none go together."""
        return self.ranks[index % len(self.ranks)]

    def dealt(self, prompts: Sequence[Prompt], together: int = 0) -> list[tuple[int, int]]:
        """The share of each prompt: a rank, and a number on it. The same on every rank."""
        return dealt(prompts, self.ranks, self.per_rank, together or self.together)


def dealt(
    prompts: Sequence[Prompt], ranks: Sequence[int], per_rank: int, together: int
) -> list[tuple[int, int]]:
    """One of `per_rank` shares on these ranks for each prompt. Its index alone decides, so that a
    journal knows whose it is, unless some go together.
    """
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place].token_ids))
    number = {place: prompt.index for place, prompt in enumerate(prompts)}
    if together > 1:
        number = {place: turn // together for turn, place in enumerate(order)}
    count = len(ranks)
    return [
        (ranks[number[place] % count], number[place] // count % per_rank)
        for place in range(len(prompts))
    ]


def decoded_together(config: Config, samples: int) -> int:
    """How many prompts of `samples` rollouts each the run's engine decodes at a time, where this
    decides the last bits of log-probs; else 1.
    """
    if config.rollout.engine != "embedded":
        return 1
    return max(1, config.rollout.engine_batch_size // samples)


def is_streamed(config: Config) -> bool:
    """Whether rollouts are sampled without end (stream.py), not in rounds (collect.py)."""
    return config.rollout.asynchrony == "fully_async" or config.rollout.abort_long_tail


def running_future() -> Future[Any]:
    """One that nobody can cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(group: Future[Group], outcome: Group | BaseException) -> None:
    """Give it what became of the group, unless it has been stopped, or has failed before."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            group.set_exception(outcome)
        else:
            group.set_result(outcome)


def training_params(config: Config) -> SamplingParams:
    """How training rollouts are sampled."""
    rollout, routing = config.rollout, None
    if config.policy.routing_replay == "rollout":
        routing = routing_shape(read_hf_config(config.policy.hf_checkpoint))
    return SamplingParams(
        rollout.rollout_temperature,
        rollout.rollout_top_p,
        rollout.rollout_max_response_len,
        rollout.skip_special_tokens,
        routing=routing,
    )


def greedily(params: SamplingParams) -> SamplingParams:
    """The likeliest response, within the same bounds."""
    return dataclasses.replace(params, temperature=0.0, top_p=1.0, routing=None)
