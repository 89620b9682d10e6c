"""What needs no server: answers checked, weights hashed as a server does, requests balanced,
prompts refused.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.loop.sync.update_group import address_for
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
from megatron_stare.rollout.sglang.answers import read_answer
from megatron_stare.rollout.sglang.client import ServerInfo
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.rollout.sglang.server import Model, Server, check_model
from megatron_stare.rollout.sglang.weights import (
    Expected,
    Layout,
    WeightMismatch,
    buckets,
    cpu_hash,
    gpu_hash,
)
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
def test_finish_reasons(kind: str, status: str):
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
        ((1,) * 17, "exceed the model's"),
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


# --- weights
# --------------------------------------------------------------------------------------------------


def test_buckets_hold_the_stream_in_order_and_mark_the_last():
    stream = [(str(n), torch.zeros(n + 1)) for n in range(9)]
    parts = list(buckets(iter(stream), 40))
    assert [name for part, _ in parts for name, _ in part] == [name for name, _ in stream]
    assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
    assert all(
        len(part) == 1 or sum(tensor.nbytes for _, tensor in part) <= 40 for part, _ in parts
    )
    assert [len(part) for part, _ in parts] == [4, 1, 1, 1, 1, 1]


def naive_gpu_hash(data: bytes) -> str:
    """The hash in plain Python integers, word by word."""
    mask = 0xFFFFFFFF

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & mask
        x ^= x >> 13
        x = x * 0xC2B2AE35 & mask
        return x ^ x >> 16

    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[n : n + 4], "little") for n in range(0, len(data), 4)]
    seeds = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & mask)
    total = 0
    for start in range(0, len(words), 8192):
        sums = [0, 0]
        for place, word in enumerate(words[start : start + 8192], start=start):
            for half, (factor, turn) in enumerate(((0x27D4EB2D, 15), (0x165667B1, 13))):
                turned = (place << turn | place >> 32 - turn) & mask
                sums[half] += mix(word ^ ((place * factor + seeds[half]) & mask) ^ turned)
        high, low = (mix((value & mask) ^ len(data)) for value in sums)
        total += high << 32 | low
    wide = (1 << 64) - 1
    total &= wide
    total = ((total ^ total >> 30) * 0xBF58476D1CE4E5B9) & wide
    total = ((total ^ total >> 27) * 0x94D049BB133111EB) & wide
    return f"{total ^ total >> 31:016x}"


@pytest.mark.parametrize("count", [1, 3, 8192, 8193, 20_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_hash_equals_a_naive_one(count: int, dtype: torch.dtype):
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    assert gpu_hash(tensor) == naive_gpu_hash(tensor.view(torch.uint8).numpy().tobytes())


def test_the_gpu_hash_equals_what_sglangs_own_kernel_computed():
    """Values of SGLang 0.5.23's Triton kernel,
    run by Triton's interpreter on torch.randn after manual_seed(0).
    """
    torch.manual_seed(0)
    one, two = torch.randn(3, 5003), torch.randn(77, 301).bfloat16()
    assert [gpu_hash(one), gpu_hash(two), gpu_hash(two[0])] == [
        "a279930f5f4029c7",
        "cf42c605592b7764",
        "def587908710ea87",
    ]


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (70, 8),
        f"{layer}self_attn.q_proj.weight": (8, 8),
        f"{layer}self_attn.k_proj.weight": (4, 8),
        f"{layer}self_attn.v_proj.weight": (4, 8),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}mlp.gate_proj.weight": (12, 8),
        f"{layer}mlp.up_proj.weight": (12, 8),
        f"{layer}mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def answer_of(expected: Expected) -> list[dict[str, Any]]:
    places = [
        {"tp_rank": rank, "tp_size": expected.layout.tensor_size}
        for rank in range(expected.layout.tensor_size)
    ]
    return [
        {"checksums": dict(sums), "parallelism_info": [place]}
        for sums, place in zip(expected.sums, places, strict=True)
    ]


def test_fused_and_split_weights_are_hashed_as_the_ranks_hold_them():
    sent, layer = weights(), "model.layers.0."
    expected = Expected(Layout(2, torch.bfloat16, on_gpu=False), key_value_heads=1)
    for name, tensor in reversed(sent.items()):  # the order of the parts must not matter
        expected.add(name, tensor)
    half = {name: tensor.bfloat16() for name, tensor in sent.items()}
    q, k, v = (half[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv")
    padded = torch.cat([half["model.embed_tokens.weight"], torch.zeros(58, 8).bfloat16()])
    gate, up = (
        torch.cat([half[f"{layer}mlp.{part}_proj.weight"], torch.zeros(52, 8).bfloat16()])
        for part in ("gate", "up")
    )
    for rank in range(2):
        rows, wide, sums = (
            slice(4 * rank, 4 * rank + 4),
            slice(32 * rank, 32 * rank + 32),
            expected.sums[rank],
        )
        # One key-value head for two ranks: both hold it.
        assert sums[f"{layer}self_attn.qkv_proj.weight"] == cpu_hash(torch.cat([q[rows], k, v]))
        assert sums[f"{layer}self_attn.o_proj.weight"] == cpu_hash(
            half[f"{layer}self_attn.o_proj.weight"][:, rows]
        )
        assert sums["model.embed_tokens.weight"] == cpu_hash(padded[64 * rank : 64 * rank + 64])
        assert sums[f"{layer}mlp.gate_up_proj.weight"] == cpu_hash(
            torch.cat([gate[wide], up[wide]])
        )
        assert sums["model.norm.weight"] == cpu_hash(half["model.norm.weight"])
    expected.check("server", answer_of(expected))


def test_a_layers_experts_are_two_tensors_and_on_a_gpu_not_compared():
    dice, place = torch.Generator().manual_seed(4), "model.layers.1.mlp.experts"
    sent = {
        f"{place}.{number}.{part}_proj.weight": torch.randn(*shape, generator=dice)
        for number in range(2)
        for part, shape in (("gate", (64, 8)), ("up", (64, 8)), ("down", (8, 64)))
    }
    expected = Expected(Layout(2, torch.float32, on_gpu=False), key_value_heads=2, experts=2)
    for name, tensor in reversed(sent.items()):
        expected.add(name, tensor)
    for rank in range(2):
        wide, sums = slice(32 * rank, 32 * rank + 32), expected.sums[rank]
        gates_ups = [
            sent[f"{place}.{number}.{part}_proj.weight"][wide]
            for number in range(2)
            for part in ("gate", "up")
        ]
        downs = [sent[f"{place}.{number}.down_proj.weight"][:, wide] for number in range(2)]
        assert sums == {
            f"{place}.w13_weight": cpu_hash(torch.cat(gates_ups)),
            f"{place}.w2_weight": cpu_hash(torch.cat(downs)),
        }
    elsewhere = Expected(Layout(1, torch.float32, on_gpu=True), key_value_heads=2, experts=2)
    for name, tensor in (sent | weights()).items():
        elsewhere.add(name, tensor)
    answer = answer_of(elsewhere)
    answer[0]["checksums"][f"{place}.w13_weight"] = "0" * 16
    elsewhere.check("server", answer)


@pytest.mark.parametrize("fault", ["changed", "unknown", "missing"])
def test_a_mismatch_names_the_tensor(fault: str):
    expected = Expected(Layout(1, torch.float32, on_gpu=True), key_value_heads=2)
    for name, tensor in weights().items():
        expected.add(name, tensor)
    answer = answer_of(expected)
    sums, name = answer[0]["checksums"], "model.norm.weight"
    if fault == "changed":
        sums[name] = "0" * 16
    elif fault == "unknown":
        name = "model.rotary.scale"
        sums[name] = "0" * 16
    else:
        del sums[name]
    with pytest.raises(WeightMismatch, match=name.replace(".", r"\.")):
        expected.check("server", answer)


# --- the pool
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def idle(model: Model, tmp_path: Path) -> Iterator[SGLangPool]:
    with idle_pool(model, tmp_path) as pool:
        yield pool


@pytest.mark.parametrize(
    "reason", ["dead", "paused", "starting", "other weights", "full", "pool paused"]
)
def test_a_server_that_cannot_take_a_request_gets_none(idle: SGLangPool, reason: str):
    first = idle.servers[0]
    if reason == "other weights":
        first.weights = "somebody-1"
        assert idle.without_weights() == [first]
    elif reason == "full":
        first.in_flight = 4
    elif reason == "pool paused":
        idle._paused = True
    else:
        first.state = State(reason)
    assert not idle._has_room(first)
    assert idle._has_room(idle.servers[1]) is (reason != "pool paused")


def test_a_failed_pool_says_so_to_whoever_waits(idle: SGLangPool):
    idle.expect(2)  # no server has these weights

    async def wait() -> None:
        waiting = asyncio.create_task(idle._acquire(Request((1,), (0,))))
        await asyncio.sleep(0.01)
        await idle._fail(RuntimeError("all servers are gone"))
        await waiting

    with pytest.raises(RuntimeError, match="all servers are gone"):
        asyncio.run(wait())


def test_one_death_is_noted_once(model: Model, tmp_path: Path):
    """Every failed request looks at its server,
    some of them before the new process has taken the old one's place.
    """
    process = ServerProcess(["true"], "unread", [], tmp_path / "log.txt", "127.0.0.1")
    process.process.wait()
    server = Server("a", model, SGLangConfig(), lambda: process)
    server.process, server.state = process, State.READY
    assert asyncio.run(server.look()) is State.DEAD
    server.state = State.STARTING
    assert asyncio.run(server.look()) is State.STARTING


def test_two_requests_of_one_seed_are_refused(idle: SGLangPool):
    for server in idle.servers:
        server.limits = LIMITS
    with pytest.raises(ValueError, match="share a seed"):
        idle.generate([Request((1,), (0,)), Request((2,), (0,))], PARAMS)


def info_of(directory: str, **changes: Any) -> ServerInfo:
    about: dict[str, Any] = {
        "version": "0.5.23",
        "model_path": directory,
        "tokenizer_path": directory,
        "model_type": "qwen2",
        "device": "cpu",
        "dtype": "float32",
        "context_length": 512,
        "prompt_length": 506,
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


def test_the_trainers_address():
    assert address_for(["http://127.0.0.1:1", "http://localhost:2"]) == "127.0.0.1"
