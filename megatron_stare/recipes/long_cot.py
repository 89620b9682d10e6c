"""Long chain-of-thought: the STARE paper's reasoning models at 16k tokens (arXiv 2606.19236), a 32B
one at 32k, and one with experts.

The paper trains R1-Distill-Qwen-1.5B and Qwen3-8B with responses of 16k tokens; its batch and
learning rate there are not known to differ from the short setting. The 32B model at 32k and the one
with experts are no rows of its table: hyperparameters are those of its 32B row.
"""

import dataclasses

from megatron_stare.config import Config
from megatron_stare.recipes.published import LORA, Cluster, colocated, published
from megatron_stare.recipes.short_cot import LARGE

CLUSTERS = {
    "long_cot_1_5b": Cluster(trainer_gpus=4, rollout_gpus=0),
    "long_cot_8b": Cluster(trainer_gpus=8, rollout_gpus=0),
    "long_cot_32b": Cluster(trainer_gpus=32, rollout_gpus=0),
    "long_cot_32b_lora": Cluster(trainer_gpus=8, rollout_gpus=0),
    "long_cot_30b_a3b": Cluster(trainer_gpus=16, rollout_gpus=0),
    "long_cot_30b_a3b_lora": Cluster(trainer_gpus=8, rollout_gpus=0),
    "long_cot_glm_4_7_flash": Cluster(trainer_gpus=16, rollout_gpus=0),
}


def long_cot_1_5b() -> Config:
    """DeepSeek-R1-Distill-Qwen-1.5B, one GPU a replica."""
    return published(
        "long_cot_1_5b",
        "DeepSeek-R1-Distill-Qwen-1.5B",
        prompt=1024,
        response=16384,
        layout={
            "recompute_granularity": "selective",
            "recompute_modules": "mlp",
            "max_tokens_per_gpu": 34816,
        },
        servers=colocated(4, 1),
    )


def long_cot_8b() -> Config:
    """Qwen3-8B."""
    return published(
        "long_cot_8b",
        "Qwen3-8B",
        prompt=1024,
        response=16384,
        layout={
            "tensor_model_parallel_size": 4,
            "context_parallel_size": 2,
            "max_tokens_per_gpu": 9216,
        },
        servers=colocated(8, 4),
    )


def long_cot_32b() -> Config:
    """Qwen3-32B with responses of 32k tokens."""
    return published(
        "long_cot_32b",
        "Qwen3-32B",
        prompt=1024,
        response=32768,
        layout={
            "tensor_model_parallel_size": 8,
            "context_parallel_size": 4,
            "max_tokens_per_gpu": 8704,
        },
        servers=colocated(32, 8),
        weights=LARGE,
    )


def long_cot_32b_lora() -> Config:
    """Qwen3-32B with adapters of rank 32 and responses of 32k tokens on one node of eight."""
    return published(
        "long_cot_32b_lora",
        "Qwen3-32B",
        prompt=1024,
        response=32768,
        layout={
            "tensor_model_parallel_size": 8,
            "recompute_granularity": "selective",
            "recompute_modules": "mlp",
            "max_tokens_per_gpu": 34816,
        },
        servers=colocated(8, 8),
        weights=LARGE,
        adapters=LORA,
    )


def long_cot_30b_a3b() -> Config:
    """Qwen3-30B-A3B: 128 whole experts divided over 8 ranks; 16k tokens. The paper has no model
    with experts.
    """
    return published(
        "long_cot_30b_a3b",
        "Qwen3-30B-A3B",
        prompt=1024,
        response=16384,
        layout={
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "recompute_granularity": "full",
            "max_tokens_per_gpu": 17408,
            "routing_replay": "rollout",
        },
        servers=colocated(16, 4),
        weights=LARGE,
    )


def long_cot_30b_a3b_lora() -> Config:
    """Qwen3-30B-A3B with adapters of rank 32 in its attention, on one node of eight; the experts
    and their router stay as they are.
    """
    return published(
        "long_cot_30b_a3b_lora",
        "Qwen3-30B-A3B",
        prompt=1024,
        response=16384,
        layout={
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "recompute_granularity": "selective",
            "recompute_modules": "moe",
            "max_tokens_per_gpu": 17408,
            "routing_replay": "rollout",
        },
        servers=colocated(8, 4),
        weights=LARGE,
        adapters=dataclasses.replace(LORA, targets="q,k,v,o"),
    )


def long_cot_glm_4_7_flash() -> Config:
    """GLM-4.7-Flash, 30B-A3B with latent attention: 64 whole experts divided over 8 ranks; 32k
    tokens. The paper has no such model.
    """
    return published(
        "long_cot_glm_4_7_flash",
        "GLM-4.7-Flash",
        prompt=1024,
        response=32768,
        layout={
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "recompute_granularity": "full",
            "max_tokens_per_gpu": 17408,
            "routing_replay": "rollout",
        },
        servers=colocated(16, 2),
        weights=LARGE,
    )
