"""Multi-turn tool use: a supervised cold start, then RL with Python in the sandbox
(arXiv 2606.19236; the rules of a turn are ReTool's, 2504.11536).

Known of the paper's run: Qwen2.5-7B after a cold start on ReTool's 2,000 conversations, 8k tokens
[from notes, not from its code]; rollout.rollout_max_response_len=8192 is that. These recipes give
an episode 32k, tool output included. Not known, and chosen here: everything of the cold start but
its data, turns, reward shaping (none), the sandbox. The paper's table has no 32B model.
"""

import dataclasses
from typing import Any

from megatron_stare.config import (
    ColdStartConfig,
    CompareConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    ScoringConfig,
    ToolsConfig,
    TrainConfig,
)
from megatron_stare.recipes.published import BASELINE, LARGE, published, recipe
from megatron_stare.recipes.quickstart import ARMS


def tool_use_quickstart() -> Config:
    """16 prompts x 8 episodes of up to 3 turns, 60 steps of adaptive STARE C2, on a laptop CPU.

    The model cannot multiply; the calculator can (compare/worlds/calculator.py). A careless
    demonstrator of the cold start shows how to call it and how not to. RL makes the calls come and
    come right; void turns are left out of the loss.
    """
    return Config(
        run=RunConfig(dir="runs/tool_use_quickstart", save_interval=50),
        data=DataConfig(rollout_max_prompt_len=16),
        policy=PolicyConfig(max_tokens_per_gpu=16384, packed_sequences=False),
        optimizer=OptimizerConfig(lr=1e-3, lr_warmup_iters=5, weight_decay=0.01, adam_beta2=0.999),
        rollout=RolloutConfig(
            rollout_batch_size=16,
            n_samples_per_prompt=8,
            rollout_max_response_len=230,
            max_generation_rounds=4,
            accept_partial_batch=True,
            max_staleness=0,
        ),
        tools=ToolsConfig(
            environment="calculator", max_turns=3, max_calls=3, filter_void_turns=True
        ),
        scoring=ScoringConfig(reward="math"),
        loss=LossConfig(target_entropy=0.1),
        train=TrainConfig(num_rollout=60),
        evaluation=EvaluationConfig(eval_interval=30, n_samples_per_eval_prompt=4),
        cold_start=ColdStartConfig(steps=1500, batch_size=64, lr=5e-3),
        compare=CompareConfig(world="calculator", arms=ARMS, run=["stare"]),
    )


@recipe(gpus=8, gpus_per_server=4)
def tool_use_7b() -> Config:
    """Qwen2.5-7B, the base model."""
    return _with_tools(
        "Qwen2.5-7B",
        tensor_model_parallel_size=4,
        context_parallel_size=2,
        max_tokens_per_gpu=16896,
    )


@recipe(gpus=32, gpus_per_server=8)
def tool_use_32b() -> Config:
    """Qwen2.5-32B, the base model."""
    return _with_tools(
        "Qwen2.5-32B",
        weights=LARGE,
        tensor_model_parallel_size=8,
        context_parallel_size=4,
        max_tokens_per_gpu=8704,
    )


def _with_tools(model: str, **rest: Any) -> Config:
    """The published run with episodes of 32k tokens, tools, and a cold start, which
    cold_start.data switches on.
    """
    return dataclasses.replace(
        published(model, prompt=2048, response=30720, **rest),
        tools=ToolsConfig(environment="python", format="hermes", max_turns=8),
        sandbox=SandboxConfig(max_concurrency=64, warm_workers=16),
        cold_start=ColdStartConfig(steps=48, batch_size=128, lr=1e-5, weight_decay=0.01),
        compare=CompareConfig(
            arms={"stare": [], BASELINE: [f"loss.name={BASELINE}"]}, run=["stare"]
        ),
    )
