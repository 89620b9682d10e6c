"""Operations and bytes of a step against a counter over the real model, and against themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from megatron_stare.config import Config, PolicyConfig, override
from megatron_stare.planning.machine import H100
from megatron_stare.planning.shapes import Sizes, sizes, stage_counts
from megatron_stare.planning.work import Tokens, Training, group_bytes, training
from megatron_stare.policy.huggingface.shape import forward_operations, shape_of
from tests.tiny_models import tiny_config


def work(family: str, world: int, tokens: Tokens, *overrides: str) -> tuple[Training, Sizes]:
    hf, config = tiny_config(family), override(Config(), overrides)
    group = sizes(config.policy, world)
    counts = tuple(stage_counts(hf, config.policy, world))
    return training(config, shape_of(hf), counts, group, tokens, H100), group


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_planned_operations_equal_counted_operations(family: str) -> None:
    """One forward pass of sequences of equal length, head on every token; the counter sees whole
    attention squares, of which the formula takes the causal half, and the product that makes the
    rotary angles.
    """
    rows, length = 3, 64
    hf = tiny_config(family)
    hf._attn_implementation, hf._experts_implementation = "eager", "eager"
    model = AutoModelForCausalLM.from_config(hf)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(0, 71, (rows, length)))
    shape = shape_of(hf)
    square = 4 * rows * length * length * shape.query * shape.layers
    matrices = 2 * rows * length * (shape.active_matrices + shape.head)
    assert counter.get_total_flops() == matrices + square + length * shape.head_width
    lengths = [(length // 2, length // 2)] * rows
    one_head = rows * length * shape.head  # of half of the tokens
    assert sum(forward_operations(shape, lengths)) == matrices - one_head + square / 2
    tokens = Tokens(sequences=rows, prompt=0.0, response=float(length))
    found, _ = work(family, 1, tokens)
    causal = square / 2 * (tokens.seen / (length / 2))
    assert found.model_operations == pytest.approx(4 * (matrices + causal))


def test_bytes_over_groups() -> None:
    """By hand, for two ranks of each kind: 24 layer passes of 2 all-reduces, and the like."""
    tokens, hidden = Tokens(sequences=4, prompt=10.0, response=90.0), 32
    config = PolicyConfig()
    tensor, _ = work("qwen2", 2, tokens, "policy.tensor_model_parallel_size=2")
    # forward, backward, score; per layer two all-reduces of 2 (t - 1) / t times 400 tokens in fp32
    assert tensor.group_bytes == {"tensor": 3 * 2 * 2 * (2 * 1 / 2) * 400 * hidden * 4}
    data, _ = work("qwen2", 2, tokens)
    (dense,) = stage_counts(tiny_config("qwen2"), config, 1)
    assert data.group_bytes == {"data": 8 * dense.parameters / 2}
    context, _ = work("qwen2", 2, tokens, "policy.context_parallel_size=2")
    assert context.group_bytes["context"] == 4 * 2 * 2 * 16 * 200 * 4
    pipeline, group = work("qwen2", 2, tokens, "policy.pipeline_model_parallel_size=2")
    assert pipeline.group_bytes == {"pipeline": 3 * 400 * hidden * 4}
    assert group.data == 1 and pipeline.bubble_seconds == pytest.approx(pipeline.compute_seconds)


def test_context_bytes_are_those_of_the_stage_that_sends_most() -> None:
    """By hand, for a stage of four layers with attention and one of two gated delta nets."""
    hf, tokens = tiny_config("qwen3_5_text"), Tokens(sequences=4, prompt=10.0, response=90.0)
    words = ["policy.context_parallel_size=2", "policy.pipeline_model_parallel_size=2"]
    config, shape = override(Config(), words), shape_of(hf)
    stages = [
        dataclasses.replace(one, dense_layers=layers, delta_layers=deltas)
        for one, (layers, deltas) in zip(
            stage_counts(hf, config.policy, 4), ((4, 0), (2, 2)), strict=True
        )
    ]
    sent = group_bytes(config, shape, tuple(stages), sizes(config.policy, 4), tokens)
    of_token = max(4 * 2 * shape.key, 2 * (shape.delta.channels + 2 * shape.delta.values) / 2)
    assert sent["context"] == 4 * 200 * of_token * 4


def test_recomputation_costs_a_pass_that_the_model_does_not_need() -> None:
    tokens = Tokens(sequences=4, prompt=10.0, response=90.0)
    plain, _ = work("qwen2", 1, tokens)
    again, _ = work("qwen2", 1, tokens, "policy.recompute_granularity=full")
    assert again.model_operations == plain.model_operations < again.operations
    assert again.seconds > plain.seconds
