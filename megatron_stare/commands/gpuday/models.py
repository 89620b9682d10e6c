"""Random models and problems, for stages of a machine that has none of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from megatron_stare.commands.gpuday.results import Day

TINY = {"layers": 4, "hidden": 64, "intermediate": 96, "heads": 8, "keys": 4, "head": 16}
# The shapes of Qwen2.5-Math-1.5B and 7B, with the norms of Qwen3.
SMALL = {"layers": 28, "hidden": 1536, "intermediate": 8960, "heads": 12, "keys": 2, "head": 128}
LARGE = {"layers": 28, "hidden": 3584, "intermediate": 18944, "heads": 28, "keys": 4, "head": 128}
END = "<|end|>"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model_of(day: Day) -> Path:
    """--model, or a random model: tiny in a rehearsal, 1.5B on fewer than eight GPUs, else 7B."""
    if day.model:
        return Path(day.model)
    if day.rehearsal:
        return random_model(day.path / "models" / "tiny", TINY)
    if day.gpus < 8:
        return random_model(day.path / "models" / "1.5b", SMALL, 151936)
    return random_model(day.path / "models" / "7b", LARGE, 151936)


def random_model(
    directory: Path, shape: Mapping[str, int], vocabulary: int = 512, experts: int = 0
) -> Path:
    """A Qwen3 checkpoint of this shape in bf16 (fp32 if tiny), and a tokenizer of bytes. One that
    is there is kept.
    """
    if (directory / "tokenizer_config.json").is_file():
        return directory
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    settings = {
        "vocab_size": vocabulary,
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["keys"],
        "head_dim": shape["head"],
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "initializer_range": 0.1 if shape["hidden"] < 1024 else 0.02,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    if experts:
        routed = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = Qwen3MoeConfig(**settings, **routed, norm_topk_prob=True)
    else:
        config = Qwen3Config(**settings)
    torch.manual_seed(0)
    dtype = torch.float32 if shape["hidden"] < 1024 else torch.bfloat16
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(directory)
    _save_tokenizer(directory, vocabulary)
    return directory


def _save_tokenizer(directory: Path, vocabulary: int) -> None:
    """One id per byte, an end token, and names for all further ids, which a server may sample."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [END, *letters, *(f"<{number}>" for number in range(len(letters) + 1, vocabulary))]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT
    fast.save_pretrained(directory)


def problems(day: Day, count: int = 512) -> Path:
    """Sums of two numbers, with their labels, as a .jsonl file."""
    file, draw = day.path / "problems.jsonl", random.Random(0)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    rows = [{"prompt": f"{a} + {b} =", "label": str(a + b)} for a, b in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def even_length(response: str, label: str, metadata: Mapping[str, object]) -> float:
    """A reward that random text earns half of the time, so that groups have a signal."""
    return float(sum(response.encode()) % 2 == 0)
