"""Planned seconds of sampling a step under each rollout.long_tail.

The dispatcher of a run (collect/dispatcher.py) draws and stops the prompts; the servers are
simulated. A server decodes as many rollouts together as the planner gives it room for, and a token
takes the planner's seconds (planning/serving.py). Response lengths are log-normal, cut at the
limit: half of their variance lies between prompts, half between the rollouts of a prompt. Every
group carries signal (rollout.dynamic_sampling=false). No GPU takes part: the figures are plans.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy

from megatron_stare.collect.dispatcher import PromptDispatcher
from megatron_stare.collect.rounds import RolloutWorkers
from megatron_stare.config import Config, override
from megatron_stare.planning.machine import H100
from megatron_stare.planning.memory import cache_bytes_per_token
from megatron_stare.planning.plan import RunPlan, make_plan
from megatron_stare.planning.serving import decoding_seconds
from megatron_stare.recipes import find_recipe
from megatron_stare.recipes.published import Cluster
from megatron_stare.records import Group, Prompt, Rollout


@dataclass(eq=False)
class Running:
    """A rollout on a server, or waiting for one."""

    index: int
    length: float
    tokens: float = 0.0
    version: int = 0


class Server:
    """Decodes up to `places` rollouts at a time; `token(b, length)` is the seconds of a token."""

    def __init__(self, places: int, token: Callable[[float, float], float], prompt: float) -> None:
        self.places, self.token, self.prompt = places, token, prompt
        self.running: list[Running] = []
        self.waiting: deque[Running] = deque()

    def fill(self) -> None:
        """Begin waiting rollouts while there is room."""
        while self.waiting and len(self.running) < self.places:
            self.running.append(self.waiting.popleft())

    @property
    def speed(self) -> float:
        """Seconds of a token of every running rollout."""
        mean = self.prompt + statistics.fmean(each.tokens for each in self.running)
        return self.token(len(self.running), mean)

    def seconds_to_next(self) -> float:
        """Until a rollout ends."""
        if not self.running:
            return math.inf
        return self.speed * min(each.length - each.tokens for each in self.running)

    def step(self, seconds: float) -> list[Running]:
        """Let time pass; the rollouts that have ended."""
        if not self.running:
            return []
        tokens = seconds / self.speed
        for each in self.running:
            each.tokens += tokens
        ended = [each for each in self.running if each.length - each.tokens < 1e-6]
        self.running = [each for each in self.running if each not in ended]
        self.fill()
        return ended


@dataclass
class Servers:
    """The methods of RolloutWorker that a dispatcher calls, on simulated servers."""

    servers: Sequence[Server]
    config: Config
    lengths: Callable[[int], Sequence[float]]
    step: int = 0
    clock: float = 0.0
    sampled: float = 0.0  # tokens
    open: dict[int, Future[Group]] = field(default_factory=dict)
    unfinished: dict[int, list[Running]] = field(default_factory=dict)

    def set_step(self, step: int, held: Collection[int] = ()) -> None:
        self.step = step
        for index in self.open.keys() - set(held):
            self._ask(index)

    def start(
        self, prompts: Sequence[Prompt], partial: Mapping[int, Any] | None = None
    ) -> list[Future[Group]]:
        for prompt in prompts:
            self.open[prompt.index] = Future()
            lengths = self.lengths(prompt.index)
            self.unfinished[prompt.index] = [Running(prompt.index, each) for each in lengths]
            self._ask(prompt.index)
        return [self.open[prompt.index] for prompt in prompts]

    def pause(self) -> Future[None]:
        for server in self.servers:
            server.running.clear()
            server.waiting.clear()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _ask(self, index: int) -> None:
        """Send the prompt's unfinished rollouts to the servers with the fewest."""
        oldest = self.step - self.config.rollout.staleness_limit
        for each in self.unfinished[index]:
            if each.version < oldest or not each.tokens:
                each.tokens, each.version = 0.0, self.step
            server = min(self.servers, key=lambda s: len(s.running) + len(s.waiting))
            server.waiting.append(each)
            server.fill()

    def tick(self) -> None:
        """Until the next rollout ends."""
        seconds = min(server.seconds_to_next() for server in self.servers)
        self.clock += seconds
        for server in self.servers:
            before = sum(each.tokens for each in server.running)
            ended = server.step(seconds)
            left = sum(each.tokens for each in server.running)
            self.sampled += left + sum(each.tokens for each in ended) - before
            for each in ended:
                self._end(each)

    def _end(self, ended: Running) -> None:
        left = self.unfinished[ended.index]
        left.remove(ended)
        if not left:
            values = numpy.array([5]), numpy.array([-0.1]), numpy.array([True])
            rollout = Rollout(*values, status="completed", weight_version=self.step)
            del self.unfinished[ended.index]
            self.open.pop(ended.index).set_result(Group(Stream().at(ended.index), (rollout,)))


