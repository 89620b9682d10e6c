"""`parity` on a real server: no difference beyond rounding, and a weight that went astray."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from megatron_stare.__main__ import main
from megatron_stare.config import Config, dump
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.huggingface.weights import HFWeights
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.distributed import run_distributed
from tests.rollout.sglang.world import CHECKSUMS, TOLERANCE
from tests.small_run import small_config

pytestmark = pytest.mark.sglang
NAME = "model.layers.1.mlp.down_proj.weight"


def command(directory: Path, server: ServerProcess, checkpoint: Path, *settings: str) -> list[str]:
    served = ("rollout.engine=sglang", f"sglang.urls=[{server.url}]", "sglang.sync_method=tensor")
    model = (f"policy.hf_checkpoint={checkpoint}", "policy.packed_sequences=true")
    dump(small_config(directory, *served, *model, *settings), directory / "config.yaml")
    return ["parity", str(directory / "config.yaml"), "--prompts", "6"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_server_and_the_trainer_agree(
    server: ServerProcess, checkpoint: Path, tmp_path: Path, temperature: float
):
    """SGLang scores its input at temperature 1, at any sampling temperature."""
    settings = (
        f"sglang.verify_weights={str(CHECKSUMS).lower()}",
        f"rollout.rollout_temperature={temperature}",
    )
    assert main(command(tmp_path, server, checkpoint, *settings)) == 0
    found = json.loads((tmp_path / "run/parity.json").read_text())
    pairs = {each["pair"]: each for each in found["pairs"]}
    hot = {"decode - trainer", "prefill - trainer at temperature 1", "trainer - trainer alone"}
    plain = {"decode - trainer", "decode - prefill", "prefill - trainer", "trainer - trainer alone"}
    assert pairs.keys() == (plain if temperature == 1 else hot)
    assert all(each["tokens"] > 20 and each["largest"] < TOLERANCE for each in pairs.values())
    assert found["likeliest_differ"]["prefill"] < 0.05


@pytest.mark.skipif(not CHECKSUMS, reason="this SGLang computes no checksums")
def test_a_wrong_weight_is_named(
    server: ServerProcess,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Sent wrongly once, where no checksum is compared after a sync."""
    sound, sent = HFWeights.__iter__, []

    def once_wrong(weights: HFWeights) -> Iterator[tuple[str, Tensor]]:
        sent.append(None)
        wrong = len(sent) == 1
        for name, tensor in sound(weights):
            yield name, tensor * 3 if wrong and name == NAME else tensor

    monkeypatch.setattr(HFWeights, "__iter__", once_wrong)
    settings = ("sglang.verify_weights=false", "mismatch.alarm=0.001")
    assert main(command(tmp_path, server, checkpoint, *settings)) == 1
    printed = capsys.readouterr().out
    assert "beyond 0.001 nats: weights: " in printed and NAME in printed


@pytest.mark.slow
def test_an_alarms_rollouts_are_read_again_by_the_server(
    server: ServerProcess, checkpoint: Path, tmp_path: Path
):
    """Two ranks train on a server that holds another model, and continue; the server scores its own
    samples alike, so that the difference is between prefill and trainer.
    """
    settings = (
        *("rollout.engine=sglang", f"sglang.urls=[{server.url}]", "sglang.verify_weights=false"),
        *("sglang.sync_method=tensor", f"policy.hf_checkpoint={checkpoint}"),
        *("policy.tensor_model_parallel_size=2", "policy.packed_sequences=true"),
        *("train.num_rollout=1", "rollout.dynamic_sampling=false", "alarms.mismatch=1e-3"),
    )
    config = small_config(tmp_path, *settings)
    assert run_distributed(with_a_wrong_weight, 2, config) == [True, True]
    table = (tmp_path / "run/parity_step_00000001.txt").read_text()
    by_position = table[table.index("mean from position") :]
    rows = [line.split("|") for line in by_position.splitlines() if line.startswith("|")]
    mean = {
        re.sub(r"prefill of \S+", "prefill", name.strip()): [float(value) for value in values]
        for _, name, *values, _ in rows
        if " - " in name
    }
    assert mean.keys() == {"decode - trainer", "decode - prefill", "prefill - trainer"}, table
    assert max(mean["decode - prefill"]) < TOLERANCE
    for pair in ("decode - trainer", "prefill - trainer"):
        assert min(mean[pair]) > 1e-3
    assert "servers did not read" not in table


def with_a_wrong_weight(rank: int, size: int, config: Config) -> bool:
    """A run whose server is sent one."""
    sound = HFWeights.__iter__

    def wrong(weights: HFWeights) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sound(weights):
            yield name, tensor * 3 if name == NAME else tensor

    HFWeights.__iter__ = wrong  # type: ignore[method-assign]
    return Trainer(config, topologies.start(config.policy)).run(Interrupt())
