"""Multi-turn tool use learnt on a laptop CPU:
a cold start on conversations, then RL, with a calculator.

The model cannot multiply; the calculator can (compare/worlds/calculator.py). A careless
demonstrator shows how to call it and how not to. RL makes the calls come and come right; void turns
are left out of the loss.
"""

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
    ScoringConfig,
    ToolsConfig,
    TrainConfig,
)
from megatron_stare.recipes.quickstart import ARMS


def tool_use_quickstart() -> Config:
    """16 prompts x 8 episodes of up to 3 turns, 60 steps of adaptive STARE C2."""
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
