"""The files that a quickstart makes for itself: rows, a random checkpoint of 0.1M parameters, and a
tokenizer. Each file appears under its name only when whole, and world.json last: a directory
without it is not complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.system import atomic_write


def write_world(
    directory: Path,
    version: int,
    seed: int,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    tokenizer: Any,
    max_positions: int,
) -> None:
    """Write the .jsonl files and the model of one world; what stood there is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "world.json").unlink(missing_ok=True)
    for name, content in rows.items():
        atomic_write(directory / name, "".join(json.dumps(row) + "\n" for row in content))
    write_checkpoint(directory / "model", tokenizer, seed, max_positions)
    counts = {name: len(content) for name, content in rows.items()}
    description = json.dumps({"version": version, "seed": seed, "rows": counts})
    atomic_write(directory / "world.json", description + "\n")


def is_complete(directory: Path, version: int, seed: int) -> bool:
    """Whether `directory` holds the whole world of `seed`, made by this version of it."""
    try:
        world = json.loads((directory / "world.json").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    if not isinstance(world, dict) or world.get("version") != version or world.get("seed") != seed:
        return False
    names = [
        *world.get("rows", ()),
        "model/config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
    ]
    return all((directory / name).is_file() for name in names)


def write_checkpoint(path: Path, tokenizer: Any, seed: int, max_positions: int) -> None:
    """A random checkpoint of about 0.1M parameters and its tokenizer, which appear whole."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        use_cache=True,
        dtype="float32",
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    bars_were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    finally:
        if bars_were_on:
            logging.enable_progress_bar()
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)
