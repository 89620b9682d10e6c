"""Requests whose server is slow, faulty or receives new weights. No real server."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from megatron_stare.config import EngineError, ScoringConfig, SGLangConfig
from megatron_stare.records import Group, Prompt, Rollout, RoutingShape
from megatron_stare.rollout.engine import (
    FaultyAnswer,
    Limits,
    Request,
    SamplingParams,
    UnsoundAnswer,
    check_answer,
    ids_of,
    logprobs_of,
    stop_ids,
)
from megatron_stare.rollout.sglang import requests as runner
from megatron_stare.rollout.sglang.admission import prefix_of, rank
from megatron_stare.rollout.sglang.answers import Answer, Received, read_answer
from megatron_stare.rollout.sglang.client import ServerFault, ServerInfo
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Model
from megatron_stare.scoring.advantages import with_advantages
from megatron_stare.scoring.judge import Judge, judgement_metrics
from tests.rollout.sglang.idle import idle_pool, tiny_model
from tests.rollout.sglang.test_client import GOOD, LIMITS
from tests.tiny_models import byte_tokenizer

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=8)
ASKED = Request((1, 2), (0, 7))


class Scripted:
    """A server's client that answers by a script; `asked` are the requests it saw."""

    def __init__(self, script: Callable[[Request], Answer | ServerFault | None]) -> None:
        self.script, self.asked, self.url = script, list[Request](), "http://scripted"
        self.aborted, self.stream_interval = asyncio.Event(), 0
        self.part: Answer | None = None  # what an abort brings; None: nothing at all
        self.new_tokens = 0  # that the last request was for

    async def generate(
        self,
        request: Request,
        params: object,
        stops: object,
        received: Received,
        rid: str,
        affinity: str,
        cache_key: str,
        adapters: str,
    ) -> Answer:
        self.asked.append(request)
        self.new_tokens = received.new_tokens
        answer = self.script(request)
        if answer is None:  # too slow for the caller
            self.aborted.clear()
            await self.aborted.wait()
            assert self.part is not None
            return self.part
        if isinstance(answer, ServerFault):
            raise answer
        return answer

    async def abort(self, rid: str = "") -> None:
        self.aborted.set()

    async def state(self, timeout: float) -> None:
        """It answers."""

    async def info(self) -> ServerInfo:
        raise ServerFault("timeout", "not asked here")

    async def close(self) -> None:
        """Nothing to close."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def pool(model: Model, tmp_path: Path) -> Iterator[SGLangPool]:
    """Three servers of which every request takes too long, in a pool that runs."""
    with idle_pool(model, tmp_path, queue_timeout=0.2, max_attempts=3) as found:
        for server in found.servers:
            server.limits = Limits(257, 64, 64)
            server.client = Scripted(lambda _: None)  # type: ignore[assignment]
        yield found


def clients(pool: SGLangPool) -> list[Any]:
    return [server.client for server in pool.servers]


def in_order(pool: SGLangPool) -> list[Any]:
    """The servers as ASKED is offered to them, with nothing else to do."""
    prefix = prefix_of(ASKED)
    return sorted(pool.servers, key=lambda server: rank(server.name, prefix))


def scripted(pool: SGLangPool, script: Callable[[Request], Answer | ServerFault | None]) -> None:
    for client in clients(pool):
        client.script = script


def answer(
    pool: SGLangPool, count: int, status: Any = "aborted", last: int | None = None
) -> Answer:
    ids = (3,) * (count - 1) + (3 if last is None else last,)
    return Answer(ids, (-0.5,) * count, status, pool.tag)


def ending(pool: SGLangPool) -> int:
    return min(pool.model.stop_ids)


def result(pool: SGLangPool, params: SamplingParams = PARAMS, request: Request = ASKED) -> Rollout:
    (future,) = pool.submit([request], params)
    return future.result(timeout=60)


def counted(pool: SGLangPool) -> dict[str, float]:
    return {key: count for key, count in pool.counts().items() if count}


def test_drafts_are_counted_where_servers_speculate(model: Model, tmp_path: Path):
    """A stream's last event counts those of the whole answer."""
    events = [copy.deepcopy(GOOD) for _ in range(2)]
    for place, event in enumerate(events):
        event["meta_info"] |= {"spec_num_proposed_drafts": 8 * place, "completion_tokens": 3}
        event["meta_info"] |= {"spec_num_correct_drafts": 5 * place}
    events[0]["meta_info"]["finish_reason"] = None
    events[1]["meta_info"] |= {"completion_tokens": 6}
    received = Received([5], [], LIMITS, 8)
    for event in events:
        received.add(event)
    drafts = received.answer().drafts
    assert drafts == (8, 5)
    for speculation, expected in (
        ("ngram", {"engine_drafts": 8, "engine_drafts_accepted": 5}),
        ("none", {}),
    ):
        with idle_pool(model, tmp_path, speculation=speculation) as pool:
            for server in pool.servers:
                server.limits = Limits(model.config["vocab_size"], 64, 64)
                server.client = Scripted(  # type: ignore[assignment]
                    lambda _: dataclasses.replace(
                        answer(pool, 3, "completed", ending(pool)), drafts=drafts
                    )
                )
            result(pool)
            assert counted(pool) == expected


