"""Weights in and out by HF name, one parameter at a time:
memory is bounded by the largest tensor.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from megatron_stare.numerics.hashes import bit_hash
from megatron_stare.policy.huggingface.checkpoint import Checkpoint, check_agreement
from megatron_stare.policy.huggingface.names import (
    ParameterMapping,
    from_shards,
    name_table,
    to_shard,
)
from megatron_stare.policy.topology import Topology, gather_values
from megatron_stare.system import digest


def load_hf(
    chunks: list[nn.Module], directory: str, hf: PretrainedConfig, topology: Topology
) -> None:
    """Fill this rank's shard of every parameter from an HF directory, of which it reads that shard
    alone; every tensor must be there and be used.
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
        sources = [
            checkpoint.stored(name, shape)
            for name, shape in zip(entry.hf, entry.shapes, strict=True)
        ]
        group = _tensor_group(entry, topology)
        with torch.no_grad():
            parameter.copy_(
                to_shard(entry, sources, hf, dist.get_world_size(group), dist.get_rank(group))
            )
    if parameters:
        raise RuntimeError(
            f"the name table fills no {', '.join(sorted(parameters))}: "
            "a defect of huggingface/names.py"
        )


@dataclass(frozen=True)
class HFWeights:
    """(HF name, whole tensor) of every weight as it is when it is passed;
    may be iterated again and again.

    Collective: all ranks iterate together, to the end. With `onto_first` only rank 0 is given them;
    the others send it their shards and see none. `merged`: with the adapters, where there are any;
    else their base.
    """

    chunks: list[nn.Module]
    hf: PretrainedConfig
    topology: Topology
    onto_first: bool = False
    merged: bool = True

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        iterate = iterate_onto_first if self.onto_first else iterate_hf
        return iterate(self.chunks, self.hf, self.topology, merged=self.merged)


