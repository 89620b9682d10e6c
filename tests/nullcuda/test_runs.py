"""Runs of one rank on the device with our own layers, in each way of training: metrics, selected
tokens and weights equal those of a plain rank on the CPU.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stare.config import load
from megatron_stare.loop import cold_start
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from tests.loop.test_cold_start import prepared
from tests.loop.test_trainer_layouts import PACKED
from tests.nullcuda.apart import on_device
from tests.nullcuda.runs import (
    ADAPTERS,
    STEPS,
    assert_same_metrics,
    assert_trained_alike,
    reference_of,
    slack_of,
    trained,
    updated_in_bf16,
)
from tests.small_run import rows_of, small_config

pytestmark = pytest.mark.nullcuda

CASES = {
    "logits head, recompute selective": ("recompute selective", "policy.head=logits"),
    "recompute head and full, packed, offloaded": (
        "recompute full",
        "policy.head=recompute",
        "policy.offload_while_generating=true",
    ),
    "packed experts": ("recompute full experts",),
    "packed latent": ("recompute full latent",),
    "padded latent": ("latent",),
    "packed delta nets": ("packed delta nets",),
    "recompute selective, adapters": ("recompute selective", ADAPTERS),
}


def every_run(directory: str) -> dict[str, Any]:
    return {
        **trained(directory, CASES),
        "in bf16": updated_in_bf16(directory),
        "interrupted": interrupted(directory),
        "after a cold start": after_a_cold_start(Path(directory) / "shown"),
    }


def interrupted(directory: str) -> list[dict[str, Any]]:
    """Metrics of a run that is saved in the background at each step, ended after the first and
    resumed.
    """
    options = (f"policy.hf_checkpoint={directory}/untied", PACKED)
    saving = ("run.save_interval=1", "run.async_save=true")
    for steps in (STEPS - 1, STEPS):
        config = small_config(Path(directory), *options, *saving, f"train.num_rollout={steps}")
        with topologies.session(config.policy) as topology:
            assert Trainer(config, topology).run(Interrupt())
        gc.collect()
    return rows_of(config)


def after_a_cold_start(directory: Path) -> tuple[int, int]:
    """Bytes that torch's allocator holds: then, and when all that can be is given back."""
    directory.mkdir()
    config = load(prepared(directory))
    with topologies.session(config.policy) as topology:
        assert cold_start.started(config, topology, Interrupt())
        held = torch.cuda.memory_reserved()
        topologies.release_workspaces()
        return held, torch.cuda.memory_reserved()


@pytest.fixture(scope="module")
def found(models: str) -> dict[str, Any]:
    return on_device(every_run, models)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_trains_as_on_the_cpu(
    name: str, found: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert_trained_alike([found[name]], expected[reference_of(name)], slack_of(name))


def test_updates_in_bf16_are_those_of_the_cpu(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    for ours, theirs in zip(found["in bf16"], expected["in bf16"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2, abs=1e-3)


def test_a_run_with_background_saves_resumes(
    found: dict[str, Any], expected: dict[str, Any]
) -> None:
    rows = found["interrupted"]
    assert [row["step"] for row in rows] == [1, 2]
    assert_same_metrics(rows, expected["dense"]["metrics"])


def test_a_cold_start_leaves_the_gpu_to_the_servers_that_start_after_it(
    found: dict[str, Any],
) -> None:
    held, least = found["after a cold start"]
    assert held == least
