"""A real server with weights in FP8 blocks: every way of sending, a wrong bit, a sync that is cut
off, and a run that trains the rounded weights. Its matrix product alone is a stand-in
(tools/sglang_cpu/block_fp8.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.huggingface.fp8_weights import EncodedWeights, block_matrices
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.sglang.server import check_model
from megatron_stare.sync.served_engine import ServedEngine, make_sync
from megatron_stare.sync.weight_sync import WeightSync
from tests.reference import e4m3_blocks
from tests.rollout.sglang.idle import sample_all, send_weights
from tests.rollout.sglang.world import CHECKSUMS, PLAIN, engine_for, make_model, requests, served
from tests.small_run import small_config
from tests.sync.delta.world import serving, stepped, url_of

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not CHECKSUMS, reason="this SGLang computes no checksums"),
]
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
FP8 = ("policy.dtype=bf16", "policy.weight_quantization=fp8", "sglang.weights=fp8")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose matrices have whole blocks."""
    directory = tmp_path_factory.mktemp("wide") / "model"
    return make_model(directory, "qwen3", **WIDE, num_hidden_layers=2)


@pytest.fixture(scope="module")
def rounded(wide: Path) -> dict[str, Tensor]:
    """In bf16."""
    stored = load_file(wide / "model.safetensors")
    encoded = block_matrices(read_hf_config(str(wide)))
    return {n: (e4m3_blocks(t) if n in encoded else t).bfloat16() for n, t in stored.items()}


@pytest.fixture(scope="module")
def engine(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """A server that the engine started. Buckets are small: matrices and scales lie apart."""
    directory = tmp_path_factory.mktemp("run")
    place = topologies.start(PolicyConfig())
    found = engine_for(wide, directory, place, *FP8, "sglang.sync_bucket_mib=1")
    with contextlib.closing(found):
        found._started.result()
        yield found
    topologies.stop()


@pytest.fixture
def sending(engine: ServedEngine, tmp_path: Path) -> Any:
    """A WeightSync of a method."""
    pool = engine.pool
    assert pool is not None

    def of(method: str, **settings: Any) -> WeightSync:
        changed = dataclasses.replace(pool.settings, sync_method=method, **settings)
        return make_sync(pool, changed, pool.model.directory, tmp_path / "weights")

    return of


def stream(weights: dict[str, Tensor], wide: Path) -> EncodedWeights:
    return EncodedWeights(list(weights.items()), block_matrices(read_hf_config(str(wide))))


def apart(engine: ServedEngine, wide: Path, weights: dict[str, Tensor]) -> float:
    """Mean distance of a batch's log-probs from those of transformers with these weights."""
    assert engine.pool is not None
    asked = requests(8)
    rollouts = sample_all(engine.pool, asked, PLAIN).result()
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float32).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    found: list[float] = []
    for request, rollout in zip(asked, rollouts, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *rollout.response_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(request.prompt_ids) :, None])
        found += (expected[:, 0] - torch.tensor(rollout.logprobs)).abs().tolist()
    return float(numpy.mean(found))


def test_a_started_server_waits_for_its_first_weights_and_holds_them(
    engine: ServedEngine, wide: Path, rounded: dict[str, Tensor]
) -> None:
    """Sent by broadcast, checksums compared; its answers are those of the rounded model."""
    pool = engine.pool
    assert pool is not None
    pool.expect(0)
    assert not pool.admission.has_room(pool.servers[0])
    stored = load_file(wide / "model.safetensors")
    engine.load_weights([(n, t.bfloat16()) for n, t in stored.items()], 0)
    assert pool.admission.has_room(pool.servers[0])
    near, far = apart(engine, wide, rounded), apart(engine, wide, stored)
    assert near < 0.05 and near < 0.75 * far, (near, far)  # the server computes in bf16
    log = (Path(pool.model.directory).parent / "sglang_0.log").read_text()
    assert "--load-format dummy" in log and log.count('"POST /weights_checker') == 1


@pytest.mark.parametrize("method", ["tensor", "disk", "delta"])
def test_every_way_of_sending_brings_the_same_bits(
    method: str,
    engine: ServedEngine,
    wide: Path,
    rounded: dict[str, Tensor],
    sending: Any,
    tmp_path: Path,
) -> None:
    """Each sync compares checksums; a relay's second sync is always a delta, whatever the machine's
    speed.
    """
    pool = engine.pool
    assert pool is not None
    with serving(tmp_path / "relay") as relay:
        sync = sending(method, relays=[url_of(relay)])
        for version, weights in enumerate((rounded, stepped(rounded, 2))):
            pool.expect(10 + version)
            send_weights(sync, stream(weights, wide), pool.servers)
            assert pool.admission.has_room(pool.servers[0])
    if method == "delta":
        assert sync.metrics()["sync_delta"] == 1.0
        assert 0 < sync.metrics()["sync_bytes"] < sync.metrics()["sync_bytes_full"] / 2


