"""Every published config.json that builds is also planned, as a directory that a user names."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config import override
from megatron_stare.planning.memory import model_bytes
from megatron_stare.planning.plan import make_plan
from megatron_stare.planning.tables import plan_text
from megatron_stare.policy import build
from megatron_stare.policy.huggingface.families import sparse_layers
from megatron_stare.recipes import Cluster, find_recipe
from tests.policy.huggingface.test_families import PUBLISHED

# For 64 GPUs without tensor and pipeline parallelism.
TOO_LARGE = {"Mistral-Nemo-2407", "Mistral-Small-24B-2501", "Seed-OSS-36B", "phi-4 (as a Llama)"}
TOO_LARGE |= {"GLM-4.5-Air", "GLM-4.5", "DeepSeek-V3", "Kimi-K2 (as a DeepSeek-V3)", "Qwen3.5-27B"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_is_planned(name: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = PUBLISHED[name]["config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    hf = build.read_hf_config(str(tmp_path))
    experts = 32 if any(sparse_layers(hf)) else 1
    options = [f"policy.hf_checkpoint={tmp_path}", "sglang.gpus_per_server=8"]
    options += [f"policy.expert_model_parallel_size={experts}"]
    options += ["policy.tensor_model_parallel_size=1", "policy.expert_tensor_parallel_size=1"]
    options += ["policy.sequence_parallel=false", "policy.recompute_granularity=full"]
    plan = make_plan(override(find_recipe("short_cot_7b"), options), Cluster(64, 0))
    (rank,) = plan.ranks
    whole = rank.counts.dense_parameters + experts * rank.counts.expert_parameters
    assert whole / 1e9 == pytest.approx(PUBLISHED[name]["billions"], rel=0.01)
    assert model_bytes(plan.shape) / 2e9 == pytest.approx(PUBLISHED[name]["billions"], rel=0.01)
    assert ("does not fit: " in plan_text(name, plan)) == bool(plan.faults) == (name in TOO_LARGE)
    assert plan.faults or (plan.seconds < math.inf and 0 < plan.mfu < 0.6)
