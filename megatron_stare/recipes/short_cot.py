"""Short chain-of-thought on competition mathematics: the STARE paper's main setting
(arXiv 2606.19236), 1024 + 3072 tokens; and a smaller model for one GPU.
"""

from megatron_stare.config import Config
from megatron_stare.recipes.published import LORA, Cluster, colocated, published

CLUSTERS = {
    "short_cot_1_5b": Cluster(trainer_gpus=1, rollout_gpus=0),
    "short_cot_7b": Cluster(trainer_gpus=4, rollout_gpus=0),
    "short_cot_14b": Cluster(trainer_gpus=8, rollout_gpus=0),
    "short_cot_32b": Cluster(trainer_gpus=16, rollout_gpus=0),
    "short_cot_32b_lora": Cluster(trainer_gpus=8, rollout_gpus=0),
    "short_cot_moonlight_16b_a3b": Cluster(trainer_gpus=8, rollout_gpus=0),
}
LARGE = (1.05, 0.95)  # W and M of 14B and 32B


def short_cot_1_5b() -> Config:
    """Qwen2.5-Math-1.5B on one GPU. It is not in the paper: hyperparameters are those of 7B."""
    return published(
        "short_cot_1_5b",
        "Qwen2.5-Math-1.5B",
        prompt=1024,
        response=3072,
        layout={"max_tokens_per_gpu": 5120},
        servers=colocated(1, 1),
    )


def short_cot_7b() -> Config:
    """Qwen2.5-Math-7B; its context is 4096 tokens."""
    return published(
        "short_cot_7b",
        "Qwen2.5-Math-7B",
        prompt=1024,
        response=3072,
        layout={"tensor_model_parallel_size": 2, "max_tokens_per_gpu": 5120},
        servers=colocated(4, 1),
    )


def short_cot_14b() -> Config:
    """Qwen2.5-14B-Instruct. Its prompt limit is not published: that of the 7B model."""
    return published(
        "short_cot_14b",
        "Qwen2.5-14B-Instruct",
        prompt=1024,
        response=3072,
        layout={"tensor_model_parallel_size": 4, "max_tokens_per_gpu": 8192},
        servers=colocated(8, 2),
        weights=LARGE,
    )


def short_cot_32b() -> Config:
    """Qwen2.5-32B, the base model. Its prompt limit is not published: that of the 7B model."""
    return published(
        "short_cot_32b",
        "Qwen2.5-32B",
        prompt=1024,
        response=3072,
        layout={"tensor_model_parallel_size": 8, "max_tokens_per_gpu": 6144},
        servers=colocated(16, 4),
        weights=LARGE,
    )


def short_cot_32b_lora() -> Config:
    """Qwen2.5-32B with adapters of rank 32 on one node of eight."""
    return published(
        "short_cot_32b_lora",
        "Qwen2.5-32B",
        prompt=1024,
        response=3072,
        layout={"tensor_model_parallel_size": 4, "max_tokens_per_gpu": 6144},
        servers=colocated(8, 4),
        weights=LARGE,
        adapters=LORA,
    )


def short_cot_moonlight_16b_a3b() -> Config:
    """Moonlight-16B-A3B-Instruct, latent attention and 64 whole experts divided over 8 ranks. The
    paper has no such model; W and M are those of 14B.
    """
    return published(
        "short_cot_moonlight_16b_a3b",
        "Moonlight-16B-A3B-Instruct",
        prompt=1024,
        response=3072,
        layout={
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "recompute_granularity": "selective",
            "recompute_modules": "moe",
            "max_tokens_per_gpu": 8192,
            "routing_replay": "rollout",
        },
        servers=colocated(8, 1),
        weights=LARGE,
    )
