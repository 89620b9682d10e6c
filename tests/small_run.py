"""A whole RL run small enough for a test:
a tiny random model, problems it scores on by chance, a few steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stare.config import Config, override
from megatron_stare.reporting.logbook import read_metrics
from tests.tiny_models import save_tokenizer, tiny_config, write_checkpoint

SETTINGS = (
    "data.rollout_max_prompt_len=16",
    "policy.max_tokens_per_gpu=96",
    "policy.packed_sequences=false",
    "optimizer.lr=3e-3",
    "optimizer.lr_warmup_iters=2",
    "rollout.rollout_batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "rollout.rollout_max_response_len=12",
    "scoring.reward=tests.rewards.even_characters",
    "scoring.function_timeout=0",  # a process for it costs more than the whole run
    "rollout.max_generation_rounds=8",
    "loss.name=stare",
    "loss.variant=C2",
    "loss.adaptive=true",
    "loss.alpha=0.05",
    "loss.target_entropy=10",
    "train.num_rollout=3",
    "run.save_interval=0",
)


def small_config(directory: Path, *overrides: str) -> Config:
    """Writes checkpoint and problems under `directory` (once) and
    returns a Config that trains on them.
    """
    model, problems = directory / "model", directory / "problems.jsonl"
    if not problems.exists():
        write_checkpoint(
            model, tiny_config("qwen2", vocab_size=257, eos_token_id=0, max_position_embeddings=64)
        )
        save_tokenizer(model)
        rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(6)]
        problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = (
        f"policy.hf_checkpoint={model}",
        f"data.prompt_data={problems}",
        f"run.dir={directory / 'run'}",
    )
    return override(Config(), [*_settings(overrides), *paths, *overrides])


def _settings(overrides: Sequence[str]) -> list[str]:
    """SETTINGS, without STARE's for a loss that does not read them."""
    names = [each for each in overrides if each.startswith("loss.name=")]
    weighted = "loss.reweight=stare" in overrides or not names or names[-1] == "loss.name=stare"
    own = ("loss.variant", "loss.adaptive", "loss.alpha", "loss.target_entropy")
    return [each for each in SETTINGS if weighted or not each.startswith(own)]


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics rows without the keys that depend on time."""
    return [
        {
            key: value
            for key, value in row.items()
            if not key.startswith(("seconds", "sync_seconds"))
        }
        for row in rows
    ]


def rows_of(config: Config) -> list[dict[str, Any]]:
    """The run's metrics rows without the keys that depend on time."""
    return without_seconds(read_metrics(Path(config.run.dir) / "metrics.jsonl"))
