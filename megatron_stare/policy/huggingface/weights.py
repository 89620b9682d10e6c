"""Weights in and out by HF name, one by one: memory is bounded by the largest tensor."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
        size, rank = _tensor_place(entry, topology)
        with torch.no_grad():
            parameter.copy_(checkpoint.shard(entry, size, rank))
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
        if self.onto_first:
            return self._onto_first()
        parameters, table = named_parameters(self.chunks), name_table(self.hf)
        shards = {name: partial(self._exported, each) for name, each in parameters.items()}
        return whole_tensors(table, shards, next(self.chunks[0].parameters()), self.topology)

    def _onto_first(self) -> Iterator[tuple[str, Tensor]]:
        """Each shard travels once, from the rank of rank 0's model replica that holds it; no other
        rank holds more than its own shards.
        """
        parameters, topology = named_parameters(self.chunks), self.topology
        table, like = name_table(self.hf), next(self.chunks[0].parameters())
        if 0 not in dist.get_process_group_ranks(topology.groups.tp_ep_pp):
            return
        for entry, holders in zip(table, _holders(table, parameters, topology), strict=True):
            senders = _senders(entry, holders, topology)
            own = parameters.get(_megatron_name(entry, parameters))
            if topology.rank in senders and not topology.is_first:
                assert own is not None, "it said that it holds it"
                _exchanged([dist.P2POp(dist.isend, self._exported(own).contiguous(), 0)])
            if not topology.is_first:
                continue
            shards, arriving = [], []
            for place, sender in enumerate(senders):
                if sender == topology.rank:
                    assert own is not None, "it said that it holds it"
                    shards.append(self._exported(own))
                    continue
                shape, dtype = _shard_shape(entry, len(senders), place), entry.dtype or like.dtype
                shards.append(torch.empty(shape, dtype=dtype, device=like.device))
                arriving.append(dist.P2POp(dist.irecv, shards[-1], sender))
            _exchanged(arriving)
            yield from zip(entry.hf, from_shards(entry, shards), strict=True)

    def _exported(self, parameter: Tensor) -> Tensor:
        """This rank's shard as others receive it."""
        adapter = getattr(parameter, "adapter", None) if self.merged else None
        return parameter.detach() if adapter is None else adapter.merged(parameter.detach())


