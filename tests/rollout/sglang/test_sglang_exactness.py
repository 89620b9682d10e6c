"""The z statistic on a real server: near 0 if it samples from the policy, and far from 0 after one
step if it does not.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.huggingface.weights import HFWeights
from megatron_stare.policy.topology import Topology
from megatron_stare.reporting.logbook import read_metrics
from megatron_stare.rollout.engine import SamplingParams
from megatron_stare.rollout.sglang.client import SGLangClient
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.small_run import small_config

pytestmark = pytest.mark.sglang
EXACT_STEPS = 6
# A faulty server is an alarm and no error; all rollouts are trained, so that none is selected.
SETTINGS = (
    "rollout.engine=sglang",
    "rollout.dynamic_sampling=false",
    "rollout.rollout_batch_size=12",
    "rollout.n_samples_per_prompt=8",
    "rollout.rollout_max_response_len=32",
    "sglang.sync_method=tensor",
    "sglang.verify_weights=false",
    "policy.packed_sequences=true",
)


@pytest.fixture(scope="module")
def sharp(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's checkpoint with wider logits: the temperature changes nothing of even ones."""
    target = tmp_path_factory.mktemp("sharp") / "model"
    shutil.copytree(checkpoint, target)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = 5 * weights["lm_head.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def train(
    directory: Path, server: ServerProcess, checkpoint: Path, topology: Topology, *further: str
) -> list[dict[str, Any]]:
    """The metrics of a run on the server."""
    model = (f"sglang.urls=[{server.url}]", f"policy.hf_checkpoint={checkpoint}")
    config = small_config(directory, *SETTINGS, *model, *further)
    assert Trainer(config, topology).run(Interrupt())
    return read_metrics(directory / "run/metrics.jsonl")


def test_an_exact_server_is_standard_normal(
    server: ServerProcess, sharp: Path, tmp_path: Path, topology: Topology
) -> None:
    """Every step within 5 deviations, their mean within 4 of its own, and no alarm."""
    steps = f"train.num_rollout={EXACT_STEPS}"
    found = [row["exactness_z"] for row in train(tmp_path, server, sharp, topology, steps)]
    assert len(found) == EXACT_STEPS and max(map(abs, found)) < 5
    assert abs(statistics.fmean(found)) < 4 / EXACT_STEPS**0.5
    assert "exactness" not in alarms(tmp_path)


@pytest.mark.parametrize(
    ("changed", "low", "high"),
    [
        ({"temperature": 0.0}, -1e9, -20),
        ({"temperature": 0.8}, -1e9, -6),
        ({"temperature": 1.25}, 6, 1e9),
        ({"top_p": 0.8}, -1e9, -6),
    ],
    ids=["greedy", "cold", "hot", "top_p"],
)
def test_other_sampling_is_found_in_one_step(
    server: ServerProcess,
    sharp: Path,
    tmp_path: Path,
    topology: Topology,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    low: float,
    high: float,
) -> None:
    """The server is asked for another distribution than the run's configuration says."""
    asked = SGLangClient.generate

    async def generate(self: SGLangClient, request: Any, params: SamplingParams, *more: Any) -> Any:
        return await asked(self, request, dataclasses.replace(params, **changed), *more)

    monkeypatch.setattr(SGLangClient, "generate", generate)
    (row,) = train(tmp_path, server, sharp, topology, "train.num_rollout=1")
    assert low < row["exactness_z"] < high
    assert "exactness" in alarms(tmp_path)


def test_stale_weights_are_found_in_the_first_step_that_has_them(
    server: ServerProcess,
    sharp: Path,
    tmp_path: Path,
    topology: Topology,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every sync sends the weights of the run's start, under the version of the new ones."""
    sound, first = HFWeights.__iter__, []

    def stale(weights: HFWeights) -> Iterator[tuple[str, Tensor]]:
        if not first:
            first.extend((name, tensor.clone()) for name, tensor in sound(weights))
        yield from first

    monkeypatch.setattr(HFWeights, "__iter__", stale)
    further = ("train.num_rollout=2", "optimizer.lr=0.03", "optimizer.lr_warmup_iters=0")
    before, after = train(tmp_path, server, sharp, topology, *further)
    assert abs(before["exactness_z"]) < 5 and abs(after["exactness_z"]) > 6


def alarms(directory: Path) -> str:
    """The messages of the run's alarms."""
    file = directory / "run/alarms.jsonl"
    return file.read_text() if file.exists() else ""
