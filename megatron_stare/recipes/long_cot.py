"""Long chain-of-thought: the STARE paper's reasoning models at 16k tokens (arXiv 2606.19236), a 32B
one at 32k, and some with experts.

The paper trains R1-Distill-Qwen-1.5B and Qwen3-8B with responses of 16k tokens; its batch and
learning rate there are not known to differ from the short setting. The 32B model at 32k and those
with experts are no rows of its table: hyperparameters are those of its 32B row.
"""

import dataclasses

from megatron_stare.config import Config
from megatron_stare.recipes.published import EXPERTS, LARGE, LORA, published, recipe

LONG, LONGEST = 16384, 32768  # tokens of a response


@recipe(gpus=4, gpus_per_server=1)
def long_cot_1_5b() -> Config:
    """DeepSeek-R1-Distill-Qwen-1.5B, one GPU a replica."""
    return published(
        "DeepSeek-R1-Distill-Qwen-1.5B",
        response=LONG,
        recompute_granularity="selective",
        recompute_modules="mlp",
        max_tokens_per_gpu=34816,
    )


@recipe(gpus=8, gpus_per_server=4)
def long_cot_8b() -> Config:
    """Qwen3-8B."""
    return published(
        "Qwen3-8B",
        response=LONG,
        tensor_model_parallel_size=4,
        context_parallel_size=2,
        max_tokens_per_gpu=9216,
    )


@recipe(gpus=32, gpus_per_server=8)
def long_cot_32b() -> Config:
    """Qwen3-32B with responses of 32k tokens."""
    return published(
        "Qwen3-32B",
        response=LONGEST,
        weights=LARGE,
        tensor_model_parallel_size=8,
        context_parallel_size=4,
        max_tokens_per_gpu=8704,
    )


@recipe(gpus=8, gpus_per_server=8)
def long_cot_32b_lora() -> Config:
    """Qwen3-32B with adapters of rank 32 and responses of 32k tokens on one node of eight."""
    return published(
        "Qwen3-32B",
        response=LONGEST,
        weights=LARGE,
        adapters=LORA,
        tensor_model_parallel_size=8,
        recompute_granularity="selective",
        recompute_modules="mlp",
        max_tokens_per_gpu=34816,
    )


@recipe(gpus=16, gpus_per_server=4)
def long_cot_30b_a3b() -> Config:
    """Qwen3-30B-A3B: 128 whole experts divided over 8 ranks; 16k tokens. The paper has no model
    with experts.
    """
    return published(
        "Qwen3-30B-A3B",
        response=LONG,
        weights=LARGE,
        recompute_granularity="full",
        max_tokens_per_gpu=17408,
        **EXPERTS,
    )


@recipe(gpus=8, gpus_per_server=4)
def long_cot_30b_a3b_lora() -> Config:
    """Qwen3-30B-A3B with adapters of rank 32 in its attention, on one node of eight; the experts
    and their router stay as they are.
    """
    return published(
        "Qwen3-30B-A3B",
        response=LONG,
        weights=LARGE,
        adapters=dataclasses.replace(LORA, targets="q,k,v,o"),
        recompute_granularity="selective",
        recompute_modules="moe",
        max_tokens_per_gpu=17408,
        **EXPERTS,
    )


@recipe(gpus=16, gpus_per_server=2)
def long_cot_glm_4_7_flash() -> Config:
    """GLM-4.7-Flash, 30B-A3B with latent attention: 64 whole experts divided over 8 ranks; 32k
    tokens. The paper has no such model.
    """
    return published(
        "GLM-4.7-Flash",
        response=LONGEST,
        weights=LARGE,
        context_parallel_size=2,
        recompute_granularity="full",
        max_tokens_per_gpu=17408,
        **EXPERTS,
    )