def test_a_wrong_bit_is_found(
    engine: ServedEngine, wide: Path, rounded: dict[str, Tensor], sending: Any
) -> None:
    """The bit is of a code that is fused with others, or of a scale."""
    pool = engine.pool
    assert pool is not None
    pool.expect(20)
    sync, sent = sending("tensor"), list(stream(rounded, wide))
    send_weights(sync, sent, pool.servers)
    assert sync.differing(sent, pool.servers) == ""
    key = "model.layers.1.self_attn.k_proj.weight"
    for name, change in (
        (key, lambda code: code.view(torch.uint8)[3, 5].bitwise_xor_(1)),
        (f"{key}_scale_inv", lambda scale: scale[0, 1].mul_(2)),
    ):
        wrong = [(each, tensor.clone()) for each, tensor in sent]
        change(dict(wrong)[name])
        assert "model.layers.1.self_attn.qkv_proj.weight" in sync.differing(wrong, pool.servers)


def test_a_sync_cut_off_between_buckets_leaves_no_server_in_service(
    engine: ServedEngine, wide: Path, rounded: dict[str, Tensor], sending: Any
) -> None:
    pool, sync = engine.pool, sending("broadcast")
    assert pool is not None

    def cut() -> Iterator[tuple[str, Tensor]]:
        for number, named in enumerate(stream(stepped(rounded, 3), wide)):
            if number == 12:
                raise RuntimeError("a rank died")
            yield named

    pool.expect(30)
    with pytest.raises(RuntimeError, match="a rank died"):
        send_weights(sync, cut(), pool.servers)
    assert pool.admission.without_weights() == pool.servers
    assert not pool.admission.has_room(pool.servers[0])
    send_weights(sync, stream(rounded, wide), pool.servers)
    assert pool.admission.has_room(pool.servers[0])


def test_a_server_of_another_format_is_refused(engine: ServedEngine, wide: Path) -> None:
    pool = engine.pool
    assert pool is not None and pool.servers[0].info is not None
    info, ours = pool.servers[0].info, pool.model
    check_model("url", info, ours)
    with pytest.raises(UserError, match=r"holds FP8 weights, and sglang.weights=policy sends"):
        check_model("url", info, served(wide))
    with pytest.raises(UserError, match=r"holds no FP8 weights .*--load-format dummy"):
        check_model("url", dataclasses.replace(info, model_path=str(wide)), ours)


@pytest.mark.parametrize("rounded", ["fp8", "fp8_experts"])
def test_experts_are_held_in_blocks(rounded: str, tmp_path: Path, topology: Topology) -> None:
    """All linear layers of a model with experts, or its experts alone; a wrong bit is found."""
    sparse = {"num_experts": 4, "moe_intermediate_size": 128, "mlp_only_layers": []}
    model = make_model(tmp_path / "model", "qwen3_moe", **WIDE, **sparse, num_hidden_layers=2)
    hf = read_hf_config(str(model))
    settings = (*FP8[:1], f"policy.weight_quantization={rounded}", *FP8[2:])
    engine = engine_for(model, tmp_path / "run", topology, *settings)
    with contextlib.closing(engine):
        stored = load_file(model / "model.safetensors")
        engine.load_weights([(name, tensor.bfloat16()) for name, tensor in stored.items()], 0)
        pool = engine.pool
        assert pool is not None and pool.admission.has_room(pool.servers[0])
        found = sample_all(pool, requests(2), PLAIN).result()
        assert all(len(rollout.response_ids) for rollout in found)
        encoded = block_matrices(hf, experts_only=rounded == "fp8_experts")
        wrong = [(n, t.clone()) for n, t in EncodedWeights(engine._weights.weights, encoded)]
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        dict(wrong)[name].view(torch.uint8)[3, 5].bitwise_xor_(1)
        message = engine._sync.differing(wrong, pool.servers)
        assert "model.layers.1.mlp.experts.w13_weight" in message


def test_a_run_trains_what_its_fp8_server_holds_and_resumes(
    wide: Path, tmp_path: Path, topology: Topology
) -> None:
    """Checksums are compared at every sync; log-probs differ by rounding in bf16 alone."""
    settings = ("rollout.engine=sglang", f"policy.hf_checkpoint={wide}", *FP8)
    settings += ("run.save_interval=1", "sglang.sync_timeout=120", "optimizer.lr=1e-3")
    for steps in (1, 3):
        config = small_config(tmp_path, *settings, f"train.num_rollout={steps}")
        assert Trainer(config, topology).run(Interrupt())
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["logprob_diff_mean"] < 0.05 for row in rows)
    parts = {
        f"sync_seconds_{each}" for each in ("gather", "encode", "send", "hash", "load", "verify")
    }
    for row in rows:
        assert parts == {key for key in row if key.startswith("sync_seconds")}
        assert all(row[part] >= 0 for part in parts) and row["sync_seconds_encode"] > 0
        assert sum(row[part] for part in parts) <= row["seconds_sync"]
    log = (Path(config.run.dir) / "servers" / "sglang_0.log").read_text()
    assert log.count('"POST /weights_checker') >= 4