# --- time-outs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_a_request_that_takes_too_long_is_continued_by_its_own_server_if_that_has_room(
    full: bool, pool: SGLangPool
):
    """The part is in the cache of its own server."""
    home, *_, own = in_order(pool)
    others = [server for server in pool.servers if server is not own]
    for other in others:
        other.in_flight = 4  # of max_concurrency=4
    home.client.script = lambda _: answer(pool, 2, "completed", ending(pool))
    own.client.part = answer(pool, 5)

    def too_slow(_: Request) -> None:
        own.in_flight += 4 * full
        for other in others:
            other.in_flight = 0
        own.client.script = home.client.script

    own.client.script = too_slow
    rollout = result(pool)
    assert rollout.response_ids.tolist() == [3, 3, 3, 3, 3, 3, ending(pool)]
    assert rollout.status == "completed" and rollout.versions.tolist() == [1] * 7
    assert len(own.client.asked) == 2 - full
    assert (home if full else own).client.asked[-1].part.response_ids.tolist() == [3] * 5
    assert counted(pool) == {"engine_fault_timeout": 1, "engine_continued": 1}


def test_a_request_that_grows_with_every_time_out_is_no_failure(pool: SGLangPool):
    """Six time-outs with a token each, although max_attempts is 3."""
    for client in clients(pool):
        client.script = lambda asked: (
            answer(pool, 1, "completed", ending(pool))
            if asked.part and len(asked.part.response_ids) == 6
            else None
        )
        client.part = answer(pool, 1)
    assert len(result(pool).response_ids) == 7
    assert counted(pool) == {"engine_fault_timeout": 6, "engine_continued": 6}


def test_a_server_that_ends_a_request_without_an_answer_is_faulty(pool: SGLangPool):
    for client in clients(pool):
        client.part = Answer((), (), "aborted", "")
    with pytest.raises(EngineError, match=r"3 faulty answers .* no part of an answer in 0.2 s"):
        result(pool)
    assert counted(pool) == {"engine_fault_timeout": 3}


@pytest.mark.parametrize(
    ("arrivals", "ends_at", "fault"),
    [
        ([], 3600.0, r"no part of an answer in 3600 s \(sglang.queue_timeout\)"),
        ([3000.0], 3600.0, r"no new part of an answer in 600 s \(sglang.request_timeout\)"),
        ([3000.0 + 590 * n for n in range(40)], 26610.0, "no new part of an answer in 600 s"),
    ],
)
def test_the_time_of_a_request_counts_from_its_last_part(
    arrivals: list[float],
    ends_at: float,
    fault: str,
    pool: SGLangPool,
    monkeypatch: pytest.MonkeyPatch,
):
    """A long response takes hours while its parts come; the queue has a bound of its own."""
    clock, received = SimpleNamespace(now=0.0), Received((), (), LIMITS, 8)

    async def wait(tasks: object, timeout: float) -> None:
        clock.now += timeout
        while arrivals and arrivals[0] <= clock.now:
            received.last_part = arrivals.pop(0)

    async def overdue() -> ServerFault | None:
        asking = SimpleNamespace(done=lambda: False)
        return await pool.requests._overdue(asking, received, pool.servers[0])  # type: ignore[arg-type]

    pool.requests.settings = SGLangConfig()
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(runner, "asyncio", SimpleNamespace(wait=wait))
    with pytest.raises(ServerFault, match=fault):
        raise asyncio.run(overdue()) or AssertionError("no fault")
    assert clock.now == ends_at and not arrivals


