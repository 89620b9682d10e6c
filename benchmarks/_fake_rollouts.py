"""The cost of sampling in its process: a pool on servers that compute nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._measuring import PeakMemory
from megatron_stare.collect.journal import Journal
from megatron_stare.config import SGLangConfig
from megatron_stare.rollout.engine import Request, SamplingParams, ids_of
from megatron_stare.rollout.sglang import answers, client
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.requests import RequestRunner
from megatron_stare.rollout.sglang.server import Model
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.idle import tiny_model

# Everything of a phase that is a plain function, by where it is called from.
PHASES: dict[str, list[tuple[Any, str]]] = {
    "request": [(client, "_encoded")],
    "decode": [(client, "decoded"), (answers, "decoded"), (answers, "read_answer")],
    "check": [(answers, "check_answer")],
    "text": [(RequestRunner, "_text")],
    "journal": [(Journal, "write")],
}
REST = "HTTP, rest"
SAMPLES = 16  # rollouts of one prompt
HELD_AT = 100  # the place where answers that are to be interrupted wait
VOCABULARY = 1 << 17


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Processor seconds by phase."""

    rollouts: int
    tokens: int
    seconds: dict[str, float]
    wall: float
    peak_bytes: int | None
    faults: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@contextlib.contextmanager
def watched(phases: dict[str, list[tuple[Any, str]]]) -> Iterator[Counter[str]]:
    """Processor seconds that threads spend inside these functions, by phase."""
    spent: Counter[str] = Counter(dict.fromkeys(phases, 0))

    def timed(work: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*given, **named)
            finally:
                spent[phase] += time.thread_time() - began

        return call

    with contextlib.ExitStack() as after:
        for phase, places in phases.items():
            for owner, name in places:
                work = getattr(owner, name)
                after.callback(setattr, owner, name, work)
                setattr(owner, name, timed(work, phase))
        yield spent


@contextlib.contextmanager
def pool_on(
    urls: Sequence[str], model: Model, logs: Path, stream_interval: int
) -> Iterator[SGLangPool]:
    """A pool on these servers, which hold its weights of version 0."""
    config = SGLangConfig(
        urls=list(urls),
        stream_interval=stream_interval,
        max_concurrency=1 << 20,
        queue_timeout=7200.0,
        health_interval=60.0,  # looks at the servers are not what is measured
        health_timeout=600.0,
    )
    with contextlib.closing(SGLangPool(config, model, logs)) as pool:
        pool.start().result()
        give_weights(pool, 0)
        yield pool


def give_weights(pool: SGLangPool, version: int) -> None:
    """As after a sync."""
    pool.expect(version)
    path, body = "/update_weights_from_disk", {"weight_version": pool.tag}
    for server in pool.servers:
        pool.run(server.client.update_weights(path, body, 60.0)).result()
    pool.note_loaded(pool.servers)


def model_in(directory: Path, tokens: int) -> Model:
    """One that allows every length asked for."""
    found = tiny_model(directory)
    longer = {"max_position_embeddings": 2 * tokens + 1024, "vocab_size": VOCABULARY}
    found.config.update(longer)
    return found


def requests(count: int) -> list[Request]:
    """The first id of a prompt decides how long its answer is."""
    return [
        Request(ids_of([1 + n * 7919 % 100_003, 1, 2]), (0, 0, n // SAMPLES, n % SAMPLES))
        for n in range(count)
    ]


def sample(
    directory: Path, servers: int, rollouts: int, tokens: int, stream_interval: int
) -> Sampled:
    """`rollouts` answers of 1 to `tokens` tokens, each in the journal."""
    model = model_in(directory / "model", tokens)
    with (
        fake_servers(servers, shortest=1, longest=tokens) as urls,
        pool_on(urls, model, directory, stream_interval) as pool,
        watched(PHASES) as spent,
        PeakMemory(torch.device("cpu")) as peak,
        contextlib.closing(Journal(directory / "rollouts")) as journal,
    ):
        journal.open(0)
        began, wall, found = time.process_time(), time.perf_counter(), 0
        futures = pool.submit(requests(rollouts), SamplingParams(1.0, 1.0, tokens + 8))
        for number in range(rollouts):
            rollout, futures[number] = futures[number].result(), None  # type: ignore[call-overload]
            journal.write((number // SAMPLES, number % SAMPLES), rollout)
            found += rollout.length
        total, wall = time.process_time() - began, time.perf_counter() - wall
        seconds = {REST: total - sum(spent.values()), **spent}
        faults = {name: count for name, count in pool.counts().items() if count}
    for file in (directory / "rollouts").iterdir():
        file.unlink()
    return Sampled(rollouts, found, seconds, wall, peak.bytes, faults)


def interrupted(directory: Path, servers: int, count: int) -> dict[str, float]:
    """Processor seconds from the word until none of `count` requests is in flight any more."""
    model = model_in(directory / "model", 4 * HELD_AT)
    lengths: dict[str, Any] = {"shortest": 2 * HELD_AT, "longest": 3 * HELD_AT, "hold_at": HELD_AT}
    found: dict[str, float] = {}
    with (
        fake_servers(servers, **lengths) as urls,
        pool_on(urls, model, directory, 64) as pool,
    ):
        for turn, name in enumerate(("new weights", "abort"), 1):
            futures = pool.submit(requests(count), SamplingParams(1.0, 1.0, 4 * HELD_AT))
            _until(lambda turn=turn: _held(pool) == turn * count)
            began = time.process_time()
            if name == "new weights":
                pool.expect(1)
                pool.interrupt()
            else:
                pool.abort()
            _until(lambda: not any(server.in_flight for server in pool.servers))
            found[name] = time.process_time() - began
            if name == "new weights":
                pool.abort()
            for future in futures:
                assert future.result().length == HELD_AT - 3, "what it had is kept"
            give_weights(pool, turn)
    return found


def _held(pool: SGLangPool) -> int:
    calls = [pool.run(server.client.call("GET", "/seen")) for server in pool.servers]
    return sum(call.result()["held"] for call in calls)


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)
