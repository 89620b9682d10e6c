"""The three ways to run the head train the same model:
fused, recompute and logits, tied and untied embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stare.config import Config
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from tests.small_run import small_config
from tests.tiny_models import byte_tokenizer, tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    yield topologies.start(Config().policy)
    topologies.stop()


def train(
    directory: Path, topology: Topology, *overrides: str
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    trainer = Trainer(small_config(directory, *overrides), topology)
    trainer.engine.load_weights(trainer.actor.weights(), 0)
    metrics = [trainer.train_step() for _ in range(3)]
    return metrics, {name: tensor.clone() for name, tensor in trainer.actor.weights()}


@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.slow), "qwen3_tied"])
def test_every_head_gives_the_same_metrics_and_weights(
    family: str, tmp_path: Path, topology: Topology
) -> None:
    small_config(tmp_path)
    config = tiny_config(family, vocab_size=257, eos_token_id=0, max_position_embeddings=64)
    write_checkpoint(tmp_path / family, config, seed=3)
    byte_tokenizer().save_pretrained(tmp_path / family)
    options = (f"policy.hf_checkpoint={tmp_path / family}", "policy.head_workspace_mib=1")
    runs = {
        head: train(
            tmp_path,
            topology,
            *options,
            f"policy.head={head}",
            f"run.dir={tmp_path}/{family}_{head}",
        )
        for head in ("logits", "recompute", "fused")
    }
    reference_metrics, reference_weights = runs["logits"]
    assert all(row["grad_norm"] > 0 for row in reference_metrics)
    for head in ("recompute", "fused"):
        metrics, weights = runs[head]
        for ours, theirs in zip(metrics, reference_metrics, strict=True):
            for key in ("loss", "grad_norm", "entropy", "reward", "entropy_drift"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7), (head, key)
        for name, tensor in weights.items():
            torch.testing.assert_close(
                tensor, reference_weights[name], rtol=1e-4, atol=2e-6, msg=f"{head} {name}"
            )
