"""Short chain-of-thought on competition mathematics: the STARE paper's main setting
(arXiv 2606.19236), 1024 + 3072 tokens.
"""

from megatron_stare.config import Config, SGLangConfig
from megatron_stare.recipes.published import Cluster, published

CLUSTERS = {
    "short_cot_7b": Cluster(trainer_gpus=4, rollout_gpus=4),
    "short_cot_14b": Cluster(trainer_gpus=8, rollout_gpus=8),
    "short_cot_32b": Cluster(trainer_gpus=16, rollout_gpus=16),
}
LARGE = (1.05, 0.95)  # W and M of 14B and 32B


def short_cot_7b() -> Config:
    """Qwen2.5-Math-7B; its context is 4096 tokens. Servers use the GPUs after the trainer's."""
    return published(
        "short_cot_7b",
        "Qwen2.5-Math-7B",
        prompt=1024,
        response=3072,
        layout={"tensor_model_parallel_size": 2, "max_tokens_per_gpu": 5120},
        servers=SGLangConfig(num_servers=4, first_gpu=4),
    )


def short_cot_14b() -> Config:
    """Qwen2.5-14B-Instruct. Its prompt limit is not published: that of the 7B model."""
    return published(
        "short_cot_14b",
        "Qwen2.5-14B-Instruct",
        prompt=1024,
        response=3072,
        layout={"tensor_model_parallel_size": 4, "max_tokens_per_gpu": 8192},
        servers=SGLangConfig(num_servers=4, gpus_per_server=2),
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
        servers=SGLangConfig(num_servers=2, gpus_per_server=4),
        weights=LARGE,
    )
