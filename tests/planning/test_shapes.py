"""Parameters of every rank, counted from the real model in a world that is not there."""

from __future__ import annotations

import pytest
import torch

from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.planning.shapes import MODELS, model_shape, sizes, stage_counts
from megatron_stare.policy import build
from megatron_stare.policy.huggingface.families import sparse_layers
from megatron_stare.policy.topology import imagined
from tests.tiny_models import tiny_config

# What the published checkpoints hold, by their own indexes (GLM, Moonlight: transformers' count).
PUBLISHED = {
    "Qwen2.5-Math-1.5B": 1_543_714_304 + 151_936 * 1536,  # tied: two stages hold the matrix
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen3-1.7B": 1_720_574_976 + 151_936 * 2048,  # tied too
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "GLM-4.7-Flash": 29_943_390_976,
    "Moonlight-16B-A3B-Instruct": 15_960_108_544,
}


@pytest.mark.parametrize("model", MODELS)
def test_the_ranks_together_hold_the_published_parameters(model: str) -> None:
    """Over expert ranks and stages; norms and routers stand on each, matrices once."""
    hf = model_shape(model)
    experts = 16 if any(sparse_layers(hf)) else 1
    odd = hf.num_hidden_layers % 2
    policy = PolicyConfig(
        pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=(hf.num_hidden_layers // 2 + 1) * odd,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=1,
    )
    counts = stage_counts(hf, policy, 2 * experts)
    assert [one.stage for one in counts] == [0, 1] and counts[0].is_first and counts[1].is_last
    whole = sum(one.dense_parameters + experts * one.expert_parameters for one in counts)
    assert whole == PUBLISHED[model]


def test_ranks_of_a_stage_are_alike() -> None:
    """Every one of eight ranks, built one by one, holds what its stage's entry says."""
    hf = tiny_config("qwen3_moe")
    policy = PolicyConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        sequence_parallel=True,
    )
    counts = stage_counts(hf, policy, 8)
    for rank in range(8):
        with imagined(policy, rank, 8) as topology:
            chunks = build.build_model(hf, policy, topology, torch.device("meta"))
            held = sum(one.numel() for chunk in chunks for one in chunk.parameters())
            assert held == counts[topology.pipeline_rank].parameters
            assert topology.data_size == sizes(policy, 8).data


def test_a_world_of_512_ranks() -> None:
    """benchmarks/planner.py prints how long it takes."""
    policy = PolicyConfig(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        context_parallel_size=2,
        sequence_parallel=True,
        dtype="bf16",
    )
    counts = stage_counts(model_shape("Qwen2.5-32B"), policy, 512)
    assert [one.in_flight for one in counts] == [4, 3, 2, 1]


def test_a_world_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="does not divide the 12 process"):
        stage_counts(model_shape("Qwen3-8B"), PolicyConfig(tensor_model_parallel_size=8), 12)
    with pytest.raises(UserError, match=r"has no config\.json and is the name of no model"):
        model_shape("models/Qwen9-7B")
