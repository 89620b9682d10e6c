"""Proof that two checkpoints, one Hugging Face and one Megatron, are the same model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import build, model_state
from megatron_stare.policy.conversion import megatron_files
from megatron_stare.policy.huggingface.checkpoint import Checkpoint
from megatron_stare.policy.huggingface.names import from_shards, name_table
from megatron_stare.policy.topology import Topology

# Both models run in fp32; what their orders of summation leave, as a part of the largest logit.
TOLERANCE = 1e-4


class LogitDifference(NamedTuple):
    """Over all positions: their number, the largest |difference|, the largest |logit|,
    how often the argmax agrees.
    """

    positions: int
    difference: float
    scale: float
    agreement: float

    @property
    def close(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= TOLERANCE * max(1.0, self.scale)


def compare_tensors(
    hf_directory: Path, megatron: Path, topology: Topology, lossy_is_hf: bool
) -> tuple[int, list[str]]:
    """(tensors compared, names of those that differ in any byte), tensor by tensor.

    Where a conversion changed the dtype, the source is rounded as it was: `lossy_is_hf` names the
    side it went to.
    """
    hf = build.read_hf_config(str(hf_directory))
    checkpoint = Checkpoint(str(hf_directory))
    reader = megatron_files.CheckpointReader(megatron, hf, topology)
    different, compared = [], 0
    for entry in name_table(hf):
        theirs = from_shards(entry, [reader.read(entry.megatron)])
        for (name, shape), tensor in zip(entry.tensors, theirs, strict=True):
            stored = checkpoint.read(name, shape)
            if lossy_is_hf:
                tensor = tensor.to(stored.dtype)
            else:
                stored = stored.to(tensor.dtype)
            compared += 1
            if not torch.equal(_bytes(tensor), _bytes(stored)):
                different.append(name)
    return compared, different


def compare_logits(
    hf_directory: Path,
    megatron: Path,
    topology: Topology,
    prompts: list[list[int]],
    dtype: torch.dtype | None = None,
) -> LogitDifference:
    """Both models in fp32 on the prompts' ids, transformers' and Megatron's.
    Holds both models in memory.

    With a `dtype` both models' weights are rounded to it first: what a conversion to it did to one
    of them.
    """
    hf = build.read_hf_config(str(hf_directory))
    model = _of_transformers(hf_directory, hf).eval()
    (chunk,) = build.build_model(hf, PolicyConfig(), topology)
    model_state.into_model([chunk], megatron, topology)
    chunk.eval()
    _round(model, dtype)
    _round(chunk, dtype)
    positions = agreeing = 0
    difference = scale = 0.0
    with torch.no_grad():
        for ids in prompts:
            ids_BS = torch.tensor([ids], device=next(chunk.parameters()).device)
            position_BS = torch.arange(len(ids), device=ids_BS.device)[None]
            ours = chunk(ids_BS, position_BS, None)[0, :, : hf.vocab_size].float().cpu()
            theirs = model(ids_BS.cpu()).logits[0].float()
            positions += len(ids)
            agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            difference = max(difference, float((ours - theirs).abs().max()))
            scale = max(scale, float(theirs.abs().max()))
    return LogitDifference(positions, difference, scale, agreeing / max(1, positions))


def _of_transformers(directory: Path, hf: PretrainedConfig) -> PreTrainedModel:
    """The model of transformers in fp32. It gets FP8 weights as we read them: its own reading wants
    whole blocks.
    """
    if getattr(hf, "quantization_config", None) is None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config, checkpoint = copy.deepcopy(hf), Checkpoint(str(directory))
    del config.quantization_config
    tensors = {
        name: checkpoint.read(name, shape).float()
        for entry in name_table(hf)
        for name, shape in entry.tensors
    }
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)].from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32
    )


def _round(model: nn.Module, dtype: torch.dtype | None) -> None:
    with torch.no_grad():
        for parameter in model.parameters() if dtype is not None else ():
            parameter.copy_(parameter.to(dtype))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
