"""A real server: its log-probs, its weights after every way of sending them, pause, abort,
and what it never sees.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.embedded import EmbeddedEngine
from megatron_stare.rollout.engine import Request, SamplingParams, State, generate
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import Expected, WeightMismatch
from megatron_stare.sync.served_engine import make_sync
from megatron_stare.sync.tensors import by_value
from megatron_stare.sync.weight_sync import WeightBucket, in_buckets
from tests.rollout.sglang.idle import sample_all, send_weights
from tests.rollout.sglang.proxy import Proxy
from tests.rollout.sglang.world import (
    CHECKSUMS,
    CONTEXT,
    LONG,
    PLAIN,
    TOLERANCE,
    VOCABULARY,
    assert_sampled_from,
    attached,
    engine_for,
    make_model,
    requests,
    served,
    sync,
)
from tests.tiny_models import END, byte_tokenizer

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_log_probs_are_those_of_transformers(
    pool: SGLangPool, checkpoint: Path, temperature: float, top_p: float
):
    asked = requests(24)
    rollouts = sample_all(pool, asked, SamplingParams(temperature, top_p, 24)).result()
    assert_sampled_from(checkpoint, asked, rollouts, temperature)
    assert {rollout.status for rollout in rollouts} <= {"completed", "truncated"}
    assert all(rollout.weight_version == 0 and rollout.loss_mask.all() for rollout in rollouts)
    assert len({rollout.response_ids.tobytes() for rollout in rollouts}) == len(asked)
    assert rollouts[0].text == byte_tokenizer().decode(
        rollouts[0].response_ids, skip_special_tokens=True
    )


def test_both_engines_agree_on_the_cold_path(pool: SGLangPool, checkpoint: Path):
    """At temperature 1e-4 sampling is the argmax, so two engines must give the same ids,
    and nearly the log-probs.
    """
    asked, cold = requests(8), SamplingParams(1e-4, 1.0, 12)
    embedded = EmbeddedEngine(
        str(checkpoint), byte_tokenizer(), 4, torch.float32, torch.device("cpu")
    )
    embedded.load_weights(load_file(checkpoint / "model.safetensors").items(), 0)
    ours, theirs = generate(embedded, asked, cold), sample_all(pool, asked, cold).result()
    assert [rollout.response_ids.tolist() for rollout in ours] == [
        rollout.response_ids.tolist() for rollout in theirs
    ]
    for one, other in zip(ours, theirs, strict=True):
        assert one.status == other.status and one.logprobs.tolist() == pytest.approx(
            other.logprobs.tolist(), abs=TOLERANCE
        )


@pytest.mark.parametrize("bucket_mib", [1, 512])
@pytest.mark.parametrize("method", ["broadcast", "tensor", "disk"])
def test_new_weights_are_sampled_from_and_verified(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, method: str, bucket_mib: int
):
    """Buckets of 1 MiB divide the 2.2 MB model; the last one carries the new version."""
    other = make_model(tmp_path / "other", "qwen2", seed=7)
    parts = list(in_buckets(load_file(other / "model.safetensors").items(), bucket_mib << 20))
    assert len(parts) == (3 if bucket_mib == 1 else 1)
    with attached(
        [server.url], checkpoint, tmp_path, sync_method=method, sync_bucket_mib=bucket_mib
    ) as pool:
        asked = requests(8)
        before = sample_all(pool, asked, PLAIN).result()
        sync(pool, other, 5, tmp_path)
        after = sample_all(pool, asked, PLAIN).result()
        assert_sampled_from(checkpoint, asked, before)
        assert_sampled_from(other, asked, after)
        assert {rollout.weight_version for rollout in after} == {5}


@pytest.mark.skipif(not CHECKSUMS, reason="this SGLang computes no checksums")
def test_a_wrong_tensor_is_named(pool: SGLangPool, one: Server, checkpoint: Path):
    weights = load_file(checkpoint / "model.safetensors")
    expected = Expected(one.layout, {"num_key_value_heads": 2})
    for name, tensor in weights.items():
        expected.add(name, tensor)
    expected.check(one.name, pool.run(one.client.checksums(60)).result())
    name = "model.layers.1.mlp.down_proj.weight"
    changed = weights[name].clone()
    changed[3, 4] += 1e-6

    sync = make_sync(pool, pool.settings, str(checkpoint), Path("unused"))
    send = sync.transport.send

    def corrupted(part: WeightBucket, servers: Sequence[Server], tag: str | None) -> None:
        """One element differs from what its checksum was made of, as over a broken link."""
        tensors = [(key, changed if key == name else tensor) for key, tensor in part.tensors]
        send(WeightBucket(tensors), servers, tag)

    sync.transport.send = corrupted  # type: ignore[method-assign]
    with pytest.raises(WeightMismatch, match=rf"{name} has checksum \w+, sent was \w+"):
        send_weights(sync, weights.items(), pool.servers)


@pytest.mark.skipif(not CHECKSUMS, reason="this SGLang computes no checksums")
@pytest.mark.parametrize("faults", [1, 2])
def test_wrong_weights_are_sent_once_more(
    proxy: Proxy, checkpoint: Path, tmp_path: Path, topology: Topology, faults: int
):
    weights = load_file(checkpoint / "model.safetensors")
    settings = (f"sglang.urls=[{proxy.url}]", "sglang.sync_method=tensor")
    engine = engine_for(checkpoint, tmp_path, topology, *settings)
    with contextlib.closing(engine):
        engine.load_weights(weights.items(), 0)
        proxy.faults["/update_weights_from_tensor"] = ["corrupt"] * faults
        ended = pytest.raises(WeightMismatch, match=r"model\.\S+ has checksum")
        with ended if faults == 2 else contextlib.nullcontext():
            engine.load_weights(weights.items(), 1)
        assert engine.counts()["engine_corrupt_syncs"] == 1
        held = [server.version for server in engine.pool.servers]
        assert held == [1 if faults == 1 else 0]


def test_a_pickle_names_torchs_own_loader():
    """Importing Megatron-Core replaces it, and servers refuse the replacement."""
    bucket = [("a", torch.ones(3)), ("b", torch.zeros(2, 2))]
    content = base64.b64decode(by_value(bucket))
    assert content.count(b"ctorch.storage\n_load_from_bytes\n") == 1 and b"megatron" not in content


def test_pausing_holds_requests_in_flight(pool: SGLangPool, one: Server, checkpoint: Path):
    asked = requests(16)
    future = sample_all(pool, asked, LONG)
    time.sleep(0.3)
    pool.run(one.client.pause()).result()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(timeout=2.0)
    for _ in range(4):  # a paused server is silent, not dead
        pool.probe()
    assert one.state is State.PAUSED
    pool.run(one.client.resume()).result()
    assert_sampled_from(checkpoint, asked, future.result(timeout=120))
    assert pool.counts()["engine_fault_timeout"] == 0


def test_aborting_some_requests_keeps_the_others(pool: SGLangPool, one: Server, checkpoint: Path):
    asked = requests(16)
    future = sample_all(pool, asked, LONG)
    time.sleep(0.3)
    pool.run(one.client.pause()).result()
    pool.abort(asked[::2])
    pool.run(one.client.resume()).result()
    rollouts = future.result(timeout=120)
    aborted = [rollout for rollout in rollouts if rollout.status == "aborted"]
    assert 0 < len(aborted) <= 8 and all(rollout.status != "aborted" for rollout in rollouts[1::2])
    assert all(len(rollout.response_ids) < LONG.max_new_tokens for rollout in aborted)
    assert_sampled_from(checkpoint, asked[1::2], rollouts[1::2])
    assert pool.counts()["engine_aborted"] == len(aborted)


def test_cancelling_aborts_on_the_server(pool: SGLangPool, one: Server):
    future = sample_all(pool, requests(16), LONG)
    time.sleep(0.3)
    assert running(pool, one) > 0
    future.cancel()
    # a server notices a dropped connection by itself only after that
    deadline = time.monotonic() + 3.0
    while running(pool, one) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(pool, one) == 0


def running(pool: SGLangPool, server: Server) -> int:
    """Requests that the server itself says it is working on."""
    loads = pool.run(server.client.call("GET", "/v1/loads")).result()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def test_concurrency_is_bounded(server: ServerProcess, checkpoint: Path, tmp_path: Path):
    with attached([server.url], checkpoint, tmp_path, max_concurrency=3) as pool:
        future = sample_all(pool, requests(24), SamplingParams(1.0, 1.0, 60))
        most = 0
        while not future.done():
            most = max(most, pool.servers[0].in_flight)
            time.sleep(0.01)
        assert most == 3 and len(future.result()) == 24


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((5, VOCABULARY), f"lie in \\[0, {VOCABULARY}\\)"),
        ((5, -1), "lie in"),
        ((), "non-empty"),
        ((5,) * (CONTEXT - 20), "exceed the 512 tokens"),
        ((5,) * (CONTEXT - 6), "the 505 that the servers take"),
    ],
)
def test_impossible_requests_never_reach_a_server(
    proxy: Proxy, checkpoint: Path, tmp_path: Path, prompt: tuple[int, ...], message: str
):
    new = 6 if len(prompt) == CONTEXT - 6 else 24
    with attached([proxy.url], checkpoint, tmp_path) as pool:
        with pytest.raises(UserError, match=message):
            sample_all(pool, [*requests(3), Request(prompt, (9, 9))], SamplingParams(1.0, 1.0, new))
        assert proxy.seen["/generate"] == 0


def test_a_response_that_fills_the_context_is_truncated(pool: SGLangPool):
    """SGLang keeps the last two tokens of a context free."""
    limits = pool.limits
    assert (limits.context_length, limits.prompt_length) == (CONTEXT, CONTEXT - 7)
    longest = [Request((5,) * (CONTEXT - 7), (1, number)) for number in range(4)]
    rollouts = sample_all(pool, longest, SamplingParams(1.0, 1.0, 7)).result(timeout=60)
    assert {(5, "truncated")} <= {(rollout.length, rollout.status) for rollout in rollouts}


@pytest.mark.skipif(
    not CHECKSUMS, reason="0.5.9 no longer says what it was started with after an update from disk"
)
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_server_of_another_model_is_refused(server: ServerProcess, tmp_path: Path, key: str):
    other = make_model(
        tmp_path / "other", "qwen2", **{key: 256 if key != "num_hidden_layers" else 3}
    )
    with pytest.raises(UserError, match=rf"serves .*{key}.* start it with the policy's checkpoint"):
        attach(server.url, other, tmp_path)


def attach(url: str, checkpoint: Path, directory: Path) -> None:
    with contextlib.closing(
        SGLangPool(SGLangConfig(urls=[url]), served(checkpoint), directory)
    ) as pool:
        pool.start().result(timeout=60)


@pytest.mark.skipif(not CHECKSUMS, reason="0.5.9 fails to write the answer of its /tokenize")
def test_a_server_with_another_tokenizer_is_refused(proxy: Proxy, checkpoint: Path, tmp_path: Path):
    proxy.faults["/tokenize"] = [lambda answer: answer["tokens"].reverse()]
    with pytest.raises(UserError, match="has another tokenizer than"):
        attach(proxy.url, checkpoint, tmp_path)
    assert END in byte_tokenizer().all_special_tokens
