"""A trainer returns the memory that its allocator keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_stare.loop import evaluation, progress
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from tests.small_run import small_config


def test_memory_goes_back_every_few_steps_and_before_an_evaluation(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[int]()
    monkeypatch.setattr(progress, "RETURN_INTERVAL", 2)
    for module in (progress, evaluation):
        monkeypatch.setattr(module, "return_memory", lambda: steps.append(run.step))
    config = small_config(
        tmp_path,
        "train.num_rollout=5",
        f"evaluation.eval_data.held_out={tmp_path / 'problems.jsonl'}",
        "evaluation.n_samples_per_eval_prompt=1",
        "evaluation.eval_interval=3",
    )
    run = Trainer(config, topology)
    assert run.run(Interrupt())
    assert steps == [2, 3, 4, 5]  # the last step is evaluated
