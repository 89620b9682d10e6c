"""Settings that all runs of the STARE paper share (arXiv 2606.19236), and a recipe's GPUs.

Known from the paper and its code: 64 prompts x 8 samples and one gradient step per batch, lr 1e-6,
gradient clip 1.0, clip 0.2 / 0.28, dual clip 10, token-mean, no KL and no entropy bonus,
temperature 1, dynamic sampling on accuracy from batches three times as large, at most 10 rounds,
validation with top_p 0.7; P = 0.1, target entropy 0.3; W = 1.1 and M = 0.9, for 14B and 32B
W = 1.05 and M = 0.95; AdamW with betas 0.9 / 0.999 as in the reference's trainer. The paper trains
in fp16; here bf16 with fp32 gradients and optimizer states.

Not known, and chosen here: weight decay (0.01, torch's default), steps of a run (1,000), the prompt
limit of the long and the tool settings, and every line about GPUs. The paper trains no adapters:
LORA and the learning rate of 1e-5, ten times that of whole weights, are choices of this project.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_stare.config import (
    AdaptersConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    ScoringConfig,
    SGLangConfig,
    TrainConfig,
)

BASELINE = "grpo_ds"
SMALL, LARGE = (1.1, 0.9), (1.05, 0.95)  # W and M of the paper: up to 8B, and of 14B and 32B
NO_ADAPTERS = AdaptersConfig()
LORA = AdaptersConfig(rank=32)
# Layout of whole experts divided over 8 ranks, whose choices of the rollout are repeated.
EXPERTS: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
    "routing_replay": "rollout",
}
Recipe = Callable[[], Config]


@dataclass(frozen=True)
class Cluster:
    """H100-80GB GPUs of a recipe: those that train, and those of its SGLang servers."""

    trainer_gpus: int
    rollout_gpus: int

    @property
    def gpus(self) -> int:
        return self.trainer_gpus + self.rollout_gpus

    @property
    def nodes(self) -> int:
        """Nodes of eight GPUs."""
        return -(-self.gpus // 8)


PUBLISHED: dict[str, Recipe] = {}
CLUSTERS: dict[str, Cluster] = {}


def recipe(gpus: int, gpus_per_server: int) -> Callable[[Recipe], Recipe]:
    """Register a recipe under its function's name, followed by <name>_grpo_ds: the same run with
    GRPO-ds, the paper's baseline.

    Its servers are on the trainer's GPUs: those of one node, which other nodes start too. The plan
    of every recipe is cheaper so: on-policy, one half of separate GPUs always waits for the other.
    """
    servers = SGLangConfig(
        colocated=True,
        num_servers=min(8, gpus) // gpus_per_server,
        gpus_per_server=gpus_per_server,
    )

    def register(settings: Recipe) -> Recipe:
        name = settings.__name__

        @functools.wraps(settings)
        def whole() -> Config:
            run = RunConfig(dir=f"runs/{name}")
            return dataclasses.replace(settings(), run=run, sglang=servers)

        CLUSTERS[name] = Cluster(gpus, 0)
        PUBLISHED[name] = whole
        PUBLISHED[f"{name}_{BASELINE}"] = functools.partial(_baseline, whole)
        return whole

    return register


def published(
    model: str,
    *,
    response: int,
    prompt: int = 1024,
    weights: tuple[float, float] = SMALL,
    adapters: AdaptersConfig = NO_ADAPTERS,
    **layout: Any,
) -> Config:
    """A run of the paper on models/`model`: STARE O1 on mathematics, with `prompt` + `response`
    tokens at most. `weights` are W and M; `layout` are fields of PolicyConfig.

    Give data.prompt_data; evaluation files by evaluation.eval_data.<name>=<file>.
    """
    return Config(
        data=DataConfig(rollout_max_prompt_len=prompt),
        policy=PolicyConfig(
            hf_checkpoint=f"models/{model}",
            sequence_parallel=layout.get("tensor_model_parallel_size", 1) > 1,
            use_distributed_optimizer=True,
            dtype="bf16",
            offload_while_generating=True,
            **layout,
        ),
        adapters=adapters,
        optimizer=OptimizerConfig(
            lr=1e-5 if adapters.rank else 1e-6, adam_beta1=0.9, adam_beta2=0.999, clip_grad=1.0
        ),
        rollout=RolloutConfig(
            engine="sglang",
            rollout_batch_size=64,
            n_samples_per_prompt=8,
            over_sampling_batch_size=192,
            rollout_max_response_len=response,
            dynamic_sampling=True,
            max_generation_rounds=10,
        ),
        scoring=ScoringConfig(reward="math"),
        loss=LossConfig(name="stare", variant="O1", reweight_w=weights[0], reweight_m=weights[1]),
        train=TrainConfig(num_rollout=1000),
        evaluation=EvaluationConfig(eval_interval=50, n_samples_per_eval_prompt=32, eval_top_p=0.7),
    )


def _baseline(recipe: Recipe) -> Config:
    """The recipe with GRPO-ds. Arms of a comparison share its directory, and so its cold start."""
    config = recipe()
    if config.compare.arms:
        compared = dataclasses.replace(config.compare, run=[BASELINE])
        return dataclasses.replace(config, compare=compared)
    own = dataclasses.replace(config.run, dir=f"{config.run.dir}_{BASELINE}")
    return dataclasses.replace(config, run=own, loss=LossConfig(name=BASELINE))
