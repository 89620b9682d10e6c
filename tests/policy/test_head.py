"""The three ways to run the head train the same model: fused, recompute and logits, tied and untied
embeddings; the tempered policy that they score is the float64 twin's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_stare.config import Config
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.head import HeadContext, loss_head
from megatron_stare.policy.topology import Topology
from tests import reference
from tests.distributed import run_distributed
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


POSITIONS, WIDTH, PADDED, REAL = 12, 16, 56, 53
TEMPERATURE, TEMPERINGS = 0.9, (1.2, 0.8, 1.0)


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [S, 2, H], the padded vocabulary, and of every other row its target."""
    dice = torch.Generator().manual_seed(2)
    hidden_SBH = torch.randn(POSITIONS, 2, WIDTH, generator=dice, dtype=torch.float64)
    weight_VH = torch.randn(PADDED, WIDTH, generator=dice, dtype=torch.float64)
    row_N = torch.arange(0, 2 * POSITIONS, 2)
    return hidden_SBH, weight_VH, row_N, torch.randint(REAL, row_N.shape, generator=dice)


def tempered_scores(rank: int, world_size: int) -> dict[tuple[str, bool, float], torch.Tensor]:
    """By way of the head, with sequence parallelism or not, and T; tiles of few rows."""
    hidden_SBH, weight_VH, row_N, target_N = example()
    shard = SimpleNamespace(weight=weight_VH.chunk(world_size)[rank])
    found = {}
    for way in ("fused", "recompute", "logits"):
        for parallel in (False, True):
            own = hidden_SBH.chunk(world_size)[rank] if parallel else hidden_SBH
            for tempering in TEMPERINGS:
                context = HeadContext(
                    *(row_N, target_N, TEMPERATURE, REAL, dist.group.WORLD, way, 2_000),
                    tempering=tempering,
                    sequence_parallel=parallel,
                )
                with torch.no_grad():
                    output = loss_head(
                        hidden_states=own, output_layer=shard, output_weight=None, context=context
                    )
                assert output.tempered_N is not None
                found[way, parallel, tempering] = output.tempered_N
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_tempered_policy_is_the_twins(world_size: int) -> None:
    hidden_SBH, weight_VH, row_N, target_N = example()
    rows = hidden_SBH.flatten(0, 1)[row_N], weight_VH[:REAL], target_N
    plain = reference.token_statistics(*rows, TEMPERATURE)["surprisal"]
    for found in run_distributed(tempered_scores, world_size):
        for (way, parallel, tempering), ours in found.items():
            tempered = reference.token_statistics(*rows, TEMPERATURE * tempering)["surprisal"]
            torch.testing.assert_close(
                ours, plain - tempered, rtol=1e-10, atol=1e-12, msg=f"{way} {parallel} {tempering}"
            )
            assert bool((ours.abs() > 0.01).any()) == (tempering != 1.0)
