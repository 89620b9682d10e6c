"""Answers that come in pieces: nothing of them is lost, whatever becomes of the rest.

The servers are fake and in a process of their own; every token follows from its place.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config import SGLangConfig
from megatron_stare.records import Rollout
from megatron_stare.rollout.engine import (
    FaultyAnswer,
    Limits,
    Request,
    SamplingParams,
    State,
    UnsoundAnswer,
)
from megatron_stare.rollout.sglang import requests as runner
from megatron_stare.rollout.sglang.answers import Answer, Received
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model
from tests.rollout.sglang.fake_server import Fake, fake_servers, id_at, logprob_at
from tests.rollout.sglang.idle import sample_all, tiny_model

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=400)
LENGTHS = {"shortest": 150, "longest": 290}
HOLD = 40  # where servers that hold their answers do so


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    found = tiny_model(tmp_path_factory.mktemp("model") / "model")
    found.config["max_position_embeddings"] = 4096
    return found


@contextlib.contextmanager
def attached(
    urls: Sequence[str], model: Model, directory: Path, **settings: Any
) -> Iterator[SGLangPool]:
    """A pool on these servers, with weights of version 0."""
    quick: dict[str, Any] = {"stream_interval": 16, "health_interval": 0.2}
    config = SGLangConfig(urls=list(urls), **(quick | settings))
    with contextlib.closing(SGLangPool(config, model, directory)) as pool:
        pool.start().result(timeout=60)
        new_weights(pool, 0)
        yield pool


def new_weights(pool: SGLangPool, version: int) -> None:
    """As after a sync of the trainer."""
    pool.expect(version)
    pool.interrupt()
    wait_until(lambda: len(pool.admission.without_weights()) == len(pool.admission.alive()))
    path, body = "/update_weights_from_disk", {"weight_version": pool.tag}
    for server in pool.servers:
        pool.run(server.client.update_weights(path, body, 30.0)).result()
    pool.note_loaded(pool.servers)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def asked(count: int, prompts: int = 4) -> list[Request]:
    return [Request((5 + n % prompts, 1, 2), (0, 0, n % prompts, n)) for n in range(count)]


def assert_exact(requests: Sequence[Request], rollouts: Sequence[Rollout], model: Model) -> None:
    """Every token is where it belongs."""
    stop = min(model.stop_ids)
    for request, rollout in zip(requests, rollouts, strict=True):
        begin = len(request.prompt_ids)
        last = Fake(**LENGTHS).end_of(request.prompt_ids[0])
        assert list(rollout.response_ids) == [*map(id_at, range(begin, last)), stop]
        assert list(rollout.logprobs) == [logprob_at(place) for place in range(begin, last + 1)]
        assert rollout.status == "completed"


def counted(pool: SGLangPool) -> dict[str, float]:
    return {key: count for key, count in pool.counts().items() if count}


def seen(pool: SGLangPool, number: int) -> dict[str, Any]:
    """The requests to a server: calls by path, lengths of the inputs of /generate."""
    found: dict[str, Any] = pool.run(pool.servers[number].client.call("GET", "/seen")).result()
    return found


def held(pool: SGLangPool) -> int:
    """Answers that wait, or have waited, for their end."""
    return sum(seen(pool, number)["held"] for number in range(len(pool.servers)))


def test_a_streamed_answer_equals_a_whole_one(model: Model, tmp_path: Path):
    requests = asked(40)
    with (
        fake_servers(2, **LENGTHS) as streaming,
        fake_servers(1, **LENGTHS, incremental=False) as (whole,),
    ):
        with attached(streaming, model, tmp_path) as pool:
            assert {server.client.stream_interval for server in pool.servers} == {16}
            rollouts = sample_all(pool, requests, PARAMS).result(timeout=60)
            assert_exact(requests, rollouts, model)
            short = SamplingParams(1.0, 1.0, 20)
            cut = sample_all(pool, requests, short).result(timeout=60)
            assert all(r.status == "truncated" and len(r.response_ids) == 20 for r in cut)
            assert not counted(pool)
        # One that would repeat all of an answer in every event is asked for it whole.
        with attached([whole], model, tmp_path) as pool:
            assert_exact(requests, sample_all(pool, requests, PARAMS).result(timeout=60), model)


def test_new_weights_and_ends_take_one_call_per_server(model: Model, tmp_path: Path):
    requests = asked(60)
    with (
        fake_servers(2, **LENGTHS, hold_at=HOLD) as urls,
        attached(urls, model, tmp_path) as pool,
    ):
        futures = pool.submit(requests, PARAMS)
        wait_until(lambda: held(pool) == 60)
        new_weights(pool, 1)
        rollouts = [future.result(timeout=60) for future in futures]
        assert_exact(requests, rollouts, model)
        for request, rollout in zip(requests, rollouts, strict=True):
            old = HOLD - len(request.prompt_ids)
            assert list(rollout.versions) == [0] * old + [1] * (len(rollout.versions) - old)
        assert counted(pool) == {"engine_interrupted": 60}
        assert all(seen(pool, n)["paths"]["/abort_request"] <= 5 for n in range(2))
        futures = pool.submit(requests, PARAMS)
        wait_until(lambda: held(pool) == 120)
        pool.abort(requests[:1])
        parts = [futures[0].result(timeout=60)]
        assert not any(future.done() for future in futures[1:])
        pool.abort()
        parts += [future.result(timeout=60) for future in futures[1:]]
        for request, part in zip(requests, parts, strict=True):
            begin = len(request.prompt_ids)
            assert part.status == "aborted"
            assert list(part.response_ids) == list(map(id_at, range(begin, HOLD)))
        assert all(seen(pool, n)["paths"]["/abort_request"] <= 12 for n in range(2))


def test_a_part_of_an_answer_is_progress_before_any_request_ends(model: Model, tmp_path: Path):
    with (
        fake_servers(1, **LENGTHS, hold_at=HOLD) as urls,
        attached(urls, model, tmp_path) as pool,
    ):
        before = pool.requests.progress
        (future,) = pool.submit(asked(1), PARAMS)
        wait_until(lambda: held(pool) == 1)
        wait_until(lambda: pool.requests.progress != before)
        assert not future.done()
        pool.abort()
        future.result(timeout=60)


@pytest.mark.parametrize("ended", ["deaf", "killed"])
def test_the_tokens_of_a_slow_or_dead_server_are_kept(
    ended: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first server hears of no end, and continues later; or it is killed in the middle of its
    answers, and the second one continues them.
    """
    monkeypatch.setattr(runner, "PART_SECONDS", 0.5)
    requests = asked(8)
    slow = LENGTHS | {"hold_at": HOLD, "deaf": True}
    with fake_servers(1, **slow) as first, fake_servers(1, **LENGTHS) as second:
        settings: dict[str, Any] = {"request_timeout": 4.0 if ended == "deaf" else 60.0}
        with attached([*first, *second], model, tmp_path, **settings) as pool:
            pool.servers[1].in_flight = 1000  # so that all begin with the first
            futures = pool.submit(requests, PARAMS)
            wait_until(lambda: seen(pool, 0)["held"] == 8)
            pool.servers[1].in_flight = 0
            if ended == "killed":
                os.kill(first.process.pid, signal.SIGKILL)
            rollouts = [future.result(timeout=60) for future in futures]
            assert_exact(requests, rollouts, model)
            fault = "engine_fault_timeout" if ended == "deaf" else "engine_fault_connection"
            assert counted(pool) == {fault: 8, "engine_continued": 8}
            again = seen(pool, 0)["asked"][8:] if ended == "deaf" else seen(pool, 1)["asked"]
            assert again == [HOLD] * 8, "it continues after the tokens that had come"


