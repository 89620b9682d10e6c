"""Short chain-of-thought on competition mathematics: the STARE paper's main setting
(arXiv 2606.19236), 1024 + 3072 tokens; and a smaller model for one GPU.
"""

from megatron_stare.config import Config
from megatron_stare.recipes.published import EXPERTS, LARGE, LORA, published, recipe

RESPONSE = 3072  # tokens


@recipe(gpus=1, gpus_per_server=1)
def short_cot_1_5b() -> Config:
    """Qwen2.5-Math-1.5B on one GPU. It is not in the paper: hyperparameters are those of 7B."""
    return published("Qwen2.5-Math-1.5B", response=RESPONSE, max_tokens_per_gpu=5120)


@recipe(gpus=4, gpus_per_server=1)
def short_cot_7b() -> Config:
    """Qwen2.5-Math-7B; its context is 4096 tokens."""
    return published(
        "Qwen2.5-Math-7B",
        response=RESPONSE,
        tensor_model_parallel_size=2,
        max_tokens_per_gpu=5120,
    )


@recipe(gpus=8, gpus_per_server=2)
def short_cot_14b() -> Config:
    """Qwen2.5-14B-Instruct. Its prompt limit is not published: that of the 7B model."""
    return published(
        "Qwen2.5-14B-Instruct",
        response=RESPONSE,
        weights=LARGE,
        tensor_model_parallel_size=4,
        max_tokens_per_gpu=8192,
    )


@recipe(gpus=16, gpus_per_server=4)
def short_cot_32b() -> Config:
    """Qwen2.5-32B, the base model. Its prompt limit is not published: that of the 7B model."""
    return published(
        "Qwen2.5-32B",
        response=RESPONSE,
        weights=LARGE,
        tensor_model_parallel_size=8,
        max_tokens_per_gpu=6144,
    )


@recipe(gpus=8, gpus_per_server=4)
def short_cot_32b_lora() -> Config:
    """Qwen2.5-32B with adapters of rank 32 on one node of eight."""
    return published(
        "Qwen2.5-32B",
        response=RESPONSE,
        weights=LARGE,
        adapters=LORA,
        tensor_model_parallel_size=4,
        max_tokens_per_gpu=6144,
    )


@recipe(gpus=8, gpus_per_server=1)
def short_cot_moonlight_16b_a3b() -> Config:
    """Moonlight-16B-A3B-Instruct, latent attention and 64 whole experts divided over 8 ranks. The
    paper has no such model; W and M are those of 14B.
    """
    return published(
        "Moonlight-16B-A3B-Instruct",
        response=RESPONSE,
        weights=LARGE,
        recompute_granularity="selective",
        recompute_modules="moe",
        max_tokens_per_gpu=8192,
        **EXPERTS,
    )
