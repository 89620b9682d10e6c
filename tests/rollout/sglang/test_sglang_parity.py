"""`parity` on a real server: no difference beyond rounding, and a weight that went astray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from megatron_stare.__main__ import main
from megatron_stare.config import dump
from megatron_stare.policy.huggingface.weights import HFWeights
from megatron_stare.rollout.sglang.process import ServerProcess
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
    """SGLang tells the log-probs of what it reads at temperature 1, whatever it samples at."""
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
def test_a_weight_that_went_astray_is_named(
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
