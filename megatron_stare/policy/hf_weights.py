"""Weights in and out by HF name, one parameter at a time: memory is bounded by the largest tensor."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from megatron_stare.config import UserError
from megatron_stare.policy.hf_names import Entry, from_shards, name_table, to_shards
from megatron_stare.policy.topology import Topology

# Buffers that old checkpoints carry and no model needs.
_DERIVED = ("rotary_emb.inv_freq",)


class Checkpoint:
    """The safetensors of an HF directory, read tensor by tensor. UserError: no files, or a file that is damaged."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        files = sorted(Path(directory).glob("*.safetensors"))
        if not files:
            raise UserError(f"{directory}: no *.safetensors there; convert the checkpoint to safetensors first")
        self.files: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as content:
                    self.files |= dict.fromkeys(content.keys(), file)
            except (SafetensorError, OSError, struct.error, json.JSONDecodeError) as error:
                raise UserError(f"{file} is damaged ({str(error).splitlines()[0]}); fetch it again") from None

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`. UserError: not in the files, or not of the shape that config.json implies."""
        if name not in self.files:
            raise UserError(
                f"{self.directory}: tensor {name} is missing; config.json and weights do not belong together"
            )
        with safe_open(self.files[name], framework="pt") as content:
            tensor = content.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{self.files[name]}: {name} has shape {tuple(tensor.shape)} but config.json implies {shape}; "
                "correct config.json or take the weights that belong to it"
            )
        return tensor

    def check_all_used(self, names: set[str], tied: bool) -> None:
        """UserError for any tensor that the model has no place for."""
        for name in sorted(self.files.keys() - names):
            if not (name.endswith(_DERIVED) or (tied and name == "lm_head.weight")):
                raise UserError(
                    f"{self.files[name]}: tensor {name} has no place in the model that config.json describes; "
                    "correct config.json (tie_word_embeddings, num_hidden_layers, model_type)"
                )


def load_hf(chunks: list[nn.Module], directory: str, hf: PretrainedConfig, topology: Topology) -> None:
    """Fill this rank's shard of every parameter from an HF directory; every tensor must be there and be used."""
    checkpoint = Checkpoint(directory)
    parameters = named_parameters(chunks)
    table = name_table(hf)
    checkpoint.check_all_used({name for entry in table for name in entry.hf}, hf.tie_word_embeddings)
    if hf.tie_word_embeddings:  # the last pipeline stage holds a second copy
        table.append(dataclasses.replace(table[0], megatron="output_layer.weight"))
    for entry in table:
        parameter = parameters.pop(_megatron_name(entry, parameters), None)
        if parameter is None:
            continue  # another stage's
        tensors = [checkpoint.read(name, shape) for name, shape in zip(entry.hf, entry.shapes, strict=True)]
        shard = to_shards(entry, tensors, hf, topology.tensor_size)[topology.tensor_rank]
        with torch.no_grad():
            parameter.copy_(shard)
    if parameters:
        raise RuntimeError(f"the name table fills no {', '.join(sorted(parameters))}: a defect of hf_names.py")


@dataclass(frozen=True)
class HFWeights:
    """(HF name, whole tensor) of every weight as it is when it is passed; may be iterated again and again.

    Collective: all ranks iterate together, to the end.
    """

    chunks: list[nn.Module]
    hf: PretrainedConfig
    topology: Topology

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iterate_hf(self.chunks, self.hf, self.topology)


def iterate_hf(chunks: list[nn.Module], hf: PretrainedConfig, topology: Topology) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every weight, on every rank. Collective: all ranks iterate together.

    Shards are gathered over tensor-parallel ranks where a parameter lives, then sent to the other pipeline stages.
    """
    parameters = named_parameters(chunks)
    table = name_table(hf)
    held = [_megatron_name(entry, parameters) in parameters for entry in table]
    stages: list[list[bool]] = [held]
    if topology.pipeline_size > 1:
        stages = [[] for _ in range(topology.pipeline_size)]
        dist.all_gather_object(stages, held, group=topology.pipeline)
    for number, entry in enumerate(table):
        owner = next(stage for stage, holds in enumerate(stages) if holds[number])
        tensors = None
        if owner == topology.pipeline_rank:
            shard = parameters[_megatron_name(entry, parameters)].detach()
            tensors = from_shards(entry, _gathered(shard, entry, topology), hf)
        yield from zip(entry.hf, _from_stage(owner, tensors, entry, chunks, topology), strict=True)


def named_parameters(chunks: list[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters under whole-model names: layers numbered as in the whole model, from 0."""
    named = {}
    for chunk in chunks:
        layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
        for name, parameter in chunk.named_parameters():
            prefix, marker, rest = name.partition("decoder.layers.")
            if marker:
                local, _, rest = rest.partition(".")
                name = f"{prefix}{marker}{layers[int(local)].layer_number - 1}.{rest}"
            named[name] = parameter
    return named


def _gathered(shard: Tensor, entry: Entry, topology: Topology) -> list[Tensor]:
    """Every tensor-parallel rank's shard."""
    if topology.tensor_size == 1 or entry.layout == "replicated":
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(topology.tensor_size)]
    dist.all_gather(shards, shard.contiguous(), group=topology.tensor)
    return shards


def _from_stage(
    owner: int, tensors: list[Tensor] | None, entry: Entry, chunks: list[nn.Module], topology: Topology
) -> list[Tensor]:
    """The owner stage's whole tensors on every stage."""
    if topology.pipeline_size == 1:
        assert tensors is not None
        return tensors
    like = next(chunks[0].parameters())
    received = []
    for number, shape in enumerate(entry.shapes):
        tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        if tensors is not None:
            tensor.copy_(tensors[number])
        dist.broadcast(tensor, dist.get_global_rank(topology.pipeline, owner), group=topology.pipeline)
        received.append(tensor)
    return received


# TransformerEngine fuses a norm into the linear layer behind it and names its weight after that layer.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def _megatron_name(entry: Entry, parameters: dict[str, nn.Parameter]) -> str:
    """The parameter's name in this model: as in the table, or TransformerEngine's for a fused norm."""
    if entry.megatron in parameters:
        return entry.megatron
    for plain, fused in _FUSED_NORMS.items():
        if entry.megatron.endswith(plain):
            return entry.megatron.removesuffix(plain) + fused
    return entry.megatron
