"""A GGUF file becomes a Hugging Face model directory: weights, config, tokenizer, chat template.

Quantised tensors are dequantised to fp32, then rounded to `dtype`. transformers reads the format
(its table of architectures), the package gguf dequantises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.policy.huggingface.families import FAMILIES
from megatron_stare.system import atomic_directory

WEIGHTS = "model.safetensors"


def gguf_to_hf(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> int:
    """Write `target`, which must not exist; it appears whole or not at all. Bytes of its weights.

    UserError: no GGUF file, an architecture that the trainer does not build, a missing package.
    """
    if target.exists():
        raise UserError(f"TARGET {target} exists; give a directory that does not exist yet")
    config, tokenizer, tensors = _read(source)
    config.dtype = str(dtype).removeprefix("torch.")
    rounded = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    with atomic_directory(target) as partial:
        save_file(rounded, partial / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return sum(tensor.nbytes for tensor in rounded.values())


def _read(source: Path) -> tuple[Any, Any, dict[str, Tensor]]:
    """The file's config, tokenizer and tensors under their Hugging Face names."""
    try:
        import gguf  # noqa: F401  (transformers needs it below and names no extra)
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    except ImportError as error:
        raise UserError(
            f"GGUF files need {error.name}; install megatron-stare[gguf], or pip install gguf"
        ) from None
    if not source.is_file():
        raise UserError(f"SOURCE {source} is not a file; give a .gguf file")
    where = {"gguf_file": source.name, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(source.parent, **where)
        if config.model_type not in FAMILIES:
            raise UserError(
                f"SOURCE {source}: model_type={config.model_type!r} is not supported; use one of "
                f"{', '.join(FAMILIES)}"
            )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        found = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=empty)
    except (ValueError, KeyError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"SOURCE {source} is not a GGUF file that transformers reads: "
            f"{' '.join(str(error).split()) or type(error).__name__}"
        ) from None
    tensors = dict(found["tensors"])
    config.tie_word_embeddings = "lm_head.weight" not in tensors
    config.architectures = [type(empty).__name__]  # an SGLang server asks for it
    if config.eos_token_id is not None:
        # transformers guesses the end token of a GGUF tokenizer; the config has the file's own.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    missing = sorted(empty.state_dict().keys() - tensors.keys() - {"lm_head.weight"})
    if missing:
        raise UserError(f"SOURCE {source} has no tensor for {missing[0]}; download it again")
    return config, tokenizer, tensors
