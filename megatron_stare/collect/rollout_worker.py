"""A rollout worker samples and judges prompts. Every prompt belongs to exactly one worker.

The rollout buffer decides which prompts there are, which groups are trained, and when. A worker
runs in the trainer's process (local_worker.py) or in a process of its own next to it, on the first
node (workers/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron_stare.collect.group_exchange import all_gather_groups
from megatron_stare.config import Config, EngineError, UserError
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.experts import routing_shape
from megatron_stare.policy.topology import Topology, agreed
from megatron_stare.records import Group, Prompt
from megatron_stare.rollout.engine import Engine, SamplingParams
from megatron_stare.scoring.advantages import checked_estimator
from megatron_stare.system import digest

log = logging.getLogger(__name__)

# First word of every seed tuple, so that training and evaluation never share random numbers.
TRAINING, EVALUATION = 0, 1


class PartialState(NamedTuple):
    """The rollouts of a prompt that is not judged yet, as bytes (journal.py): the finished ones
    and the unfinished ones that can be continued.
    """

    finished: Tensor
    parts: Tensor


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
        partial: Mapping[int, PartialState] | None = None,
        resampling: Resampling | None = None,
    ) -> list[Future[Group]]:
        """Sample and judge these prompts; one future each. It fails where one of the prompt's
        rollouts, or the judge, fails.

        `partial`: by prompt index, rollouts that exist already. With `resampling` the rollouts get
        the numbers after the prompt's first ones, so that seeds and journal keys do not collide.
        """
        ...

    def pause(self) -> Future[None]:
        """Abort all requests and keep their tokens; done when all have returned."""
        ...

    def stop(self) -> None:
        """`pause` for good, and fail the futures that are not done."""
        ...

    def partial_states(self) -> dict[int, PartialState]:
        """The rollouts of every prompt that is not judged, by prompt index; also after `stop`."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Metrics by name since the start: rollouts dropped, rollouts read from the journal."""
        ...

    def close(self) -> None:
        """End the worker."""
        ...


@dataclass(frozen=True)
class RolloutWorkers:
    """The workers of a run: `per_rank` on each of `ranks`; `own` are those of this rank."""

    ranks: Sequence[int]
    per_rank: int
    own: Sequence[RolloutWorker]
    # The last bits of an embedded engine's log-probs depend on which prompts are decoded in one
    # batch. So this many prompts are assigned as one block, for any number of workers; 1: no
    # blocks.
    together: int = 1
    close_all: Callable[[], None] | None = None  # replaces closing the workers one by one

    def close(self) -> None:
        """End this rank's workers."""
        if self.close_all is not None:
            self.close_all()
            return
        for worker in self.own:
            worker.close()

    def assigned(self, prompts: Sequence[Prompt], together: int = 0) -> list[tuple[int, int]]:
        """The worker of each prompt: its rank and its number there. The same on every rank."""
        return assigned(prompts, self.ranks, self.per_rank, together or self.together)


def assigned(
    prompts: Sequence[Prompt], ranks: Sequence[int], per_rank: int, together: int
) -> list[tuple[int, int]]:
    """The (rank, number) of each prompt's worker, among `per_rank` workers on each of these ranks.
    It depends on the prompt's index alone, so that a journal knows its owner, unless prompts are
    assigned in blocks.
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


@dataclass(frozen=True)
class SamplingRound:
    """The prompts of `start_round`."""

    engine: Engine
    topology: Topology
    ranks: Sequence[int]  # that samples each prompt
    mine: Sequence[Future[Group]]  # those of this rank

    def finish(self) -> list[Group]:
        """The judged groups in prompt order, on every rank; only the rank that sampled a group has
        its tokens. A failure on one rank is raised on all. Collective.
        """
        mine: list[Group] = []
        agreed(self.topology, lambda: mine.extend(self._mine()))
        everyone = [iter(groups) for groups in all_gather_groups(mine, self.topology)]
        return [next(everyone[rank]) for rank in self.ranks]

    def _mine(self) -> list[Group]:
        self.engine.wait(self.mine)
        return [group.result() for group in self.mine]


def start_round(
    engine: Engine,
    workers: RolloutWorkers,
    prompts: Sequence[Prompt],
    topology: Topology,
    again: Resampling | None = None,
    together: int = 0,
) -> SamplingRound:
    """Send each prompt to its worker, under the engine's weights; with `again` for more rollouts of
    a judged prompt. `together` replaces RolloutWorkers.together.
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
    return SamplingRound(engine, topology, [rank for rank, _ in places], mine)


def decoded_together(config: Config, samples: int) -> int:
    """RolloutWorkers.together for prompts of `samples` rollouts each."""
    if config.rollout.engine != "embedded":
        return 1
    return max(1, config.rollout.engine_batch_size // samples)


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


class QueueThread:
    """A thread that does the work that is put into its queue, in order. What a piece of work raises
    goes to `failed`, in the thread: no future that this work would have completed stays open.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether it was started and not closed."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        """Do this after all that was put before."""
        self._queue.put(work)

    def close(self) -> None:
        """End the thread after what was put before."""
        if self.is_running:
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._failed(error)


def as_engine_error(what: str, error: BaseException) -> Exception:
    """The error for the futures of a thread: its own if it names a remedy, else one with the place
    of the fault, whose traceback is printed.
    """
    if isinstance(error, EngineError | UserError):
        return error
    log.error("%s failed", what, exc_info=error)
    return EngineError(f"{what} failed ({error!r}); its traceback stands above")


def sampling_digest(config: Config) -> str:
    """Names the settings that decide what a rollout of a prompt may look like. A rollout of other
    settings has log-probs, a length limit, tools or a greedy baseline that this run does not have.
    """
    tools = config.tools if config.tools.environment else None
    greedy = checked_estimator(config.scoring).greedy
    return digest(repr((training_params(config), tools, greedy)), 8)


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


def greedily(params: SamplingParams) -> SamplingParams:
    """The same parameters for greedy decoding."""
    return dataclasses.replace(params, temperature=0.0, top_p=1.0, routing=None)
