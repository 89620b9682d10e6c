"""A checkpoint whose experts are FP8 in blocks of 128 x 128, all else as it was.

What checkpoints like Qwen3-30B-A3B-FP8 are: an expert's matrix in E4M3 with its scales beside it as
`weight_scale_inv`, and a `quantization_config` that names what is left as it was. Of a policy that
trains under policy.expert_quantization=fp8 it holds the very weights (huggingface/block_fp8.py). No
calibration, no model in memory: tensor by tensor, file by file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatron_stare.policy.huggingface import block_fp8
from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.huggingface.checkpoint import Checkpoint
from megatron_stare.policy.huggingface.names import name_table


def quantize_experts(source: Path, target: Path, hf: PretrainedConfig) -> None:
    """Write config.json and weights of `source` to the directory `target`."""
    checkpoint, experts = Checkpoint(str(source)), expert_matrices(hf)
    layout = hf_files.layout_of(source)
    assert layout is not None, "its tensors were read"
    sizes, files = dict[str, int](), []
    for file in layout.files:
        shapes = dict(_shapes(file.tensors, checkpoint, experts))
        infos = hf_files.describe(shapes, tuple(shapes))
        tensors = _tensors(file.tensors, checkpoint, experts)
        hf_files.write_file(target / file.name, tensors, infos, file.metadata)
        sizes |= {info.name: info.end - info.begin for info in infos}
        files.append(hf_files.FileLayout(file.name, tuple(shapes), file.metadata))
    hf_files.write_index(target, hf_files.Layout(tuple(files), layout.index), sizes)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(hf)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def expert_matrices(hf: PretrainedConfig) -> set[str]:
    """Hugging Face names of the routed experts' weights."""
    return {name for entry in name_table(hf) if entry.expert is not None for name in entry.hf}


def quantization_config(hf: PretrainedConfig) -> dict[str, object]:
    """What config.json says of it; inputs are rounded by the server, by scales of their own."""
    matrices = [name for entry in name_table(hf) if len(entry.shapes[0]) == 2 for name in entry.hf]
    experts = expert_matrices(hf)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block_fp8.BLOCK, block_fp8.BLOCK],
        "modules_to_not_convert": [
            name.removesuffix(".weight") for name in matrices if name not in experts
        ],
    }


def _shapes(
    names: tuple[str, ...], checkpoint: Checkpoint, experts: set[str]
) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    for name in names:
        info = checkpoint.infos[name]
        if name in experts:
            blocks = tuple(-(-size // block_fp8.BLOCK) for size in info.shape)
            yield name, (info.shape, torch.float8_e4m3fn)
            yield f"{name}_scale_inv", (blocks, torch.float32)
        else:
            yield name, (info.shape, hf_files.DTYPES[info.code])


def _tensors(names: tuple[str, ...], checkpoint: Checkpoint, experts: set[str]) -> Iterator[Tensor]:
    for name in names:
        tensor = checkpoint.read(name, checkpoint.infos[name].shape)
        yield from block_fp8.encode(tensor) if name in experts else (tensor,)
