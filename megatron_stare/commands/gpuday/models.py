"""Random models, problems and rollouts, for stages of a machine that has none of its own."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from megatron_stare.commands.gpuday.rows import Day
from megatron_stare.planning.shapes import model_shape
from megatron_stare.policy import runtime
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.system import json_line

VOCABULARY = 512
TINY = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Small models: the shape that they have, except for these fields.
SMALL = {"tiny": ("Qwen3-8B", TINY), "tiny-experts": ("Qwen3-30B-A3B", TINY | EXPERTS)}
END = "<|end|>"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model_of(day: Day) -> Path:
    """--model, or a random model: tiny in a rehearsal, 1.7B on fewer than eight GPUs, else 8B."""
    name = "tiny" if day.rehearsal else "Qwen3-1.7B" if day.gpus < 8 else "Qwen3-8B"
    return Path(day.model) if day.model else random_model(day, name)


def random_model(day: Day, name: str) -> Path:
    """A checkpoint of one of SMALL in fp32, or of a model's shape in bf16, which the GPU draws if
    there is one, with a tokenizer of bytes. An existing one is kept.
    """
    directory = day.path / "models" / name
    if (directory / "tokenizer_config.json").is_file():
        return directory
    shape, changes = SMALL.get(name, (name, {}))
    dtype, device = torch.float32, torch.device("cpu")
    config = model_shape(shape)
    if changes:
        config = type(config)(**{**config.to_dict(), "layer_types": None, **changes})
    else:  # billions of numbers, which a CPU draws slowly
        dtype, device = torch.bfloat16, runtime.device()
    config.update({"eos_token_id": 0, "bos_token_id": None})
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    _save_tokenizer(directory, config.vocab_size)
    del model  # from the GPU, too, whose memory the runs of this stage need
    gc.collect()
    torch.cuda.empty_cache()
    return directory


def _save_tokenizer(directory: Path, vocabulary: int) -> None:
    """One id per byte, an end token, and names for all further ids, which a server may sample."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [END, *letters, *(f"<{number}>" for number in range(len(letters) + 1, vocabulary))]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT
    fast.save_pretrained(directory)


def problems(day: Day) -> Path:
    """Sums of two numbers, with their labels, as a .jsonl file."""
    file, draw = day.path / "problems.jsonl", random.Random(0)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(512)]
    rows = ({"prompt": f"{a} + {b} =", "label": str(a + b)} for a, b in pairs)
    file.write_text("".join(map(json_line, rows)))
    return file


def even_length(response: str, label: str, metadata: Mapping[str, object]) -> float:
    """A reward that random text earns half of the time, so that groups have a signal."""
    return float(sum(response.encode()) % 2 == 0)


def made_up_groups(
    count: int, prompt: int, lengths: Sequence[int], routing: numpy.ndarray | None = None
) -> list[Group]:
    """`count` groups of tokens that no engine has sampled: a prompt of `prompt` tokens, responses
    of these lengths, right and wrong in turn, and the experts of each.
    """
    draw = numpy.random.default_rng(0)

    def tokens(length: int) -> numpy.ndarray:
        return draw.integers(1, VOCABULARY, length).astype(numpy.int32)

    return [
        Group(
            Prompt(number, tokens(prompt), label=""),
            tuple(
                Rollout(
                    response_ids=tokens(length),
                    logprobs=numpy.full(length, -6.0, numpy.float32),
                    loss_mask=numpy.ones(length, bool),
                    status="completed",
                    weight_version=0,
                    advantage=1.0 if (number + place) % 2 else -1.0,
                    routing=numpy.zeros(0, numpy.uint8) if routing is None else routing,
                )
                for place, length in enumerate(lengths)
            ),
        )
        for number in range(count)
    ]
