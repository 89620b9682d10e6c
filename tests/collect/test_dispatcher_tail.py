"""rollout.long_tail=gather with scripted workers: lengths, signal and late judgements as drawn."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.collect.dispatcher import PromptDispatcher
from megatron_stare.collect.resampling import is_wanted
from megatron_stare.collect.rounds import RolloutWorkers
from megatron_stare.config import Config, override
from megatron_stare.records import Group, Prompt, Rollout

BATCH, OVER, MOST_TICKS = 4, 7, 200
CONFIG = override(
    Config(),
    [
        "rollout.long_tail=gather",
        f"rollout.rollout_batch_size={BATCH}",
        f"rollout.over_sampling_batch_size={OVER}",
    ],
)


@dataclass
class Stream:
    """Prompts 0, 1, 2, ..."""

    position: int = 0

    def at(self, index: int) -> Prompt:
        return Prompt(index, (1,), label="")

    def draw(self, count: int) -> list[Prompt]:
        self.position += count
        return [self.at(index) for index in range(self.position - count, self.position)]


@dataclass
class Sampled:
    """A prompt in flight."""

    group: Future[Group]
    left: int = 0
    version: int = -1
    judging: int = 0  # ticks until it is judged, once its rollouts have ended


@dataclass
class Worker:
    """Takes lengths[index] ticks for a prompt; from the start again where it was stopped. Judging a
    prompt of `late` takes three more, also beyond the end of its step.
    """

    lengths: Sequence[int]
    useless: Collection[int]  # without signal
    late: Collection[int]
    step: int = 0
    held: Collection[int] = ()
    paused: bool = False
    open: dict[int, Sampled] = field(default_factory=dict)

    def length(self, index: int) -> int:
        return self.lengths[index % len(self.lengths)]

    def set_step(self, step: int, held: Collection[int] = ()) -> None:
        self.step, self.held, self.paused = step, held, False
        for index, each in self.open.items():
            if not each.judging and index not in held:
                each.left, each.version = self.length(index), step

    def start(
        self, prompts: Sequence[Prompt], partial: Mapping[int, Any] | None = None
    ) -> list[Future[Group]]:
        for prompt in prompts:
            self.open[prompt.index] = Sampled(Future(), self.length(prompt.index), self.step)
        return [self.open[prompt.index].group for prompt in prompts]

    def pause(self) -> Future[None]:
        self.paused = True
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tick(self) -> None:
        """One token of every prompt in flight; then what is judged arrives."""
        for index, each in list(self.open.items()):
            if each.judging:
                each.judging -= 1
                if not each.judging:
                    self.finish(index)
            elif index not in self.held:
                each.left -= 1
                if each.left <= 0 and index % 10 in self.late:
                    each.judging = 3
                elif each.left <= 0:
                    self.finish(index)

    def finish(self, index: int) -> None:
        each, right = self.open.pop(index), index % 10 not in self.useless
        one, other = ("correct", 1.0), ("wrong", 0.0) if right else ("correct", 1.0)
        each.group.set_result(
            Group(
                Stream().at(index),
                tuple(
                    Rollout(
                        (5,),
                        (-0.1,),
                        (1,),
                        status="completed",
                        weight_version=each.version,
                        reward=reward,
                        verdict=verdict,
                    )
                    for verdict, reward in (one, other)
                ),
            )
        )


def dispatch(stream: Stream, worker: Worker) -> PromptDispatcher:
    return PromptDispatcher(CONFIG, stream, RolloutWorkers([0], worker))  # type: ignore[arg-type]


def batch(dispatcher: PromptDispatcher, worker: Worker, step: int) -> tuple[list[Group], set[int]]:
    """A step's batch, and the prompts without signal, as the rollout buffer takes them."""
    dispatcher.set_step(step, OVER)
    full = dispatcher.enough(BATCH)
    for _ in range(MOST_TICKS):
        if full.done():
            break
        worker.tick()
    full.result(timeout=0)
    dispatcher.pause()
    judged = dispatcher.next_groups()
    ready = [group for group in judged if is_wanted(group, CONFIG.rollout)]
    useless = {group.prompt.index for group in judged if group not in ready}
    dispatcher.keep(0)
    return ready[:BATCH], useless


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=5, max_size=13),
    useless=st.sets(st.integers(0, 9), max_size=4),
    late=st.sets(st.integers(0, 9)),
    resumed=st.sets(st.integers(0, 19)),
)
def test_every_prompt_with_signal_is_trained_once_by_one_version_whatever_its_length(
    lengths: list[int], useless: set[int], late: set[int], resumed: set[int]
) -> None:
    """Over twenty steps, some of them after a resume: what was drawn is in one batch, or has no
    signal, or is in the tail, which holds less than two batches.
    """
    stream, worker = Stream(), Worker(lengths, useless, late)
    dispatcher, trained, without = dispatch(stream, worker), list[int](), set[int]()
    waits: dict[int, int] = {}  # long rounds since a prompt joined the tail
    for step in range(20):
        groups, dropped = batch(dispatcher, worker, step)
        assert len(groups) == BATCH
        assert {one.oldest_version for group in groups for one in group.rollouts} == {step}
        trained += [group.prompt.index for group in groups]
        without |= dropped
        position, tail, ready = dispatcher.state()
        assert not ready
        assert sorted([*trained, *without, *tail]) == list(range(position))
        waits = {index: waits.get(index, 0) + dispatcher.is_long_round for index in tail}
        assert max(waits.values(), default=0) <= 3
        if step in resumed:
            worker = Worker(lengths, useless, late)
            dispatcher = dispatch(stream, worker)
            dispatcher.load_state(position, tail, {})


def test_a_long_round_takes_as_long_as_its_longest_and_a_short_one_does_not() -> None:
    """Every fifth prompt takes 100 ticks, the others 1."""
    stream, worker = Stream(), Worker((1, 1, 1, 1, 100), (), ())
    dispatcher, ticks = dispatch(stream, worker), list[int]()
    tick, count = worker.tick, [0]

    def counted() -> None:
        count[0] += 1
        tick()

    worker.tick = counted  # type: ignore[method-assign]
    for step in range(12):
        count[0] = 0
        batch(dispatcher, worker, step)
        ticks.append(count[0])
        assert count[0] in (1, 100)
        assert dispatcher.is_long_round or count[0] == 1, "no short round waits for a long prompt"
    assert 0 < ticks.count(100) < len(ticks) / 2
