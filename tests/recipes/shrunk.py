"""A recipe on a model of some thousand parameters: its own layout with at most two ranks a kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_stare.config import Config, override
from megatron_stare.planning.shapes import MODELS
from megatron_stare.recipes import find_recipe
from tests.tiny_models import save_tokenizer, tiny_config, write_checkpoint

WORLD = 4
# Lengths and sizes; what the recipe is about stays: dtype, packing, head, recomputation, sampling.
SMALL = (
    *("rollout.rollout_batch_size=4", "rollout.n_samples_per_prompt=4"),
    *("rollout.over_sampling_batch_size=12", "rollout.rollout_max_response_len=12"),
    *("data.rollout_max_prompt_len=96", "policy.max_tokens_per_gpu=256"),
    *("scoring.reward=tests.rewards.even_characters", "evaluation.eval_interval=0"),
    *("train.num_rollout=2", "run.save_interval=0", "sandbox.isolation=limits"),
    *("sandbox.warm_workers=1", "scoring.verifier_processes=1", "mismatch.alarm=0.1"),
)
# Families with experts. SGLang's Qwen3-MoE has them in every layer, whatever mlp_only_layers says,
# and its DeepSeek-V3 reads fields that transformers does not.
ROUTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4_moe_lite": {},
}


def families() -> set[str]:
    """The model families of the recipes."""
    return {str(model["model_type"]) for model in MODELS.values()}


def write_world(directory: Path) -> None:
    """One tiny checkpoint for each family of the recipes' models, problems, demonstrations."""
    for family in families():
        shape = {"vocab_size": 257, "eos_token_id": 0, "max_position_embeddings": 512}
        # in bf16 the embedded engine's experts want rows of whole 16 bytes
        experts = {"moe_intermediate_size": 24} if family in ROUTED else {}
        own = ROUTED.get(family, {})
        write_checkpoint(directory / family, tiny_config(family, **shape, **experts, **own))
        save_tokenizer(directory / family)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(6)]
    (directory / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["label"]},
            ]
        }
        for row in rows
    ]
    (directory / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks))


def shrunk(name: str, directory: Path, *overrides: str) -> Config:
    """The recipe on `directory`'s files, in directory/runs/name."""
    config = find_recipe(name)
    policy, family = config.policy, MODELS[Path(config.policy.hf_checkpoint).name]["model_type"]
    sizes = {
        key: min(2, getattr(policy, key))
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    }
    start = (f"cold_start.data={directory / 'talks.jsonl'}", "cold_start.steps=2")
    places = (
        f"policy.hf_checkpoint={directory / str(family)}",
        f"data.prompt_data={directory / 'problems.jsonl'}",
        f"run.dir={directory / 'runs' / name}",
        *((*start, "cold_start.batch_size=4") if config.compare.arms else ()),
    )
    layout = [f"policy.{key}={size}" for key, size in sizes.items()]
    return override(config, [*SMALL, *layout, *places, *overrides])