def iterate_hf(
    chunks: list[nn.Module], hf: PretrainedConfig, topology: Topology, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every weight, on every rank. Collective:
    all ranks iterate together.

    Shards are gathered over the tensor-parallel ranks that hold a parameter, then sent to the other
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
                exported, group = _exported(shard, merged), _tensor_group(entry, topology)
                tensors = from_shards(entry, _gathered(exported, group, entry), hf)
            if entry.expert is not None:
                tensors = _broadcast(tensors, expert_rank, topology.expert, entry, like)
        yield from zip(
            entry.hf, _broadcast(tensors, stage, topology.pipeline, entry, like), strict=True
        )


def iterate_onto_first(
    chunks: list[nn.Module], hf: PretrainedConfig, topology: Topology, *, merged: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every weight, on rank 0 alone. Collective:
    all ranks iterate together, to the end.

    Each shard travels once, from the rank of rank 0's model replica that holds it; no other rank
    holds more than its own shards.
    """
    parameters = named_parameters(chunks)
    table = name_table(hf)
    like = next(chunks[0].parameters())
    for entry, senders in zip(table, _senders(table, parameters, topology), strict=True):
        own = parameters.get(_megatron_name(entry, parameters))
        if topology.rank in senders and not topology.is_first:
            assert own is not None, "it said that it holds it"
            _exchanged([dist.P2POp(dist.isend, _exported(own, merged).contiguous(), 0)])
        if not topology.is_first:
            continue
        shards, arriving = [], []
        for place, sender in enumerate(senders):
            if sender == topology.rank:
                assert own is not None, "it said that it holds it"
                shards.append(_exported(own, merged))
                continue
            shape = _shard_shape(entry, hf, len(senders), place)
            shards.append(torch.empty(shape, dtype=entry.dtype or like.dtype, device=like.device))
            arriving.append(dist.P2POp(dist.irecv, shards[-1], sender))
        _exchanged(arriving)
        yield from zip(entry.hf, from_shards(entry, shards, hf), strict=True)


def _exchanged(operations: list[dist.P2POp]) -> None:
    """Send and receive, and wait. As a batch, over NCCL the world's one communicator carries them;
    a single send would make one of its own for every pair of ranks.
    """
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _shard_shape(
    entry: ParameterMapping, hf: PretrainedConfig, tensor_size: int, rank: int
) -> torch.Size:
    whole = [torch.empty(shape, device="meta") for shape in entry.shapes]
    return to_shard(entry, whole, hf, tensor_size, rank).shape


def _senders(
    table: list[ParameterMapping], parameters: dict[str, Tensor], topology: Topology
) -> Iterator[list[int]]:
    """The rank that sends each shard of each entry, in tensor-parallel order; rank 0 where it can.
    No rank sends on ranks of other model replicas than rank 0's.
    """
    held = [_megatron_name(entry, parameters) in parameters for entry in table]
    places = (dist.get_rank(topology.tensor), dist.get_rank(topology.expert_tensor))
    group = topology.groups.tp_ep_pp  # the ranks that together hold one copy of every expert
    everyone = gather_values((topology.rank, places, held), group)
    if all(rank for rank, _, _ in everyone):
        yield from ([] for _ in table)
        return
    for number, entry in enumerate(table):
        size = dist.get_world_size(_tensor_group(entry, topology))
        holders: dict[int, int] = {}
        for rank, (dense, expert), holds in sorted(everyone):
            if holds[number]:
                holders.setdefault(dense if entry.expert is None else expert, rank)
        count = 1 if entry.layout == "replicated" else size
        yield [holders[place] for place in range(count)]


def _owners(
    table: list[ParameterMapping], parameters: dict[str, Tensor], topology: Topology
) -> Iterator[tuple[int, int]]:
    """Pipeline stage and expert-parallel rank of the first rank that holds each entry."""
    held = [_megatron_name(entry, parameters) in parameters for entry in table]
    group = topology.groups.tp_ep_pp  # the ranks that together hold one copy of every expert
    everyone = gather_values((topology.pipeline_rank, topology.expert_rank, held), group)
    for number in range(len(table)):
        yield next((stage, expert_rank) for stage, expert_rank, holds in everyone if holds[number])


def _tensor_group(entry: ParameterMapping, topology: Topology) -> ProcessGroup:
    """The ranks over which the entry's layout splits it."""
    return topology.tensor if entry.expert is None else topology.expert_tensor


def _exported(parameter: Tensor, merged: bool) -> Tensor:
    """This rank's shard as others receive it; `merged`: with its adapter, where it has one."""
    adapter = getattr(parameter, "adapter", None) if merged else None
    return parameter.detach() if adapter is None else adapter.merged(parameter.detach())


def content_fingerprint(chunks: list[nn.Module], hf: PretrainedConfig, topology: Topology) -> str:
    """16 hex digits of every weight's name, places and values without adapters, the same under
    every parallel layout. Collective.
    """
    parameters = named_parameters(chunks)
    own = []
    for entry in name_table(hf):
        name = _megatron_name(entry, parameters)
        if name in parameters:
            group = _tensor_group(entry, topology)
            size, rank = dist.get_world_size(group), dist.get_rank(group)
            shard = 0 if entry.layout == "replicated" else rank
            value = content_hash(entry, parameters[name], hf, size, rank)
            own.append((entry.megatron, shard, value))
    return content_digest(set().union(*topology.gather(own)))


def content_digest(hashes: Iterable[tuple[str, int, int]]) -> str:
    """The fingerprint of (parameter's name, shard, content_hash) of all shards."""
    total: dict[str, int] = {}
    for name, _, value in hashes:
        total[name] = (total.get(name, 0) + value) % (1 << 64)
    return digest(json.dumps(sorted(total.items())))[:16]


def content_hash(
    entry: ParameterMapping, shard: Tensor, hf: PretrainedConfig, tensor_size: int, rank: int
) -> int:
    """A shard's hash, in which every value counts with its place in the HF tensors. Those of all
    shards add up to the same number for every `tensor_size`; padding of the vocabulary adds 0.
    """
    places, end = [], 0
    for shape in entry.shapes:  # of each HF tensor's rows, in elements, from 1
        width = shape[1] if len(shape) > 1 else 1
        places.append(torch.arange(shape[0]).mul_(width).add_(end + 1))
        end += shape[0] * width
    if entry.layout == "columns":
        (first,) = places
        rows = first + rank * (entry.shapes[0][1] // tensor_size)
    else:
        rows = to_shard(entry, places, hf, tensor_size, rank)
        rows = rows[rows > 0]
    return int(bit_hash(shard[: len(rows)], places=rows.to(shard.device)))


def weights_of(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Its parameters, then its buffers that a checkpoint holds: the biases of sigmoid routers."""
    yield from chunk.named_parameters()
    yield from ((name, each) for name, each in chunk.named_buffers() if name.endswith(_BUFFER))


_BUFFER = "router.expert_bias"


def named_parameters(chunks: list[nn.Module]) -> dict[str, Tensor]:
    """This rank's weights under whole-model names:
    layers and experts numbered as in the whole model, from 0. Adapters are not among them.
    """
    named = {}
    for chunk in chunks:
        layers: Any = chunk.decoder.layers  # type: ignore[union-attr]
        for name, parameter in weights_of(chunk):
            if name.startswith("adapters."):
                continue
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


def _gathered(shard: Tensor, group: ProcessGroup, entry: ParameterMapping) -> list[Tensor]:
    """The shard of every rank of the group."""
    if dist.get_world_size(group) == 1 or entry.layout == "replicated":
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def _broadcast(
    tensors: list[Tensor] | None,
    owner: int,
    group: ProcessGroup,
    entry: ParameterMapping,
    like: Tensor,
) -> list[Tensor]:
    """The whole tensors that the group's rank `owner` has, on every rank of the group."""
    if dist.get_world_size(group) == 1:
        assert tensors is not None
        return tensors
    received = []
    for number, shape in enumerate(entry.shapes):
        tensor = torch.empty(shape, dtype=entry.dtype or like.dtype, device=like.device)
        if tensors is not None:
            tensor.copy_(tensors[number])
        dist.broadcast(tensor, dist.get_global_rank(group, owner), group=group)
        received.append(tensor)
    return received


# TransformerEngine fuses a norm into the next linear layer and names its weight after that
# layer.
_FUSED_NORMS = (
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("input_layernorm.weight", "self_attention.in_proj.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
)


def _megatron_name(entry: ParameterMapping, parameters: dict[str, Tensor]) -> str:
    """The parameter's name in this model: as in the table,
    or TransformerEngine's for a fused norm.
    """
    if entry.megatron in parameters:
        return entry.megatron
    for plain, fused in _FUSED_NORMS:
        name = entry.megatron.removesuffix(plain) + fused
        if entry.megatron.endswith(plain) and name in parameters:
            return name
    return entry.megatron
