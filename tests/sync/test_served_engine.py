"""Two ranks and one server on their device: who gives memory back, and when it is taken."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import torch
import torch.distributed as dist

from megatron_stare.config import Config, UserError, override
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.sync import served_engine
from tests.distributed import run_distributed
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.idle import tiny_model
from tests.tiny_models import byte_tokenizer

SETTINGS = (
    "rollout.engine=sglang",
    "sglang.colocated=true",
    "sglang.sync_method=tensor",
    "sglang.verify_weights=false",
)


def share(rank: int, world_size: int, directory: Path, url: str) -> None:
    """Release, and new weights; each rank reports its released memory."""
    release = served_engine.release_workspaces

    def give_back() -> None:
        time.sleep(0.3 * rank)  # the last rank is late
        release()
        httpx.post(f"{url}/given_back", json={"rank": rank})

    served_engine.release_workspaces = give_back
    paths = (f"policy.hf_checkpoint={directory / 'model'}", f"run.dir={directory / 'run'}")
    config = override(Config(), [*paths, f"sglang.urls=[{url}]", *SETTINGS])
    topology = topologies.start(config.policy)
    engine = served_engine.ServedEngine(config, byte_tokenizer(), topology)
    try:
        for version in range(2):
            engine.load_weights([("a", torch.ones(3)), ("b", torch.zeros(2))], version)
            engine.release_memory()
        engine.load_weights([("a", torch.ones(3))], 2)
    finally:
        engine.close()


def test_waiting_for_idle_servers_counts_as_stalled(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is one, and so is a server that died and is being looked for."""
    tiny_model(tmp_path / "model")
    monkeypatch.setattr(served_engine, "HEARTBEAT_SECONDS", 0.5)
    moves: list[int] = []
    monkeypatch.setattr(served_engine.heartbeat, "moved", lambda: moves.append(1))
    paths = (f"policy.hf_checkpoint={tmp_path / 'model'}", f"run.dir={tmp_path / 'run'}")
    with fake_servers(1, model_path=str(tmp_path / "model"), vocab_size=71, hold_at=4) as (url,):
        config = override(Config(), [*paths, f"sglang.urls=[{url}]", *SETTINGS[0::2], SETTINGS[3]])
        engine = served_engine.ServedEngine(config, byte_tokenizer(), topology)
        with contextlib.closing(engine):
            engine.load_weights([("a", torch.ones(3))], 0)
            (held,) = engine.submit([Request((1, 2, 3), (0, 0))], SamplingParams(1.0, 1.0, 20))
            engine._say([held])
            moves.clear()
            assert engine._say([held]) == "wait" and not moves
            engine.abort()
            engine.wait([held])
            assert moves and held.result().status == "aborted"


def first_rank_fails(rank: int, world_size: int, directory: Path, url: str) -> None:
    """Rank 0 has no memory for a tensor that the other rank sends it."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3)
        if rank == 0:
            raise MemoryError("no memory for b")
        dist.broadcast(torch.zeros(1), 0)

    paths = (f"policy.hf_checkpoint={directory / 'model'}", f"run.dir={directory / 'run'}")
    config = override(Config(), [*paths, f"sglang.urls=[{url}]", *SETTINGS[0::2], SETTINGS[3]])
    topology = topologies.start(config.policy)
    with contextlib.closing(
        served_engine.ServedEngine(config, byte_tokenizer(), topology)
    ) as engine:
        engine.load_weights(weights(), 0)


def test_a_first_rank_that_fails_between_collectives_says_so_at_once(tmp_path: Path) -> None:
    """It does not enter another collective than the one that the other rank waits in."""
    tiny_model(tmp_path / "model")
    expected = pytest.raises(RuntimeError, match="MemoryError: no memory for b")
    with fake_servers(1, model_path=str(tmp_path / "model"), vocab_size=71) as (url,), expected:
        run_distributed(first_rank_fails, 2, tmp_path, url)


def test_servers_take_memory_when_every_rank_has_given_it_back(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    with fake_servers(1, model_path=str(tmp_path / "model"), vocab_size=71) as (url,):
        run_distributed(share, 2, tmp_path, url)
        order = httpx.get(f"{url}/seen").json()["order"]
    update = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
    given = ["given_back"] * 2
    resume = "resume_memory_occupation"
    each = ["release_memory_occupation", *given, resume, *update, *given, resume]
    names = [path.removeprefix("/") for path in order]
    assert [name for name in names if name in {*each}] == [*each, *each, *each]


def test_servers_that_would_start_from_fp8_weights_are_refused_before_they_start(
    tmp_path: Path,
) -> None:
    """Attached servers may hold bf16 weights, which their own check asks for."""
    tiny_model(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": stored}))
    settings = ["rollout.engine=sglang", f"policy.hf_checkpoint={file.parent}"]
    config = override(Config(), settings)
    with pytest.raises(UserError, match=r"quantised weights.* sglang\.weights=policy sends"):
        served_engine.served_model(config, byte_tokenizer())
    attached = override(config, ["sglang.urls=[http://node1:30000]"])
    assert served_engine.served_model(attached, byte_tokenizer()).directory == str(file.parent)


@pytest.mark.parametrize("failing", ["weights", "server"])
def test_an_error_of_the_weights_is_raised_and_one_of_a_server_is_not(
    failing: str, topology: Topology
) -> None:
    """After a server's fault the other ranks' shards are gathered to the end."""
    given: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcd":
            if name == "c" and failing == "weights":
                raise KeyError("a shard")
            given.append(name)
            yield name, torch.zeros(2)

    def send(buckets: Iterator[object], *_: object) -> None:
        for _bucket in buckets:
            if failing == "server":
                raise RuntimeError("a server")

    engine = object.__new__(served_engine.ServedEngine)
    engine.topology, engine.pool = topology, Mock()
    engine._hands_out, engine._bucket_bytes, engine._weights = False, 8, weights()
    engine._sync = Mock(send=send)
    if failing == "weights":
        with pytest.raises(KeyError, match="a shard"):
            engine._send_weights([], attempt=1)
        assert not engine.pool.probe.called
    else:
        assert not engine._send_weights([], attempt=1)
        assert engine.pool.probe.called and given == ["a", "b", "c", "d"]
