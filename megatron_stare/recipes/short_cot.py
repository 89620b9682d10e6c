"""Short chain-of-thought on competition mathematics:
the STARE paper's main setting (arXiv 2606.19236).
"""

from megatron_stare.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    ScoringConfig,
    TrainConfig,
)


def short_cot_7b() -> Config:
    """Qwen2.5-Math-7B: 64 prompts x 8, lr 1e-6, clip 0.2/0.28, dual clip 10, no KL,
    1024 + 3072 tokens, STARE O1.

    Give policy.hf_checkpoint and data.prompt_data; evaluation files by
    evaluation.eval_data.<name>=<file>. The paper trains in fp16; here bf16 with fp32 gradients and
    optimizer states.
    """
    return Config(
        run=RunConfig(dir="runs/short_cot_7b"),
        data=DataConfig(rollout_max_prompt_len=1024),
        policy=PolicyConfig(
            tensor_model_parallel_size=4, use_distributed_optimizer=True, dtype="bf16"
        ),
        optimizer=OptimizerConfig(lr=1e-6, clip_grad=1.0),
        rollout=RolloutConfig(
            rollout_batch_size=64,
            n_samples_per_prompt=8,
            over_sampling_batch_size=192,
            rollout_max_response_len=3072,
            dynamic_sampling=True,
            max_generation_rounds=10,
        ),
        scoring=ScoringConfig(reward="math"),
        loss=LossConfig(
            name="stare", variant="O1", eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=10.0
        ),
        train=TrainConfig(num_rollout=1000),
        evaluation=EvaluationConfig(eval_interval=50, n_samples_per_eval_prompt=32, eval_top_p=0.7),
    )