def test_the_requests_of_a_machine_that_vanished_continue_on_another(model: Model, tmp_path: Path):
    """It neither answers nor ends its connections."""
    requests = asked(8)
    with (
        fake_servers(1, **LENGTHS, hold_at=HOLD) as first,
        fake_servers(1, **LENGTHS) as second,
        attached([*first, *second], model, tmp_path, health_timeout=6.0) as pool,
    ):
        pool.servers[1].in_flight = 1000  # so that all begin with the first
        futures = pool.submit(requests, PARAMS)
        wait_until(lambda: seen(pool, 0)["held"] == 8)
        pool.servers[1].in_flight = 0
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: pool.servers[0].state is State.DEAD)
            rollouts = [future.result(timeout=60) for future in futures]
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert_exact(requests, rollouts, model)
        assert counted(pool) == {"engine_fault_connection": 8, "engine_continued": 8}
        assert seen(pool, 1)["asked"] == [HOLD] * 8


def test_a_router_receives_the_key_of_a_shared_prefix(model: Model, tmp_path: Path):
    requests = asked(12, prompts=3)
    with (
        fake_servers(1, **LENGTHS) as (router,),
        fake_servers(1, **LENGTHS) as workers,
        attached(workers, model, tmp_path, router_url=router) as pool,
    ):
        assert pool.router is not None and pool.router.stream_interval == 0
        path, body = "/update_weights_from_disk", {"weight_version": pool.tag}
        pool.run(pool.router.update_weights(path, body, 30.0)).result()
        assert_exact(requests, sample_all(pool, requests, PARAMS).result(timeout=60), model)
        keys = pool.run(pool.router.call("GET", "/seen")).result()["keys"]
        assert keys == {"0-0-0": 4, "0-0-1": 4, "0-0-2": 4}


