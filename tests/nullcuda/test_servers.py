"""Weight transfers to a server with the device's memory."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.config import Config, SGLangConfig, override
from megatron_stare.debug.doctor import servers
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.sync.served_engine import make_sync
from megatron_stare.sync.weight_sync import in_buckets
from tests.docs.metric_keys import unexplained
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.idle import tiny_model
from tests.rollout.sglang.test_process import program
from tests.small_run import small_config

pytestmark = pytest.mark.nullcuda
SERVED = ("rollout.engine=sglang", "sglang.sync_method=broadcast", "sglang.verify_weights=false")
_asked = itertools.count()


def by_turns(response: str, label: str, metadata: dict[str, Any]) -> float:
    """The server gives every request one answer, and a group of equal answers has no signal."""
    return float(next(_asked) % 2)


def test_the_weights_of_every_step_arrive_over_nccl(tmp_path: Path, topology: Topology) -> None:
    kept = tmp_path / "kept.safetensors"
    with fake_servers(1, module="tests.nullcuda.receiving_server", kept=str(kept)) as urls:
        config = small_config(
            tmp_path,
            *SERVED,
            f"sglang.urls=[{urls[0]}]",
            f"scoring.reward={__name__}.by_turns",
            "train.num_rollout=2",
        )
        trainer = Trainer(config, topology)
        first = {name: tensor.cpu().clone() for name, tensor in trainer.actor.weights()}
        assert trainer.run(Interrupt())
        last = {name: tensor.cpu() for name, tensor in trainer.actor.weights()}
    arrived = load_file(kept)
    parts = {f"sync_seconds_{part}" for part in ("gather", "send", "hash", "load")}
    for row in read_metrics(Path(config.run.dir) / "metrics.jsonl"):
        assert {key for key in row if key.startswith("sync_seconds")} == parts
        busy = row["seconds_score"] + row["seconds_update"]
        assert row["gpu_memory_peak"] > 0 and 0 < row["mfu"] * busy * 989e12 < 1e12
        assert row["tokens_per_second"] > 0 and not unexplained(row)
    assert arrived.keys() == last.keys() and not any(torch.equal(first[n], last[n]) for n in last)
    for name, tensor in last.items():
        assert torch.equal(arrived[name], tensor), name


def test_buckets_arrive_while_the_next_are_made(tmp_path: Path) -> None:
    """NCCL runs in another thread than the one that fills the device's memory meanwhile."""
    kept = tmp_path / "kept.safetensors"
    sizes = [1 << 18, 1 << 18, 5, (1 << 18) - 5, 1 << 19, 3]
    weights = {f"w{n}": torch.full((size,), float(n)) for n, size in enumerate(sizes)}
    with fake_servers(1, module="tests.nullcuda.receiving_server", kept=str(kept)) as urls:
        settings = SGLangConfig(urls=list(urls), sync_bucket_mib=1, verify_weights=False)
        model = tiny_model(tmp_path / "model")
        with contextlib.closing(SGLangPool(settings, model, tmp_path / "logs")) as pool:
            pool.start().result()
            pool.expect(1)
            sync = make_sync(pool, settings, "", tmp_path / "weights")
            on_device = ((name, value.cuda()) for name, value in weights.items())
            sync.send(in_buckets(on_device, 1 << 20), pool.servers)
            assert sync.transport.group is not None  # type: ignore[attr-defined]
    arrived = load_file(kept)
    assert arrived.keys() == weights.keys()
    assert all(torch.equal(arrived[name], value) for name, value in weights.items())


def test_the_nccl_of_a_server_is_compared_with_the_trainers(tmp_path: Path) -> None:
    python = f"sglang.python={program(tmp_path, '2 0 1')}"
    *_, found = servers(override(Config(), [*SERVED, python]))
    assert found.what == "servers' NCCL" and found.level == "WARN" and "2.0.1" in found.found
