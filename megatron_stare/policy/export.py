"""Write the policy as a Hugging Face directory that transformers and SGLang load."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from megatron_stare.policy.huggingface import files as hf_files
from megatron_stare.policy.huggingface.names import name_table
from megatron_stare.policy.model import PolicyModel
from megatron_stare.system import atomic_directory


def export_hf(model: PolicyModel, source: Path, directory: Path) -> None:
    """Weights in one safetensors file beside config and tokenizer files of `source`. Collective.

    The directory appears whole: it is written under a temporary name and renamed. Tensors are
    written as they come: rank 0 holds one at a time, the other ranks none but their shards.
    """
    stream = iter(dataclasses.replace(model.weights(), onto_first=True))
    try:
        if model.topology.is_first:
            _write(model, stream, source, directory)
    finally:
        for _ in stream:  # the other ranks send to the end, whatever failed
            pass


def _write(
    model: PolicyModel, stream: Iterator[tuple[str, Tensor]], source: Path, directory: Path
) -> None:
    dtype = next(model.chunks[0].parameters()).dtype
    shapes = {
        name: (shape, dtype)
        for entry in name_table(model.hf)
        for name, shape in zip(entry.hf, entry.shapes, strict=True)
    }
    infos = hf_files.describe(shapes, tuple(shapes))
    tensors = (tensor.cpu() for _, tensor in stream)
    with atomic_directory(directory) as temporary:
        hf_files.write_file(temporary / hf_files.SINGLE, tensors, infos, {"format": "pt"})
        shutil.copyfile(source / "config.json", temporary / "config.json")
        hf_files.copy_companions(source, temporary)
        shutil.rmtree(directory, ignore_errors=True)