def test_a_pool_that_closes_in_mid_answer_leaves_nothing_unawaited(model: Model, tmp_path: Path):
    with (
        fake_servers(1, **LENGTHS, hold_at=HOLD) as urls,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        with attached(urls, model, tmp_path) as pool:
            futures = pool.submit(asked(20), PARAMS)
            wait_until(lambda: len(pool.requests.inflight) == 20)
            pool.abort()
        assert all(future.done() for future in futures)
        pool.abort()  # as a late caller does
        gc.collect()
    assert not [str(one.message) for one in caught if "await" in str(one.message)]


# --- one answer
# --------------------------------------------------------------------------------------------------


def event(first: int, count: int, total: int, finish: Any = None, version: str = "w") -> Any:
    ids = [id_at(place) for place in range(first, first + count)]
    pairs = [[logprob_at(first + n), token, None] for n, token in enumerate(ids)]
    meta = {
        "finish_reason": finish,
        "completion_tokens": total,
        "weight_version": version,
        "output_token_logprobs": pairs,
    }
    return {"output_ids": ids, "meta_info": meta}


def received(*, mixed: bool = False) -> Received:
    return Received({2}, (), Limits(200, 100, 100), 20, mixed=mixed)


def read(stream: bytes) -> Answer:
    found = received()
    found.feed(stream)
    return found.answer()


ABORT = {"type": "abort"}


def test_events_may_be_split_at_any_byte():
    events = [event(0, 1, 1), event(1, 8, 9), event(9, 4, 13, {"type": "stop"})]
    stream = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    stream += b"data: [DONE]\n\n"
    for size in (1, 7, 100, len(stream)):
        found = received()
        for place in range(0, len(stream), size):
            found.feed(stream[place : place + size])
        assert found.finished and list(found.answer().ids) == list(map(id_at, range(13)))
        assert found.answer().status == "completed"
    found.feed(b"")
    part = received()
    part.feed(stream[: stream.index(b"\n\n") + 2])
    assert not part.finished and part.answer().status == "aborted" and len(part.answer().ids) == 1
    assert received().answer().status == "aborted"


def test_a_request_that_was_queued_when_it_was_ended_repeats_its_tokens():
    """SGLang then sends the last id again, and all log-probs; alone or after new ones."""
    for last in (event(0, 9, 9, ABORT), event(9, 0, 9, ABORT)):
        found = received()
        found.add(event(0, 9, 9))
        found.add(last | {"output_ids": [id_at(8)]})
        assert found.finished and list(found.answer().ids) == list(map(id_at, range(9)))
    found, both = received(), event(0, 9, 9, ABORT)
    found.add(event(0, 3, 3))
    pairs = event(3, 6, 9)["meta_info"]["output_token_logprobs"]
    both["meta_info"]["output_token_logprobs"][:0] = pairs
    found.add(both | {"output_ids": [*map(id_at, range(3, 9)), id_at(8)]})
    assert list(found.answer().ids) == list(map(id_at, range(9)))


def test_new_weights_may_come_within_an_answer_whose_cache_is_kept():
    spans = [{"version": "default", "start": 0, "end": 4}, {"version": "n", "start": 4, "end": 6}]
    found = received(mixed=True)
    found.add(event(0, 3, 3))
    last = event(3, 3, 6, version="n")
    last["meta_info"]["weight_versions"] = spans
    found.add(last)
    assert found.answer().weight_version == "n" and found.answer().newer == 2
    last["meta_info"]["weight_versions"] = [*spans, {}]
    with pytest.raises(FaultyAnswer, match="weight_versions lack 'end'"):
        received(mixed=True).add(last)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "null"])
def test_a_nan_log_prob_differs_from_an_invalid_answer(word: str):
    """The first three are no JSON; SGLang writes them."""
    whole = json.dumps(event(0, 3, 3, {"type": "stop"}))
    assert whole.count(str(logprob_at(1))) == 1
    with pytest.raises(UnsoundAnswer, match="finite number"):
        read(b"data: " + whole.replace(str(logprob_at(1)), word).encode() + b"\n\n")
    with pytest.raises(ValueError, match="Expecting"):
        read(b"data: " + whole[:-1].encode() + b"\n\n")


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([event(0, 3, 3), event(5, 3, 8)], "6 ids came where 8"),
        ([event(0, 3, 3), event(0, 6, 6)], "9 ids came where 6"),
        ([event(0, 3, 3), event(3, 3, 6, version="other")], "weights changed on the way"),
        ([event(0, 3, 3), {"error": {"message": "out of memory"}}], "out of memory"),
        ([event(0, 3, 3), {"meta_info": {}}], "lacks 'finish_reason'"),
        ([event(0, 3, 3), []], "lacks"),
        ([event(0, 30, 30)], "30 ids came where 20 were asked for"),
    ],
)
def test_events_that_contradict_each_other_are_refused(events: list[Any], message: str):
    stream = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    with pytest.raises(FaultyAnswer, match=message):
        read(stream)