# --- aborts
# --------------------------------------------------------------------------------------------------


def test_a_request_that_is_submitted_again_is_not_aborted_again(
    pool: SGLangPool, monkeypatch: pytest.MonkeyPatch
):
    """An abort waits for the answer in steps, and the next submission may come in between."""
    monkeypatch.setattr(runner, "_REPEAT_SECONDS", 0.3)
    pool.requests.settings = SGLangConfig()  # nothing is too slow
    for client in clients(pool):
        client.part = answer(pool, 2)
    (first,) = pool.submit([ASKED], PARAMS)
    while not len(pool.requests.inflight):
        time.sleep(0.01)
    pool.abort([ASKED])
    assert first.result(timeout=60).status == "aborted"
    (second,) = pool.submit([ASKED], PARAMS)
    time.sleep(1.0)
    assert not second.done() and counted(pool) == {"engine_aborted": 1}
    pool.abort([ASKED])
    assert second.result(timeout=60).status == "aborted"
    assert counted(pool) == {"engine_aborted": 2}


# --- numbers that are none
# --------------------------------------------------------------------------------------------------


def unsound() -> ServerFault:
    return ServerFault("garbage", "log-prob None at place 0 is not a finite number", unsound=True)


@pytest.mark.parametrize("parted", [False, True])
def test_a_rollout_of_persistent_nans_is_masked_and_counted(parted: bool, pool: SGLangPool):
    part = Rollout((3, 4), (-1.0, -2.0), (1, 1), status="aborted", weight_version=0)
    request = Request((1, 2), (0, 7), part if parted else None)
    scripted(pool, lambda _: unsound())
    rollout = result(pool, request=request)
    assert rollout.response_ids.tolist() == [*((3, 4) if parted else ()), ending(pool)]
    assert not rollout.loss_mask.any() and rollout.verdict == "unverifiable"
    assert sum(len(client.asked) for client in clients(pool)) == 3
    assert counted(pool) == {"engine_fault_garbage": 3, "engine_invalid_rollouts": 1}


def test_a_single_nan_costs_one_retry(pool: SGLangPool):
    faults = [unsound()]
    scripted(pool, lambda _: faults.pop() if faults else answer(pool, 2, "completed", ending(pool)))
    assert result(pool).loss_mask.tolist() == [1, 1]
    assert counted(pool) == {"engine_fault_garbage": 1}


def test_other_faults_still_end_the_run(pool: SGLangPool):
    scripted(pool, lambda _: ServerFault("status", "status 500"))
    with pytest.raises(EngineError, match="3 faulty answers"):
        result(pool)


def test_an_abandoned_rollout_is_not_judged(pool: SGLangPool, model: Model):
    """It is out of its group's mean and spread, and counted as unverifiable."""
    scripted(pool, lambda _: unsound())
    lost, prompt = result(pool), Prompt(0, (1,), "4", metadata={})
    good = [
        Rollout((3,), (-1.0,), (1,), status="completed", weight_version=1, text=f"\\boxed{{{n}}}")
        for n in (4, 5)
    ]
    judge = Judge(ScoringConfig(reward="math"))
    try:
        judged = judge.judge([(prompt, good[0]), (prompt, lost), (prompt, good[1])])
        alone = judge.judge([(prompt, lost)])
    finally:
        judge.close()
    assert [rollout.reward for rollout in judged] == [1.0, None, 0.0]
    assert judged[1] == alone[0] and not any(judged[1].loss_mask)
    assert judgement_metrics(judged)["unverifiable"] == 1
    (group,) = with_advantages([Group(prompt, tuple(judged))], ScoringConfig())
    assert group.rollouts[1].advantage == 0 and group.rollouts[0].advantage == pytest.approx(
        -(group.rollouts[2].advantage or 0)
    )