def whole_tensors(
    table: list[ParameterMapping],
    shards: Mapping[str, Callable[[], Tensor]],
    like: Tensor,
    topology: Topology,
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of every entry, on every rank, from `shards`, those of this rank by
    their names in the model; received in the dtype of `like`. Collective.

    Shards are gathered over the tensor-parallel ranks that hold a parameter, then sent to the other
    expert-parallel ranks of its stage, then to the other pipeline stages.
    """
    for entry, holders in zip(table, _holders(table, shards, topology), strict=True):
        first, tensors = holders[0], None
        if first.stage == topology.pipeline_rank:
            shard = shards.get(_megatron_name(entry, shards))
            if shard is not None:
                tensors = from_shards(entry, _gathered(shard(), entry, topology))
            if entry.expert is not None:
                tensors = _broadcast(tensors, first.expert_rank, topology.expert, entry, like)
        tensors = _broadcast(tensors, first.stage, topology.pipeline, entry, like)
        yield from zip(entry.hf, tensors, strict=True)


def _exchanged(operations: list[dist.P2POp]) -> None:
    """Send and receive, and wait. As a batch, over NCCL the world's one communicator carries them;
    a single send would make one of its own for every pair of ranks.
    """
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _shard_shape(entry: ParameterMapping, tensor_size: int, rank: int) -> torch.Size:
    whole = [torch.empty(shape, device="meta") for shape in entry.shapes]
    return to_shard(entry, whole, tensor_size, rank).shape


class _Holder(NamedTuple):
    """A rank that holds a parameter, and which tensor-parallel shard of it: of a dense one, or of
    an expert's.
    """

    rank: int
    stage: int
    expert_rank: int
    shard: int
    expert_shard: int


def _holders(
    table: list[ParameterMapping], held_names: Container[str], topology: Topology
) -> Iterator[list[_Holder]]:
    """The ranks that hold each entry, in rank order, among those that together hold one copy of the
    model. Collective over these.
    """
    held = [_megatron_name(entry, held_names) in held_names for entry in table]
    shards = (dist.get_rank(topology.tensor), dist.get_rank(topology.expert_tensor))
    own = _Holder(topology.rank, topology.pipeline_rank, topology.expert_rank, *shards)
    everyone = sorted(gather_values((own, held), topology.groups.tp_ep_pp))
    for number in range(len(table)):
        yield [holder for holder, holds in everyone if holds[number]]


def _senders(entry: ParameterMapping, holders: Sequence[_Holder], topology: Topology) -> list[int]:
    """The rank that sends each shard, in tensor-parallel order; rank 0 where it can."""
    found: dict[int, int] = {}
    for each in holders:
        found.setdefault(each.shard if entry.expert is None else each.expert_shard, each.rank)
    size, _ = _tensor_place(entry, topology)
    return [found[place] for place in range(1 if entry.layout == "replicated" else size)]


def _tensor_group(entry: ParameterMapping, topology: Topology) -> ProcessGroup:
    """The ranks over which the entry's layout splits it."""
    return topology.tensor if entry.expert is None else topology.expert_tensor


def _tensor_place(entry: ParameterMapping, topology: Topology) -> tuple[int, int]:
    """The number of those ranks, and this rank's place among them."""
    group = _tensor_group(entry, topology)
    return dist.get_world_size(group), dist.get_rank(group)


def content_fingerprint(chunks: list[nn.Module], hf: PretrainedConfig, topology: Topology) -> str:
    """16 hex digits of every weight's name, places and values without adapters, the same under
    every parallel layout. Collective.
    """
    parameters = named_parameters(chunks)
    own = []
    for entry in name_table(hf):
        name = _megatron_name(entry, parameters)
        if name in parameters:
            size, rank = _tensor_place(entry, topology)
            shard = 0 if entry.layout == "replicated" else rank
            value = content_hash(entry, parameters[name], size, rank)
            own.append((entry.megatron, shard, value))
    return content_digest(set().union(*topology.gather(own)))


def content_digest(hashes: Iterable[tuple[str, int, int]]) -> str:
    """The fingerprint of (parameter's name, shard, content_hash) of all shards."""
    total: dict[str, int] = {}
    for name, _, value in hashes:
        total[name] = (total.get(name, 0) + value) % (1 << 64)
    return digest(json.dumps(sorted(total.items())))[:16]


def content_hash(
    entry: ParameterMapping, shard: Tensor, tensor_size: int = 1, rank: int = 0
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
        rows = to_shard(entry, places, tensor_size, rank)
        rows = rows[rows > 0]
    return int(bit_hash(shard[: len(rows)], places=rows.to(shard.device)))


def weights_of(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Its parameters, then its buffers that a checkpoint holds: the biases of sigmoid routers."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith("router.expert_bias"):
            yield name, buffer


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
                rest = _with_global_expert(rest, layer)
                name = f"{prefix}{marker}{layer.layer_number - 1}.{rest}"
            named[name] = parameter
    return named


# An expert's parameter in a layer: a module per expert, or TransformerEngine's list per matrix.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(.+)|(linear_fc\d)\.weight(\d+))")


def _with_global_expert(name: str, layer: Any) -> str:
    found = _EXPERT.fullmatch(name)
    if not found:
        return name
    local, rest, grouped, number = found.groups()
    expert = layer.mlp.local_expert_indices[int(local or number)]
    return f"mlp.experts.local_experts.{expert}.{rest or f'{grouped}.weight'}"


def _gathered(shard: Tensor, entry: ParameterMapping, topology: Topology) -> list[Tensor]:
    """The shard of every rank that has one."""
    group = _tensor_group(entry, topology)
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


# TransformerEngine fuses a norm into the next linear layer, whose name its weight then has.
_FUSED_NORMS = (
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("input_layernorm.weight", "self_attention.in_proj.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
)


def _megatron_name(entry: ParameterMapping, parameters: Container[str]) -> str:
    """The parameter's name in this model: the table's, or TransformerEngine's of a fused norm."""
    if entry.megatron in parameters:
        return entry.megatron
    for plain, fused in _FUSED_NORMS:
        name = entry.megatron.removesuffix(plain) + fused
        if entry.megatron.endswith(plain) and name in parameters:
            return name
    return entry.megatron
