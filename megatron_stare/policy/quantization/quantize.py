"""Post-training quantisation of a Hugging Face checkpoint with nvidia-modelopt,
exported in modelopt's HF form; of experts alone, without it (experts.py).

Every linear layer but the output head is quantised, weights and inputs; embeddings, head, norms and
biases keep the source's dtype. modelopt needs the whole model: one copy of the source's weights is
held, with the quantised ones beside it while they are written (half as much again for 8 bits, a
quarter for 4). No GPU is needed; one is used where it is.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatron_stare.config import UserError, nearest
from megatron_stare.policy import runtime
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.huggingface.checkpoint import Checkpoint, check_agreement
from megatron_stare.policy.huggingface.names import name_table, sparse_layers


@dataclass(frozen=True)
class Format:
    """modelopt's preset, if it is modelopt's, and how SGLang serves it.

    group: how many weights along the input share a scale. share_scales: whether merged layers must
    be given one scale.
    """

    preset: str
    serving: str
    group: int = 1
    share_scales: bool = False


# fp8: E4M3, one static scale per tensor, for weights and inputs.
# int8: SmoothQuant (arXiv 2211.10438), one scale per output channel for weights and one per tensor
# for inputs. nvfp4: E2M1 in groups of 16 with an E4M3 scale each and one fp32 scale per tensor, for
# weights and inputs. fp8_experts: E4M3 in blocks of 128 x 128, for the weights of experts.
FORMATS = {
    "fp8": Format("FP8_DEFAULT_CFG", "SGLang with --quantization modelopt_fp8", share_scales=True),
    "int8": Format(
        "INT8_SMOOTHQUANT_CFG", "not by SGLang, whose modelopt loader takes FP8 and FP4 alone"
    ),
    "nvfp4": Format("NVFP4_DEFAULT_CFG", "SGLang with --quantization modelopt_fp4", group=16),
    "fp8_experts": Format("", "SGLang, which finds in config.json what it is"),
}

# Layers that inference servers merge into one matrix product.
_MERGED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def find_format(name: str) -> Format:
    """The Format of a name. UserError: unknown."""
    if name not in FORMATS:
        raise UserError(f"--format {name} is unknown{nearest(name, FORMATS)}")
    return FORMATS[name]


def check_source(source: Path, format_name: str) -> PretrainedConfig:
    """The source's config, once every tensor is known to be there,
    finite and of the right shape. UserError: not so.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"{source}: no config.json there; give a Hugging Face model directory")
    config = read_hf_config(str(source))
    if getattr(config, "quantization_config", None) or (source / "hf_quant_config.json").is_file():
        raise UserError(f"{source} is quantised already; give the original checkpoint")
    table, checkpoint = name_table(config), Checkpoint(str(source))
    check_agreement(checkpoint, config)
    chosen, has_experts = find_format(format_name), any(sparse_layers(config))
    if has_experts != (not chosen.preset):
        other = "which fp8_experts alone covers" if has_experts else "and is dense: use fp8"
        raise UserError(f"--format {format_name}: {source} is a {config.model_type}, {other}")
    group = chosen.group
    for entry in table:
        for name, shape in zip(entry.hf, entry.shapes, strict=True):
            tensor = checkpoint.read(name, shape)
            if not torch.isfinite(tensor).all():
                raise UserError(
                    f"{source}: {name} is not finite everywhere; give a sound checkpoint"
                )
            if "_proj." in name and shape[-1] % group and len(shape) == 2:
                raise UserError(
                    f"--format {format_name} scales groups of {group} inputs, which do not divide "
                    f"the {shape[-1]} of {name}; use fp8 or int8"
                )
    return config


def load_model(source: Path) -> PreTrainedModel:
    """The checkpoint as a transformers model, in its own dtype, on this process's device,
    without dropout.
    """
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    return model.to(runtime.device()).eval()


def require_modelopt() -> Any:
    """(quantization module, export function, version). UserError:
    nvidia-modelopt or something it needs is missing.
    """
    runtime.prepare()  # modelopt imports Megatron-Core where it finds it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt
            import modelopt.torch.quantization as quantization
            from modelopt.torch.export import export_hf_checkpoint
    except ImportError as error:
        raise UserError(
            f"quantize needs nvidia-modelopt ({error}); install it: pip install "
            "'megatron-stare[quantize]'"
        ) from None
    return quantization, export_hf_checkpoint, modelopt.__version__


def sample_responses(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Every prompt with a response behind it that the model samples at temperature 1,
    up to an end token.
    """
    end = model.generation_config.eos_token_id
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=max_new_tokens,
        eos_token_id=end,
        pad_token_id=0,
        use_cache=True,
    )
    extended = []
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
            extended.append(whole[0].tolist())
    return extended


def quantize_model(
    model: PreTrainedModel, format_name: str, calibration: Sequence[Sequence[int]]
) -> PreTrainedModel:
    """The model with modelopt's simulated quantisation in it, in place.

    Calibration records the largest magnitude of every layer's input over the token sequences; none
    is padded or cut.
    """
    quantization, _, _ = require_modelopt()
    chosen = find_format(format_name)

    def calibrate(model: PreTrainedModel) -> None:
        for token_ids in calibration:
            model(torch.tensor([token_ids], device=model.device), use_cache=False, logits_to_keep=1)

    with _unheard(), torch.no_grad():
        model = quantization.quantize(model, getattr(quantization, chosen.preset), calibrate)
        if chosen.share_scales:
            share_scales(model)
    return model


def export_model(model: PreTrainedModel, target: Path) -> None:
    """Write a model of `quantize_model` to the directory `target`, which uses it up."""
    _, export, _ = require_modelopt()
    model.config.architectures = [
        type(model).__name__
    ]  # modelopt asks for it; an old config.json may lack it
    with _unheard(), torch.no_grad():
        export(model, export_dir=target)
    for file in target.glob("*.safetensors"):  # safetensors makes its files private to this user
        file.chmod((target / "config.json").stat().st_mode)


def share_scales(model: PreTrainedModel) -> None:
    """Give the layers that servers merge (q, k, v; gate, up) the largest of their weight scales.

    SGLang's FP8 path has one scale per merged product and rounds the weights a second time where
    scales differ. With one scale from the start, what is written, measured and served is the same.
    """
    for layer in model.model.layers:
        for block, names in _MERGED:
            quantizers = [getattr(getattr(layer, block), name).weight_quantizer for name in names]
            largest = torch.stack([quantizer.amax for quantizer in quantizers]).max()
            for quantizer in quantizers:
                quantizer.amax = largest.clone()


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Without modelopt's progress and warnings; what it wrote is read back and measured instead."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
