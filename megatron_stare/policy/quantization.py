"""Post-training quantisation of a Hugging Face checkpoint, and the error it makes.

nvidia-modelopt quantises, in its own HF form: every linear layer but the output head, weights and
inputs; embeddings, head, norms and biases keep the source's dtype. modelopt needs the whole model:
one copy of the source's weights is held, and next to it the quantised ones while they are written
(half as much again for 8 bits, a quarter for 4). No GPU is needed; a GPU is used if there is one.

`quantize_blocks` needs no modelopt: it writes the matrices of all linear layers, or of experts, in
E4M3 with a scale for each block of 128 x 128 as `weight_scale_inv`, and a `quantization_config`
that names the rest, like the checkpoint Qwen3-30B-A3B-FP8. It works tensor by tensor, without
calibration and without a model in memory. Of a policy trained under policy.weight_quantization it
holds the very weights (huggingface/fp8_weights.py).

`measure` compares the two models over every position of the measuring sequences, p the original's
next-token distribution and q the quantised one's:
KL(p || q) = sum_v p_v (ln p_v - ln q_v) [nats]. For the actual next token a of all positions but
the last, the surprisal shift d = ln p_a - ln q_a [nats]: exp(d) is that token's importance ratio
where q samples and p is trained. q is what was written, read back by `load_exported` as a
transformers model that computes what a server of it computes: weights are decoded, and every
quantised layer's input is rounded as the server's matrix product rounds it. What differs from a
server is accumulation order, its KV cache and attention kernels. Per layer, x its input, W its
weight:

    fp8    round_E4M3(x / s_x) s_x  and  W_8 s_w
    int8   round((x p) / s_x) s_x   and  W_8 s_w[row]       p: SmoothQuant's factor per input
    nvfp4  group of 16: scale t = E4M3(max|x| / (6 s_x)) s_x, round_E2M1(x / t) t;  W_4 E4M3[row,
           group] s_w
    fp8_experts  x  and  W_8 s_w[block of 128 x 128], of experts

Of fp8_experts a server rounds inputs too, by scales that it makes; that is not computed here. The
model has the export's dtype, so decoded weights are rounded to it.

Shape legend: S positions of one sequence, V vocabulary, O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from megatron_stare.config import UserError, nearest
from megatron_stare.policy import runtime
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.huggingface import block_fp8
from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.huggingface.checkpoint import Checkpoint, check_agreement
from megatron_stare.policy.huggingface.families import sparse_layers
from megatron_stare.policy.huggingface.fp8_weights import (
    EXPERTS_ONLY,
    block_matrices,
    check_family,
    check_server,
    quantization_config,
)
from megatron_stare.policy.huggingface.names import name_table

_CHUNK_BYTES = 64 << 20  # of fp64 log-probabilities at a time
# (values, scale) -> what a server's matrix product sees
Rounding = Callable[[Tensor, Tensor], Tensor]

_E2M1_MAX, _GROUP = 6.0, 16
# Codes 0 to 7; 8 to 15 are their negatives.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SCALES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "weight_scale_inv")


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
# weights and inputs. fp8_blocks, fp8_experts: E4M3 in blocks of 128 x 128, for the weights of all
# linear layers, or of experts.
FORMATS = {
    "fp8": Format("FP8_DEFAULT_CFG", "SGLang with --quantization modelopt_fp8", share_scales=True),
    "int8": Format(
        "INT8_SMOOTHQUANT_CFG", "not by SGLang, whose modelopt loader takes FP8 and FP4 alone"
    ),
    "nvfp4": Format("NVFP4_DEFAULT_CFG", "SGLang with --quantization modelopt_fp4", group=_GROUP),
    "fp8_blocks": Format("", "SGLang, which finds in config.json what it is"),
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
    """The source's config. UserError: a tensor is missing, not finite or of another shape."""
    config = read_hf_config(str(source), "SOURCE")
    if getattr(config, "quantization_config", None) or (source / "hf_quant_config.json").is_file():
        raise UserError(f"{source} is quantised already; give the original checkpoint")
    check_family(config, f"--format {format_name}")
    table, checkpoint = name_table(config), Checkpoint(str(source))
    check_agreement(checkpoint, config)
    chosen, has_experts = find_format(format_name), any(sparse_layers(config))
    if (has_experts and chosen.preset) or (not has_experts and format_name == EXPERTS_ONLY):
        remedy = "fp8_blocks or fp8_experts" if has_experts else "fp8_blocks or fp8"
        other = f"{'with' if has_experts else 'without'} experts; use {remedy}"
        raise UserError(f"--format {format_name}: {source} is a {config.model_type}, {other}")
    if format_name == "fp8_blocks":
        check_server(config, block_matrices(config), 1, 1, f"--format {format_name}")
    group = chosen.group
    for entry in table:
        for name, shape in entry.tensors:
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
    """The checkpoint as a transformers model on this device, in its own dtype, without dropout."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
    return model.to(runtime.device()).eval()


def require_modelopt() -> Any:
    """The package modelopt. UserError: it or something that it needs is missing."""
    runtime.prepare()  # modelopt imports Megatron-Core where it finds it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import modelopt.torch.export
            import modelopt.torch.quantization
    except ImportError as error:
        raise UserError(
            f"quantize needs nvidia-modelopt ({error}); install it: pip install "
            "'megatron-stare[quantize]'"
        ) from None
    return modelopt


def sample_responses(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Every prompt with a response, which is sampled at temperature 1 up to an end token."""
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
    quantization = require_modelopt().torch.quantization
    chosen = find_format(format_name)

    def calibrate(model: PreTrainedModel) -> None:
        for token_ids in calibration:
            model(torch.tensor([token_ids], device=model.device), use_cache=False, logits_to_keep=1)

    with _unheard(), torch.no_grad():
        model = quantization.quantize(model, getattr(quantization, chosen.preset), calibrate)
        if chosen.share_scales:
            share_scales(model)
    return model


