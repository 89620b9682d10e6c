"""Tests without a server: answers checked, weights hashed as a server does, requests balanced,
prompts refused.
"""

from __future__ import annotations

import asyncio
import copy
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.rollout.engine import (
    FaultyAnswer,
    Limits,
    Request,
    SamplingParams,
    State,
    check_answer,
    ids_of,
    logprobs_of,
)
from megatron_stare.rollout.sglang.answers import Received, read_answer
from megatron_stare.rollout.sglang.client import ServerFault, ServerInfo, SGLangClient
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.rollout.sglang.server import Model, Server, check_model
from megatron_stare.sync import broadcast
from megatron_stare.sync.broadcast import address_for
from tests.rollout.sglang.idle import idle_pool, tiny_model
from tests.tiny_models import tiny_config, write_checkpoint

PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=4)
LIMITS = Limits(vocab_size=50, context_length=20, prompt_length=14)

GOOD: dict[str, Any] = {
    "text": "never read",
    "output_ids": [3, 4, 5],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 5},
        "weight_version": "run-7",
        "output_token_logprobs": [[-1.5, 3, None], [-0.5, 4, None], [0.0, 5, None]],
    },
}


def test_a_good_answer_is_read_whole():
    answer = read_answer(GOOD)
    assert answer.ids.tolist() == [3, 4, 5] and answer.logprobs.tolist() == [-1.5, -0.5, 0.0]
    assert (answer.status, answer.weight_version) == ("completed", "run-7")
    check_answer(answer.ids, answer.logprobs, answer.status, PARAMS.max_new_tokens, LIMITS)


@pytest.mark.parametrize(
    ("kind", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")]
)
def test_finish_reasons_are_read(kind: str, status: str):
    content = copy.deepcopy(GOOD)
    content["meta_info"]["finish_reason"] = {"type": kind}
    assert read_answer(content).status == read_answer(content, {4}).status == status
    assert read_answer(content, {5}).status == ("completed" if kind == "length" else status), (
        "its last token ends it"
    )


def test_an_abort_before_the_first_token_is_empty():
    content = {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort", "status_code": None}},
    }
    assert not len(read_answer(content).ids)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("meta_info"),
        lambda c: c.pop("output_ids"),
        lambda c: c["output_ids"].append(9),
        lambda c: c["output_ids"].__setitem__(0, 9),
        lambda c: c["meta_info"].pop("finish_reason"),
        lambda c: c["meta_info"].__setitem__("finish_reason", None),
        lambda c: c["meta_info"].__setitem__("finish_reason", {"type": "bored"}),
        lambda c: c["meta_info"].__setitem__(
            "finish_reason", {"type": "abort", "status_code": 500, "message": "oom"}
        ),
        lambda c: c["meta_info"].pop("output_token_logprobs"),
        lambda c: c["meta_info"].__setitem__("output_token_logprobs", [[-1.0]]),
    ],
)
def test_an_answer_without_its_parts_is_faulty(change: Any):
    content = copy.deepcopy(GOOD)
    change(content)
    with pytest.raises(FaultyAnswer):
        read_answer(content)


@pytest.mark.parametrize(
    ("ids", "logprobs", "status", "message"),
    [
        ((1, 2), (-1.0,), "completed", "2 ids came with 1 log-probs"),
        ((1, 2, 3, 4, 5), (-1.0,) * 5, "truncated", "5 ids came where 4"),
        ((1, 2), (-1.0,) * 2, "truncated", "cut off after 2 of 4"),
        ((), (), "completed", "without a single id"),
        ((1, 50), (-1.0,) * 2, "completed", "id 50 at place 1 is outside"),
        ((-1,), (-1.0,), "completed", "id -1 at place 0"),
        ((1.0,), (-1.0,), "completed", r"id 1\.0"),
        ((True,), (-1.0,), "completed", "id True"),
        (("1",), (-1.0,), "completed", "id '1'"),
        ((1,), (math.nan,), "completed", "log-prob nan"),
        ((1,), (-math.inf,), "completed", "log-prob -inf"),
        ((1,), (None,), "completed", "log-prob None"),
        ((1,), (0.2,), "completed", "above 0"),
    ],
)
def test_values_are_checked_one_by_one(ids: Any, logprobs: Any, status: Any, message: str):
    with pytest.raises(FaultyAnswer, match=message):
        check_answer(ids_of(ids), logprobs_of(logprobs), status, PARAMS.max_new_tokens, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((1,) * 17, "exceed the 20 tokens that the model"),
        ((1,) * 15, "exceeds the 14"),
        ((), "non-empty"),
        ((50,), "lie in"),
    ],
)
def test_requests_are_refused_with_a_remedy(prompt: tuple[int, ...], message: str):
    with pytest.raises(UserError, match=message):
        LIMITS.check(
            Request(prompt, (0,)), PARAMS if len(prompt) != 15 else SamplingParams(1.0, 1.0, 2)
        )


# --- the pool
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def idle(model: Model, tmp_path: Path) -> Iterator[SGLangPool]:
    with idle_pool(model, tmp_path) as pool:
        yield pool


@pytest.mark.parametrize("reason", ["dead", "paused", "starting", "other weights", "full"])
def test_a_server_that_cannot_take_a_request_gets_none(idle: SGLangPool, reason: str):
    first = idle.servers[0]
    if reason == "other weights":
        first.weights = "somebody-1"
        assert idle.admission.without_weights() == [first]
    elif reason == "full":
        first.in_flight = 4
    else:
        first.state = State(reason)
    assert not idle.admission.has_room(first)
    assert idle.admission.has_room(idle.servers[1])