class Stream:
    """Prompts 0, 1, 2, ..."""

    position = 0

    def at(self, index: int) -> Prompt:
        return Prompt(index, numpy.array([1]), label="")

    def draw(self, count: int) -> list[Prompt]:
        self.position += count
        return [self.at(index) for index in range(self.position - count, self.position)]


def measured(plan: RunPlan, options: argparse.Namespace) -> tuple[float, float, float, float]:
    """Seconds of a step, mean and largest; tokens sampled over tokens trained; the share of long
    rounds.
    """
    config, rollout = plan.config, plan.config.rollout
    lengths = lengths_of(config, options.mean, options.sigma)
    worker = Servers(simulated(plan), config, lengths)
    dispatcher = PromptDispatcher(config, Stream(), RolloutWorkers([0], worker))  # type: ignore[arg-type]
    seconds, trained, long = list[float](), 0.0, 0
    for step in range(options.steps):
        begin = worker.clock
        limit = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        dispatcher.set_step(step, limit, 0)
        full = dispatcher.enough(rollout.rollout_batch_size)
        while not full.done():
            worker.tick()
        full.result()
        dispatcher.pause()
        groups = dispatcher.next_groups()
        dispatcher.keep(0)
        chosen = groups[: rollout.rollout_batch_size]
        trained += sum(sum(lengths(group.prompt.index)) for group in chosen)
        seconds.append(worker.clock - begin)
        long += dispatcher.is_long_round
    mean = statistics.fmean(seconds)
    return mean, max(seconds), worker.sampled / trained, long / options.steps


def lengths_of(config: Config, mean: float, sigma: float) -> Callable[[int], Sequence[float]]:
    """Response lengths of a prompt's rollouts, the same however often it is sampled."""
    most = config.rollout.rollout_max_response_len
    middle, half = math.log(mean) - sigma**2 / 2, sigma / math.sqrt(2)

    def lengths(index: int) -> Sequence[float]:
        draw = numpy.random.default_rng((config.run.seed, index))
        prompt, own = draw.normal(), draw.normal(size=config.rollout.n_samples_per_prompt)
        found = numpy.exp(middle + half * prompt + half * own)
        return numpy.clip(found, 1.0, most).tolist()

    return lengths


def simulated(plan: RunPlan) -> list[Server]:
    """The servers of a plan."""
    serving, config = plan.serving, plan.config
    assert serving is not None
    per_token, gpus = cache_bytes_per_token(plan.shape, config), config.sglang.gpus_per_server

    def token(sequences: float, length: float) -> float:
        cache = per_token * length
        return decoding_seconds(sequences, plan.shape, serving.weights, cache, gpus, H100)

    most = serving.cache / (per_token * (plan.tokens.prompt + plan.tokens.response))
    places = int(min(most, config.sglang.max_concurrency))
    return [Server(places, token, plan.tokens.prompt) for _ in range(serving.servers)]


def main() -> None:
    """Simulate every way, on every number of GPUs, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="long_cot_32b")
    parser.add_argument("--gpus", type=int, nargs="*", default=[32, 256])
    parser.add_argument("--mean", type=float, default=8192, help="tokens of a response")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of a length")
    parser.add_argument("--over", type=float, nargs="*", default=[1.25, 1.5])
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    recipe = override(find_recipe(options.recipe), ["rollout.dynamic_sampling=false"])
    size = recipe.rollout.rollout_batch_size
    ways = [("wait", 1.0)]
    ways += [(way, over) for over in options.over for way in ("continue", "gather")]
    print(
        "| GPUs | long_tail | prompts in flight | s per step | of wait | longest step [s] |", end=""
    )
    print(" tokens sampled / trained | long rounds |\n|---:|---|---:|---:|---:|---:|---:|---:|")
    for gpus in options.gpus:
        base = 0.0
        for way, over in ways:
            count = round(over * size)
            words = f"rollout.long_tail={way} rollout.over_sampling_batch_size={count}".split()
            plan = make_plan(
                override(recipe, words), Cluster(gpus, 0), response_tokens=options.mean
            )
            mean, longest, wasted, long = measured(plan, options)
            base = base or mean
            print(
                f"| {gpus} | `{way}` | {count} | {mean:,.0f} | {mean / base:.2f} | "
                f"{longest:,.0f} | {wasted:.2f} | {long:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