def export_model(model: PreTrainedModel, source: Path, target: Path) -> None:
    """Write a model of `quantize_model` to the directory `target`, which uses it up. config.json is
    that of `source` with the number format added: modelopt's has the names of transformers 5, and
    transformers 4 finds no rope_theta in it and takes its own default.
    """
    export = require_modelopt().torch.export.export_hf_checkpoint
    # modelopt asks for it; an old config.json may lack it.
    model.config.architectures = [type(model).__name__]
    with _unheard(), torch.no_grad():
        export(model, export_dir=target)
    for file in target.glob("*.safetensors"):  # safetensors makes its files private to this user
        file.chmod((target / "config.json").stat().st_mode)
    written = json.loads((target / "config.json").read_text())
    content = json.loads((source / "config.json").read_text())
    content |= {name: written[name] for name in ("architectures", "quantization_config")}
    (target / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    hf_files.set_dtype(target, model.dtype)


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


def quantize_blocks(source: Path, target: Path, hf: PretrainedConfig, format_name: str) -> None:
    """Write config.json and weights of `source` to the directory `target`."""
    checkpoint = Checkpoint(str(source))
    encoded = block_matrices(hf, experts_only=format_name == EXPERTS_ONLY)
    layout = hf_files.layout_of(source)
    assert layout is not None, "its tensors were read"
    sizes, files = dict[str, int](), []
    for file in layout.files:
        # A tensor of all experts becomes those of each, which have scales of their own.
        names = tuple(n for n, own in checkpoint.tensors.items() if own.file.name == file.name)
        shapes = dict(_shapes(names, checkpoint, encoded))
        tensors = _tensors(names, checkpoint, encoded)
        hf_files.write_file(target / file.name, shapes, tensors, file.metadata)
        sizes |= hf_files.sizes_of(shapes)
        files.append(hf_files.FileLayout(file.name, tuple(shapes), file.metadata))
    hf_files.write_index(target, hf_files.DirectoryLayout(tuple(files), layout.index), sizes)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(hf, encoded)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _shapes(
    names: tuple[str, ...], checkpoint: Checkpoint, encoded: Collection[str]
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    for name in names:
        info = checkpoint.tensors[name].info
        if name in encoded:
            blocks = tuple(-(-size // block_fp8.BLOCK) for size in info.shape)
            yield name, (info.shape, torch.float8_e4m3fn)
            yield f"{name}{block_fp8.SCALE}", (blocks, torch.float32)
        else:
            yield name, (info.shape, hf_files.DTYPES[info.code])


def _tensors(
    names: tuple[str, ...], checkpoint: Checkpoint, encoded: Collection[str]
) -> Iterator[Tensor]:
    for name in names:
        tensor = checkpoint.read(name, checkpoint.tensors[name].info.shape)
        yield from block_fp8.encode(tensor) if name in encoded else (tensor,)


def load_exported(directory: Path) -> PreTrainedModel:
    """The exported model, in memory as large as the original. RuntimeError:
    tensors are missing or left over.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    del config.quantization_config
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    scales: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name in list(tensors):
        layer, _, part = name.rpartition(".")
        if part in _SCALES:
            scales[layer][part] = tensors.pop(name)
    rounding = {
        layer: _ROUND[tensors[f"{layer}.weight"].dtype]
        for layer, parts in scales.items()
        if "input_scale" in parts
    }
    for layer, parts in scales.items():
        decoded = decode_weight(tensors[f"{layer}.weight"], parts)
        tensors[f"{layer}.weight"] = decoded.to(config.dtype)
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=config.dtype, output_loading_info=True
    )
    wrong = sorted(report["missing_keys"] | report["unexpected_keys"])
    if wrong or not scales:
        raise RuntimeError(
            f"{directory} is not a whole export of a quantised model: "
            f"{wrong or 'nothing is quantised'}"
        )
    model = model.to(runtime.device()).eval()
    for layer, function in rounding.items():
        hook = _input_hook(function, scales[layer], model.device)
        model.get_submodule(layer).register_forward_pre_hook(hook)
    return model


def _input_hook(rounding: Rounding, scales: dict[str, Tensor], device: torch.device) -> Any:
    """A forward pre-hook that rounds a layer's input in fp32 and hands it on in its own dtype."""
    scale = scales["input_scale"].to(device)
    factor = scales["pre_quant_scale"].to(device) if "pre_quant_scale" in scales else None

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        x = inputs[0].float()
        return rounding(x if factor is None else x * factor, scale).to(inputs[0].dtype)

    return hook


def decode_weight(weight: Tensor, scales: dict[str, Tensor]) -> Tensor:
    """The weight [O, I] in fp32. nvfp4 has two codes a byte, the lower half first, [O, I / 2]."""
    if "weight_scale_inv" in scales:
        return block_fp8.decode(weight, scales["weight_scale_inv"])
    scale = scales["weight_scale"].float()
    if weight.dtype == torch.uint8:
        code_OI = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).long()
        value_OI = torch.cat([_E2M1, -_E2M1]).to(weight.device)[code_OI]
        return value_OI * (scale * scales["weight_scale_2"]).repeat_interleave(_GROUP, dim=1)
    return weight.float() * (scale[:, None] if scale.dim() == 1 else scale)


def round_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Round to the nearest multiple of `scale` by an E4M3 number; beyond 448 it saturates."""
    code = (x / scale).clamp(-block_fp8.LARGEST, block_fp8.LARGEST).to(torch.float8_e4m3fn)
    return code.float() * scale


def round_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Round to the nearest integer multiple of `scale` in [-128, 127]."""
    return (x / scale).round().clamp(-128, 127) * scale


def round_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """E2M1 in groups of 16 of the last axis, each scaled by an E4M3 multiple of `scale`."""
    group_G16 = x.unflatten(-1, (-1, _GROUP))
    largest = group_G16.abs().amax(-1, keepdim=True)
    factor = (largest / (_E2M1_MAX * scale)).clamp(2**-9, block_fp8.LARGEST)
    own = factor.to(torch.float8_e4m3fn).float() * scale
    size = (group_G16 / own).abs().clamp(max=_E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # E2M1's spacing
    return ((size / step).round() * step * own * group_G16.sign()).flatten(-2)


# By the dtype that a quantised weight is stored in.
_ROUND: dict[torch.dtype, Rounding] = {
    torch.float8_e4m3fn: round_fp8,
    torch.int8: round_int8,
    torch.uint8: round_nvfp4,
}


@dataclass(frozen=True)
class QuantizationError:
    """Means over `positions` (KL, agreement in [0, 1]) and `next_tokens` (surprisal), in nats."""

    positions: int
    next_tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    surprisal_original: float
    surprisal_shift_mean: float
    surprisal_shift_mean_abs: float
    top1_agreement: float


@torch.no_grad()
def measure(
    original: PreTrainedModel, quantized: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> QuantizationError:
    """Run both models over each sequence alone, unpadded. UserError: logits that are not finite.

    Memory beyond the two models: two times S x V logits in the models' dtype, and four chunks of 64
    MiB.
    """
    parts = []
    for token_ids in sequences:
        token_1S = torch.tensor([token_ids], device=original.device)
        pair = [model(token_1S, use_cache=False).logits[0] for model in (original, quantized)]
        for logits_SV, which in zip(pair, ("the original", "the quantised"), strict=True):
            if not torch.isfinite(logits_SV).all():
                raise UserError(
                    f"{which} model's logits are not finite; check the checkpoint's weights"
                )
        parts.append(compare(pair[0], pair[1], token_1S[0]))
    kl, agreement, surprisal, shift = (
        torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)
    )
    return QuantizationError(
        positions=kl.size,
        next_tokens=shift.size,
        kl_mean=float(kl.mean()),
        kl_p99=float(numpy.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        surprisal_original=float(surprisal.mean()),
        surprisal_shift_mean=float(shift.mean()),
        surprisal_shift_mean_abs=float(numpy.abs(shift).mean()),
        top1_agreement=float(agreement.mean()),
    )


def compare(
    original_SV: Tensor, quantized_SV: Tensor, token_S: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL [S], top-1 agreement [S], the original's surprisal of the next token [S - 1],
    its shift [S - 1]; all fp64.
    """
    rows = max(1, _CHUNK_BYTES // (8 * original_SV.shape[1]))
    next_S = torch.cat([token_S[1:], token_S[:1]])  # the last position's entry is cut off below
    columns = []
    for start in range(0, len(token_S), rows):
        here = slice(start, start + rows)
        p_nv, q_nv = (
            torch.log_softmax(logits[here].double(), 1) for logits in (original_SV, quantized_SV)
        )
        kl_n = (p_nv.exp() * (p_nv - q_nv)).sum(1)
        agreement_n = (p_nv.argmax(1) == q_nv.argmax(1)).double()
        actual_n1 = next_S[here, None]
        log_p_n, log_q_n = (log.gather(1, actual_n1).squeeze(1) for log in (p_nv, q_nv))
        columns.append((kl_n, agreement_n, -log_p_n, log_p_n - log_q_n))
    kl_S, agreement_S, surprisal_S, shift_S = (
        torch.cat(column) for column in zip(*columns, strict=True)
    )
    return kl_S, agreement_S, surprisal_S[:-1], shift_S[:-1]
