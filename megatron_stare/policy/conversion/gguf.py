"""A GGUF file becomes a Hugging Face model directory: weights, config, tokenizer, chat template.

Quantised tensors are dequantised to fp32, then rounded to `dtype`. transformers reads the format
(its table of architectures), the package gguf dequantises. transformers passes over tensors and
settings that it has no name for; here they are understood or refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_stare.config import UserError
from megatron_stare.policy import build
from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.huggingface.checkpoint import Checkpoint, check_agreement
from megatron_stare.policy.huggingface.families import FAMILIES, LLAMA3_ROPE
from megatron_stare.system import atomic_directory

_ROPE_FACTORS = "rope_freqs.weight"


def gguf_to_hf(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> int:
    """Write the directory `target`; it appears whole or not at all. Bytes of its weights.

    UserError: no GGUF file, one that the trainer does not build, a missing package, or `target` is
    in use.
    """
    target = hf_files.new_directory(target)
    config, tokenizer, tensors = _read(source)
    config.dtype = str(dtype).removeprefix("torch.")
    shapes = {name: (tuple(tensor.shape), dtype) for name, tensor in tensors.items()}
    rounded = (tensors.pop(name).to(dtype) for name in shapes)
    with atomic_directory(target) as partial:
        hf_files.write_file(partial / hf_files.SINGLE, shapes, rounded, {"format": "pt"})
        config.save_pretrained(partial)
        _add_old_names(partial / "config.json")
        tokenizer.save_pretrained(partial)
        try:
            check_agreement(Checkpoint(str(partial)), build.read_hf_config(str(partial)))
        except UserError as error:
            raise UserError(
                f"SOURCE {source} cannot be converted as transformers reads it ({error})"
            ) from None
    return sum(hf_files.sizes_of(shapes).values())


def _add_old_names(file: Path) -> None:
    """Add the fields in which transformers 4 looks for RoPE: without them it takes its defaults."""
    content = json.loads(file.read_text())
    rope = content["rope_parameters"]
    content["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        content["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _read(source: Path) -> tuple[Any, Any, dict[str, Tensor]]:
    """The file's config, tokenizer and tensors under their Hugging Face names."""
    try:
        from gguf import GGUFReader  # transformers needs it below and names no extra
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint, read_field
    except ImportError as error:
        raise UserError(
            f"GGUF files need {error.name}; install megatron-stare[gguf], or pip install gguf"
        ) from None
    if not source.is_file():
        raise UserError(f"SOURCE {source} is not a file; give a .gguf file")
    where = {"gguf_file": source.name, "local_files_only": True}
    try:
        reader = GGUFReader(source)
        if (parts := sum(read_field(reader, "split.count"))) > 1:
            raise UserError(
                f"SOURCE {source} is one of {parts} parts of a model; join them with llama.cpp's "
                "llama-gguf-split --merge"
            )
        config = AutoConfig.from_pretrained(source.parent, **where)
        if config.model_type not in FAMILIES:
            raise UserError(
                f"SOURCE {source}: model_type={config.model_type!r} is not supported; use one of "
                f"{', '.join(FAMILIES)}"
            )
        _scale_rope(source, reader, config)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        _check_all_used(source, reader, empty)
        found = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=empty)
    except (ValueError, LookupError, OSError, EOFError, RuntimeError) as error:
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


def _scale_rope(source: Path, reader: Any, config: Any) -> None:
    """Put the scaling of RoPE into the config. llama.cpp stores llama3's as the factors by which it
    divides all frequencies, and every other one as a setting. UserError: another one than llama3's.
    """
    from transformers.modeling_gguf_pytorch_utils import read_field

    (architecture,) = read_field(reader, "general.architecture")
    for name, plain in (("rope.scaling.type", "none"), ("rope.scale_linear", 1.0)):
        for value in read_field(reader, f"{architecture}.{name}"):
            if value != plain:
                raise UserError(
                    f"SOURCE {source}: {name}={value!r} is not supported; take a model without it"
                )
    factors = [each.data for each in reader.tensors if each.name == _ROPE_FACTORS]
    if not factors:
        return
    stored, theta = torch.tensor(factors[0]).double(), config.rope_parameters["rope_theta"]
    scaling = LLAMA3_ROPE | {"rope_type": "llama3", "factor": float(stored.max())}
    config.rope_parameters = config.rope_parameters | scaling
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = theta ** -(torch.arange(len(stored), dtype=torch.float64) / len(stored))
    if scaled.shape != plain.shape or not torch.allclose(plain / scaled, stored, rtol=1e-3, atol=0):
        raise UserError(
            f"SOURCE {source}: {_ROPE_FACTORS} is not the scaling of Llama 3.1 "
            f"({', '.join(f'{name}={value:g}' for name, value in LLAMA3_ROPE.items())}); take the "
            "Hugging Face checkpoint"
        )


def _check_all_used(source: Path, reader: Any, model: Any) -> None:
    """UserError: transformers has no name for a tensor of the file, and would leave it out."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        read_field,
    )

    (architecture,) = read_field(reader, "general.architecture")
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    known = get_gguf_hf_weights_map(model, processor)
    for name in (each.name for each in reader.tensors if each.name != _ROPE_FACTORS):
        if name not in known and name.removesuffix(".weight") not in known:  # of all experts
            raise UserError(
                f"SOURCE {source}: tensor {name} has no place in a {model.config.model_type} of "
                "transformers; take the Hugging Face checkpoint"
            )
