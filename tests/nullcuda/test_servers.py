"""Weights on their way to a server that has the device's memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_stare.commands.doctor import servers
from megatron_stare.config import Config, override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from tests.rollout.sglang.fake_server import fake_servers
from tests.rollout.sglang.test_process import program
from tests.small_run import small_config

pytestmark = pytest.mark.nullcuda
SERVED = ("rollout.engine=sglang", "sglang.sync_method=broadcast", "sglang.verify_weights=false")
_asked = itertools.count()


def by_turns(response: str, label: str, metadata: dict[str, Any]) -> float:
    """The server gives everyone the same answer, and a group of equals has nothing to learn."""
    return float(next(_asked) % 2)


def test_every_steps_weights_arrive_over_nccl(tmp_path: Path, topology: Topology) -> None:
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
    assert arrived.keys() == last.keys() and not any(torch.equal(first[n], last[n]) for n in last)
    for name, tensor in last.items():
        assert torch.equal(arrived[name], tensor), name


def test_a_servers_nccl_is_compared_with_ours(tmp_path: Path) -> None:
    python = f"sglang.python={program(tmp_path, '2 0 1')}"
    *_, found = servers(override(Config(), [*SERVED, python]))
    assert found.what == "servers' NCCL" and found.level == "WARN" and "2.0.1" in found.found