@pytest.mark.parametrize("logprob", [None, float("nan"), float("-inf"), "x"])
def test_nan_differs_from_other_faults(logprob: Any):
    with pytest.raises(UnsoundAnswer):
        check_answer(ids_of((1,)), logprobs_of((logprob,)), "completed", 4, LIMITS)
    with pytest.raises(FaultyAnswer) as raised:
        check_answer(ids_of((1,)), logprobs_of((0.5,)), "completed", 4, LIMITS)
    assert not isinstance(raised.value, UnsoundAnswer)


def test_a_server_that_says_it_sampled_from_nans_is_not_believed():
    """SGLang puts a stop id in the token's place, so that the answer looks complete."""
    content = copy.deepcopy(GOOD)
    content["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
    with pytest.raises(UnsoundAnswer):
        read_answer(content, {5})


# --- the end of a response
# --------------------------------------------------------------------------------------------------


def test_a_completed_answer_without_a_stop_id_is_refused(pool: SGLangPool):
    bad = [answer(pool, 3, "completed", last=4)]
    scripted(pool, lambda _: bad.pop() if bad else answer(pool, 2, "completed", ending(pool)))
    assert result(pool).response_ids.tolist() == [3, ending(pool)]
    assert counted(pool) == {"engine_fault_garbage": 1}


def test_a_stop_string_ends_a_response_too(pool: SGLangPool):
    ids = tuple(pool.model.tokenizer("so</tool>", add_special_tokens=False)["input_ids"])
    scripted(pool, lambda _: Answer(ids, (-0.5,) * len(ids), "completed", pool.tag))
    stopped = SamplingParams(1.0, 1.0, 16, stop=("</tool>",))
    assert tuple(result(pool, stopped).response_ids) == ids
    with pytest.raises(EngineError, match="is not a stop id, and holds no stop string"):
        result(pool, SamplingParams(1.0, 1.0, 16, stop=("</code>",)))


def test_an_answer_that_ended_with_another_string_is_faulty():
    content = copy.deepcopy(GOOD)
    content["meta_info"]["finish_reason"] = {"type": "stop", "matched": "</tool>"}
    assert read_answer(content, {5}, ("</tool>",)).status == "completed"
    with pytest.raises(FaultyAnswer, match="'</tool>', which was not requested"):
        read_answer(content, {5}, ("</code>",))


def test_a_stop_string_that_an_interruption_splits_ends_the_response(pool: SGLangPool):
    ids = [*byte_tokenizer().encode("</tool>1</tool>2", add_special_tokens=False), ending(pool)]
    experts = numpy.tile(numpy.array([3, 5], "<i4"), 2 + len(ids) - 1).tobytes()
    scripted(pool, lambda _: Answer(ids[12:], [-0.5] * 5, "completed", pool.tag, experts))
    part = Rollout(ids[:12], [-1.0] * 12, [1] * 12, status="aborted", weight_version=0)
    params = SamplingParams(1.0, 1.0, 40, stop=("</tool>",), routing=RoutingShape((0,), 2, 8))
    rollout = result(pool, params, Request((1, 2), (0, 7), part))
    assert (rollout.text, rollout.status) == ("</tool>1</tool>", "completed")
    assert len(rollout.routing) == 2 * (2 + rollout.length - 1)
    scripted(pool, lambda _: Answer(ids[8:15], [-0.5] * 7, "aborted", pool.tag))
    assert result(pool, params).response_ids.tolist() == ids[8:15], "its end was not looked at"


def test_turn_ends_of_the_vocabulary_stop_a_response(model: Model):
    tokenizer = byte_tokenizer()
    before = stop_ids(model.hf_checkpoint, tokenizer)
    tokenizer.add_tokens(["<|eom_id|>"], special_tokens=True)
    added = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    assert stop_ids(model.hf_checkpoint, tokenizer) == before | {added}


# --- new weights at any moment
# --------------------------------------------------------------------------------------------------


def test_a_rollout_has_the_version_of_its_weights(pool: SGLangPool):
    """New weights are expected between the choice of a server and its answer."""
    acquire, sampled = pool.admission.acquire, answer(pool, 2, "completed", ending(pool))
    scripted(pool, lambda _: sampled)

    async def overtaken(*arguments: Any, **named: Any) -> Any:
        server = await acquire(*arguments, **named)
        pool.admission.version = 2  # as by the trainer's thread, at the worst moment
        return server

    pool.admission.acquire = overtaken  # type: ignore[method-assign]
    assert result(pool).versions.tolist() == [1, 1]


def test_a_server_gets_no_weights_while_a_request_chooses_it(pool: SGLangPool):
    """The trainer's thread expects new weights in the middle of a choice: it sees the server idle
    before the choice, or busy after it, and never sends weights to one that is about to sample.
    """
    for client in clients(pool):
        client.part = Answer((), (), "aborted", "")
    chosen, choosing = in_order(pool)[0], threading.Event()
    has_room, seen = pool.admission.has_room, list[bool]()

    def trainer() -> None:
        pool.expect(2)
        seen.append(chosen in pool.admission.without_weights())
        pool.abort()

    thread = threading.Thread(target=trainer, daemon=True)

    def overtaken(server: Any) -> bool:
        room = has_room(server)
        if not choosing.is_set():
            thread.start()
            choosing.set()
            thread.join(timeout=0.3)  # as much time as it wants
        return room

    pool.admission.has_room = overtaken  # type: ignore[method-assign]
    (future,) = pool.submit([ASKED], PARAMS)
    assert choosing.wait(timeout=30)
    thread.join(timeout=30)
    assert seen == [False]
    assert future.result(timeout=30).status == "aborted"


# --- experts
# --------------------------------------------------------------------------------------------------


def test_an_answer_without_experts_is_used_and_counted(pool: SGLangPool):
    params = dataclasses.replace(PARAMS, routing=RoutingShape((0,), 2, 8))
    scripted(pool, lambda _: answer(pool, 2, "completed", ending(pool)))
    assert result(pool, params).routing_bytes == 0
    assert counted(pool) == {"engine_answers_without_routing": 1}


def test_experts_of_other_positions_are_a_fault(pool: SGLangPool):
    params = dataclasses.replace(PARAMS, routing=RoutingShape((0,), 2, 8))
    rows = len(ASKED.known_ids) + 1
    routed = [numpy.tile(numpy.array([3, 5], "<i4"), count).tobytes() for count in (rows, rows + 1)]

    def script(_: Request) -> Answer:
        plain = answer(pool, 2, "completed", ending(pool))
        return dataclasses.replace(plain, routed=routed.pop())

    scripted(pool, script)
    assert result(pool, params).routing.tolist() == [3, 5] * rows
    assert counted(pool) == {"engine_fault_garbage": 1}


def test_a_request_is_for_no_more_tokens_than_the_servers_context_has(pool: SGLangPool):
    for server in pool.servers:
        server.limits = Limits(pool.model.config["vocab_size"], 10, 3)
    scripted(pool, lambda _: answer(pool, 4, "truncated"))
    part = Rollout((3,), (-1.0,), (1,), status="aborted", weight_version=0)
    for before, new_tokens in ((None, 6), (part, 5)):
        assert result(pool, request=Request((1, 2), (0, 7), before)).status == "truncated"
        assert {client.new_tokens for client in clients(pool) if client.asked} == {new_tokens}


def test_a_part_that_no_server_can_read_falls_back_to_what_was_submitted(pool: SGLangPool):
    """That has an episode's earlier turns, and the results of its tools."""
    for server in pool.servers:
        server.limits = Limits(pool.model.config["vocab_size"], 64, 5)
    submitted = Rollout((3, 4), (-1.0, -2.0), (1, 0), status="aborted", weight_version=0)
    cut = [answer(pool, 4)]
    scripted(pool, lambda _: cut.pop() if cut else answer(pool, 2, "completed", ending(pool)))
    rollout = result(pool, request=Request((1, 2), (0, 7), submitted))
    assert rollout.response_ids.tolist() == [3, 4, 3, ending(pool)]
    assert rollout.loss_mask.tolist() == [1, 0, 1, 1] and rollout.versions.tolist() == [0, 0, 1, 1]
    assert counted(pool)["engine_parts_dropped"] == 1
