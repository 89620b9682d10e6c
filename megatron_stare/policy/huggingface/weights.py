"""Weights in and out by HF name, one parameter at a time:
memory is bounded by the largest tensor.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from megatron_stare.policy.huggingface.checkpoint import Checkpoint, check_agreement
from megatron_stare.policy.huggingface.names import Entry, from_shards, name_table, to_shards
from megatron_stare.policy.topology import Topology, gather_values


def load_hf(
    chunks: list[nn.Module], directory: str, hf: PretrainedConfig, topology: Topology
) -> None:
    """Fill this rank's shard of every parameter from an HF directory;
    every tensor must be there and be used.
    """
    checkpoint = Checkpoint(directory)
    parameters = named_parameters(chunks)
    table = name_table(hf)
    check_agreement(checkpoint, hf)
    if hf.tie_word_embeddings:  # the last pipeline stage holds a second copy
        table.append(dataclasses.replace(table[0], megatron="output_layer.weight"))
    for entry in table:
        parameter = parameters.pop(_megatron_name(entry, parameters), None)
        if parameter is None:
            continue  # another stage's, or another expert-parallel rank's
        tensors = [
            checkpoint.read(name, shape) for name, shape in zip(entry.hf, entry.shapes, strict=True)
        ]
        group = _tensor_group(entry, topology)
        shards = to_shards(entry, tensors, hf, dist.get_world_size(group))
        with torch.no_grad():
            parameter.copy_(shards[dist.get_rank(group)])
    if parameters:
        raise RuntimeError(
            f"the name table fills no {', '.join(sorted(parameters))}: "
            "a defect of huggingface/names.py"
        )


@dataclass(frozen=True)
class HFWeights:
    """(HF name, whole tensor) of every weight as it is when it is passed;
    may be iterated again and again.

    Collective: all ranks iterate together, to the end.
    """

    chunks: list[nn.Module]
    hf: PretrainedConfig
    topology: Topology

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iterate_hf(self.chunks, self.hf, self.topology)


def iterate_hf(
    chunks: list[nn.Module], hf: PretrainedConfig, topology: Topology
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every weight, on every rank. Collective:
    all ranks iterate together.

    Shards are gathered over tensor-parallel ranks where a parameter lives, then sent to the other
    expert-parallel ranks of its stage, then to the other pipeline stages.
    """
    parameters = named_parameters(chunks)
    table = name_table(hf)
    like = next(chunks[0].parameters())
    for entry, (stage, expert_rank) in zip(
        table, _owners(table, parameters, topology), strict=True
    ):
        tensors = None
        if stage == topology.pipeline_rank:
            shard = parameters.get(_megatron_name(entry, parameters))
            if shard is not None:
                tensors = from_shards(
                    entry, _gathered(shard.detach(), _tensor_group(entry, topology), entry), hf
                )
            if entry.expert is not None:
                tensors = _broadcast(tensors, expert_rank, topology.expert, entry, like)
        yield from zip(
            entry.hf, _broadcast(tensors, stage, topology.pipeline, entry, like), strict=True
        )


def _owners(
    table: list[Entry], parameters: dict[str, nn.Parameter], topology: Topology
) -> Iterator[tuple[int, int]]:
    """Pipeline stage and expert-parallel rank of the first rank that holds each entry."""
    held = [_megatron_name(entry, parameters) in parameters for entry in table]
    group = topology.groups.tp_ep_pp  # the ranks that together hold one copy of every expert
    everyone = gather_values((topology.pipeline_rank, topology.expert_rank, held), group)
    for number in range(len(table)):
        yield next((stage, expert_rank) for stage, expert_rank, holds in everyone if holds[number])


def _tensor_group(entry: Entry, topology: Topology) -> ProcessGroup:
    """The ranks over which the entry's layout splits it."""
    return topology.tensor if entry.expert is None else topology.expert_tensor


def named_parameters(chunks: list[nn.Module]) -> dict[str, nn.Parameter]:
    """This rank's parameters under whole-model names:
    layers and experts numbered as in the whole model, from 0.
    """
    named = {}
    for chunk in chunks:
        layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
        for name, parameter in chunk.named_parameters():
            prefix, marker, rest = name.partition("decoder.layers.")
            if marker:
                local, _, rest = rest.partition(".")
                layer = layers[int(local)]
                name = (
                    f"{prefix}{marker}{layer.layer_number - 1}.{_with_global_expert(rest, layer)}"
                )
            named[name] = parameter
    return named


# An expert's parameter inside a layer: one module per expert, or TransformerEngine's tensor list
# per matrix.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(.+)|(linear_fc\d)\.weight(\d+))")


def _with_global_expert(name: str, layer: Any) -> str:
    found = _EXPERT.fullmatch(name)
    if not found:
        return name
    local, rest, grouped, number = found.groups()
    expert = layer.mlp.local_expert_indices[int(local or number)]
    return f"mlp.experts.local_experts.{expert}.{rest or f'{grouped}.weight'}"


def _gathered(shard: Tensor, group: ProcessGroup, entry: Entry) -> list[Tensor]:
    """The shard of every rank of the group."""
    if dist.get_world_size(group) == 1 or entry.layout == "replicated":
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _broadcast(
    tensors: list[Tensor] | None, owner: int, group: ProcessGroup, entry: Entry, like: Tensor
) -> list[Tensor]:
    """The whole tensors that the group's rank `owner` has, on every rank of the group."""
    if dist.get_world_size(group) == 1:
        assert tensors is not None
        return tensors
    received = []
    for number, shape in enumerate(entry.shapes):
        tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        if tensors is not None:
            tensor.copy_(tensors[number])
        dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
        received.append(tensor)
    return received


# TransformerEngine fuses a norm into the linear layer behind it and names its weight after that
# layer.
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def _megatron_name(entry: Entry, parameters: dict[str, nn.Parameter]) -> str:
    """The parameter's name in this model: as in the table,
    or TransformerEngine's for a fused norm.
    """
    if entry.megatron in parameters:
        return entry.megatron
    for plain, fused in _FUSED_NORMS.items():
        if entry.megatron.endswith(plain):
            return entry.megatron.removesuffix(plain) + fused
    return entry.megatron