def test_a_failed_pool_raises_in_every_waiting_client(idle: SGLangPool):
    idle.expect(2)  # no server has these weights

    async def wait() -> None:
        waiting = asyncio.create_task(idle.admission.acquire(Request((1,), (0,))))
        await asyncio.sleep(0.01)
        await idle.admission.fail(RuntimeError("all servers are gone"))
        await waiting

    with pytest.raises(RuntimeError, match="all servers are gone"):
        asyncio.run(wait())


def test_one_death_is_counted_once(model: Model, tmp_path: Path):
    """Every failed request looks at its server,
    some of them before the new process has taken the old one's place.
    """
    process = ServerProcess(["true"], "unread", [], tmp_path / "log.txt", "127.0.0.1")
    process.process.wait()
    server = Server("a", model, SGLangConfig(), lambda: process)
    server.process, server.state = process, State.READY
    assert asyncio.run(server.probe()) is State.DEAD
    server.state = State.STARTING
    assert asyncio.run(server.probe()) is State.STARTING


def test_two_requests_of_one_seed_are_refused(idle: SGLangPool):
    for server in idle.servers:
        server.limits = LIMITS
    with pytest.raises(ValueError, match="share a seed"):
        idle.submit([Request((1,), (0,)), Request((2,), (0,))], PARAMS)


def info_of(directory: str, **changes: Any) -> ServerInfo:
    about: dict[str, Any] = {
        "model_path": directory,
        "model_type": "qwen2",
        "device": "cpu",
        "dtype": "float32",
        "context_length": 512,
        "prompt_length": 505,
        "tensor_size": 1,
        "pipeline_size": 1,
        "weight_version": "default",
    }
    return ServerInfo(**(about | changes))


def test_a_server_of_another_model_is_refused(model: Model, tmp_path: Path):
    check_model("url", info_of(model.hf_checkpoint), model)
    check_model("url", info_of("/a/path/on/another/machine"), model)
    with pytest.raises(UserError, match="whose model_type is 'llama', not 'qwen2'"):
        check_model("url", info_of("/a/path/on/another/machine", model_type="llama"), model)
    other = write_checkpoint(tmp_path / "other", tiny_config("qwen2", intermediate_size=48))
    with pytest.raises(UserError, match="whose intermediate_size is 48, not 44"):
        check_model("url", info_of(str(other)), model)


@pytest.mark.parametrize(("longest", "context"), [(506, 512), (294, 300)])
def test_the_memory_of_a_servers_cache_limits_its_context(
    longest: int, context: int, monkeypatch: pytest.MonkeyPatch
):
    answers: dict[str, dict[str, Any]] = {
        "/server_info": {"max_req_input_len": longest, "tp_size": 1},
        "/model_info": {"model_path": "m"},
        "/v1/models": {"data": [{"max_model_len": 512}]},
    }

    async def answer(method: str, path: str, **_: object) -> dict[str, Any]:
        return answers[path]

    client = SGLangClient("http://127.0.0.1:1")
    monkeypatch.setattr(client, "call", answer)
    info = asyncio.run(client.info())
    assert (info.context_length, info.prompt_length) == (context, longest - 1)


@pytest.mark.parametrize("url", ["http://127.0.0.2:1", "http://localhost:2", "http://[::1]:3"])
def test_the_trainers_address_for_servers_of_this_machine(url: str):
    assert address_for([url]) == "127.0.0.1"


def test_the_trainers_address_for_a_server_that_has_an_ipv6_address_only(
    monkeypatch: pytest.MonkeyPatch,
):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(broadcast, "is_loopback", lambda host: False)
    assert address_for(["http://[::1]:30000"]) == "::1"


def test_a_server_without_an_address_is_named():
    with pytest.raises(
        UserError, match=r"no.such.host.invalid; correct sglang.urls, or set sglang"
    ):
        address_for(["http://127.0.0.1:1", "http://no.such.host.invalid:2"])


@pytest.mark.parametrize("depth", [2_000, 1_000_000])
def test_deeply_nested_json_is_refused(depth: int):
    """orjson refuses it, then the standard library runs out of its stack."""
    deep = b"[" * depth + b"]" * depth

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(deep)}\r\n\r\n"
        writer.write(head.encode() + deep)
        await writer.drain()
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            client = SGLangClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            try:
                await client.call("GET", "/deep")
            finally:
                await client.close()

    with pytest.raises(ServerFault, match="no JSON object") as caught:
        asyncio.run(ask())
    assert caught.value.kind == "garbage"
    received = Received((), (), LIMITS, 8)
    with pytest.raises(ValueError, match="nested too deeply"):
        received.feed(b"data: " + deep + b"\n")


@pytest.mark.parametrize("listed", [True, False], ids=["SGLang 0.5.23", "SGLang 0.5.15"])
def test_the_place_of_a_ranks_checksums_is_read_from_either_version(
    listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"tp_rank": 1, "tp_size": 2}
    rank = {"checksums": {"norm": "0f"}, "parallelism_info": [place] if listed else place}

    async def answer(*_: object, **__: object) -> dict[str, Any]:
        return {"success": True, "ranks": [rank]}

    client = SGLangClient("http://127.0.0.1:1")
    monkeypatch.setattr(client, "call", answer)
    (found,) = asyncio.run(client.checksums(1.0))
    assert found == {"checksums": {"norm": "0f"}, "parallelism_info": place}
