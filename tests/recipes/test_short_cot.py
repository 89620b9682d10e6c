"""The short-CoT recipe on a tiny model: its over-sampling, its dtype, its optimizer, its loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_stare.config import override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from megatron_stare.recipes import find_recipe
from megatron_stare.records import TokenBatch
from tests.small_run import rows_of, small_config

SMALLER = (
    "rollout.engine=embedded",
    "policy.tensor_model_parallel_size=1",
    "policy.sequence_parallel=false",
    "data.rollout_max_prompt_len=16",
    "rollout.rollout_batch_size=4",
    "rollout.over_sampling_batch_size=12",
    "rollout.rollout_max_response_len=12",
    "scoring.reward=tests.rewards.even_characters",
    "optimizer.lr=1e-3",
    "train.num_rollout=4",
    "evaluation.eval_interval=0",
)


@pytest.mark.parametrize("staleness", [-1, 1])
def test_no_stale_token_starts_at_ratio_1(
    staleness: int, tmp_path: Path, topology: Topology
) -> None:
    small = small_config(tmp_path)
    places = (
        f"policy.hf_checkpoint={small.policy.hf_checkpoint}",
        f"data.prompt_data={small.data.prompt_data}",
        f"run.dir={small.run.dir}",
        f"rollout.max_staleness={staleness}",
    )
    config = override(find_recipe("short_cot_7b"), [*SMALLER, *places])
    trainer = Trainer(config, topology)
    stale, wrong = 0, 0
    update = trainer.actor.update

    def watched(batch: TokenBatch, *rest: Any) -> Any:
        nonlocal stale, wrong
        old = ~batch.fresh_T
        stale += int(old.sum())
        if old.any():
            assert batch.old_surprisal_T is not None
            wrong += int((batch.old_surprisal_T[old] != -batch.rollout_logprob_T[old]).sum())
            assert torch.isfinite(batch.old_surprisal_T).all()
        return update(batch, *rest)

    trainer.actor.update = watched  # type: ignore[method-assign]
    assert trainer.run(Interrupt())
    fractions = [row["stale_token_fraction"] for row in rows_of(config)]
    assert wrong == 0
    assert (stale == 0 and fractions == [0.0] * 4) if staleness < 0 else (stale > 0)
