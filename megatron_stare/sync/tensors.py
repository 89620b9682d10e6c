"""Weights inside HTTP requests: by value, or as handles to GPU memory that trainer and server share
(sglang.sync_method=tensor).

A bucket travels as one flat tensor of bytes and a table of its contents (SGLang's load_format
"flattened_bucket"), pickled. A server unpickles plain namespaces and torch's own functions only.

A handle to GPU memory opens on its own machine only. So every rank of the trainer holds each bucket
at the same time, and a server gets handles from the ranks of its node: each of its tensor-parallel
ranks from the trainer's rank on the same GPU, if there is one. Rank 0 asks the servers and resumes
when they have copied; until then the bucket stays on all ranks.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
import socket
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_stare.config import SGLangConfig, UserError
from megatron_stare.policy.topology import Node, Topology, this_node
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import results
from megatron_stare.sync.weight_sync import (
    NamedTensors,
    Transport,
    WeightBucket,
    flattened,
    in_buckets,
)

# The index of the device's number among the arguments that rebuild a tensor from a CUDA handle.
_DEVICE_ARGUMENT = 6


class TensorTransport(Transport):
    """One pickle for each tensor-parallel rank of a server: a handle, if the bucket has `contents`;
    else the bucket by value, which is slow for a large model.

    With a handle (CUDA IPC) the server maps the trainer's memory and copies from it; only a table
    of names goes over the network. A server must see the GPU of the memory. No test has a server
    that opens a handle; docs/gpuday_h200.md describes the one that did.
    """

    def __init__(self, pool: SGLangPool, settings: SGLangConfig) -> None:
        self.pool, self.settings = pool, settings
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if settings.colocated and "expandable_segments:True" in os.environ.get(name, ""):
                raise UserError(
                    f"{name} has expandable_segments:True, whose memory colocated servers cannot "
                    "open (sglang.sync_method=tensor); unset it, or set sglang.colocated=false"
                )

    def send(self, bucket: WeightBucket, servers: Sequence[Server], tag: str | None) -> None:
        """Deliver the bucket; returns when every server has copied it."""
        path, timeout = "/update_weights_from_tensor", self.settings.sync_timeout
        contents = bucket.contents
        if not contents:
            value = by_value(bucket.tensors)
            contents = [[value] * server.layout.tensor_size for server in servers]
        answers = []
        for server, of_ranks in zip(servers, contents, strict=True):
            body = {
                "serialized_named_tensors": of_ranks,
                "load_format": "flattened_bucket",
                "flush_cache": tag is not None and not self.pool.keeps_cache,
                "weight_version": tag,
                "selector": "target",
            }
            answers.append(self.pool.run(server.client.update_weights(path, body, timeout)))
        results(answers, timeout)


def table_of(tensors: NamedTensors) -> list[SimpleNamespace]:
    """The position of each tensor in the flattened bucket, as SGLang reads it: name, shape, dtype;
    start_idx, end_idx, numel in bytes.
    """
    table, start = [], 0
    for name, tensor in tensors:
        end = start + tensor.nbytes
        table.append(
            SimpleNamespace(
                name=name,
                shape=list(tensor.shape),
                dtype=tensor.dtype,
                start_idx=start,
                end_idx=end,
                numel=tensor.nbytes,
            )
        )
        start = end
    return table


def by_value(tensors: NamedTensors) -> str:
    """The tensors as one string of a JSON request."""
    return _content(flattened(tensors).cpu(), tensors)


def _content(flat: Tensor, tensors: NamedTensors) -> str:
    """The tensors, whose bytes are `flat`: a handle to memory of a GPU, or their value. Base64."""
    table = table_of(tensors)
    content = pickled_handle(flat, table) if flat.is_cuda else pickled(flat, table)
    return base64.b64encode(content).decode()


def pickled(flat: Tensor, table: list[SimpleNamespace]) -> bytes:
    """The bucket as a plain pickle: the file descriptors of a ForkingPickler, sent over HTTP, would
    end the server.

    Protocol 3: protocol 2 writes bytes with a function that SGLang 0.5.9 refuses, and protocol 4
    names functions in two parts.

    Megatron-Core replaces torch's loader by its own, which servers refuse: torch's name is put
    back. It precedes the tensor's bytes, so that its first occurrence is the right one.
    """
    content = pickle.dumps({"flattened_tensor": flat, "metadata": table}, protocol=3)
    return content.replace(
        _reference(torch.storage._load_from_bytes), b"ctorch.storage\n_load_from_bytes\n", 1
    )


def pickled_handle(flat: Tensor, table: list[SimpleNamespace]) -> bytes:
    """The bucket as a handle to its GPU memory, which must stay until the server has answered."""
    content = io.BytesIO()
    _HandlePickler(content, protocol=3).dump({"flattened_tensor": flat, "metadata": table})
    return content.getvalue()


class _HandlePickler(pickle.Pickler):
    """Writes CUDA tensors as handles, with the UUID of their device: the server may number devices
    differently.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        before, after = arguments[:_DEVICE_ARGUMENT], arguments[_DEVICE_ARGUMENT + 1 :]
        return rebuild, (*before, uuid, *after)


def _reference(function: Any) -> bytes:
    """The name of a function in protocol 3."""
    return f"c{function.__module__}\n{function.__qualname__}\n".encode()


class ServerPlacement(NamedTuple):
    """A server's address, and its GPUs: the number of the first, how many, on how many nodes."""

    url: str
    first_gpu: int
    size: int
    nodes: int


class NodePlacement(NamedTuple):
    """A rank's node, and for each server whether its address is on this machine."""

    node: Node
    here: list[bool]


def with_handles(
    weights: Iterable[tuple[str, Tensor]],
    size_bytes: int,
    givers: Sequence[Sequence[int]],
    topology: Topology,
) -> Iterator[WeightBucket]:
    """Buckets with `contents`: the ranks' handles, or copies on ranks without a GPU. Collective:
    every rank gets all the weights, and iterates to the end.

    givers: `givers_of` the servers that receive the weights.
    """
    count = sum(ranks.count(topology.rank) for ranks in givers)
    for tensors, last, _ in in_buckets(weights, size_bytes):
        flat = flattened(tensors) if count and tensors else None
        # One handle for each receiver: torch counts how often a handle was opened.
        mine = [] if flat is None else [_content(flat, tensors) for _ in range(count)]
        everyone = [iter(contents) for contents in topology.gather(mine)]
        contents = [[next(everyone[rank]) for rank in ranks] for ranks in givers]
        yield WeightBucket(tensors, last, contents)
        topology.gather(None)  # rank 0 is back: the servers have copied
        if flat is not None and flat.is_cuda:
            del flat
            torch.cuda.ipc_collect()


def givers_of(topology: Topology, servers: Sequence[Server] | None) -> list[list[int]]:
    """The trainer's ranks that share memory with each tensor-parallel rank of each server that rank
    0 names. Collective. UserError on all ranks: a server is on none of their nodes.
    """
    mine = None if servers is None else [_placement(server) for server in servers]
    placements = topology.gather(mine)[0]
    node = NodePlacement(this_node(), [_is_here(server.url) for server in placements])
    everyone = topology.gather(node)
    return [givers(server, number, everyone) for number, server in enumerate(placements)]


def givers(server: ServerPlacement, number: int, ranks: Sequence[NodePlacement]) -> list[int]:
    """`givers_of` for server `number`. The ranks of a node use its GPUs in their order. Loopback,
    an address of every machine, means rank 0's.
    """
    node = next((rank.node for rank in ranks if rank.here[number]), None)
    if node is None or server.nodes > 1:
        where = "is on no node of this run" if node is None else f"spans {server.nodes} nodes"
        raise UserError(
            f"{server.url} {where}; with sglang.colocated=true and sglang.sync_method=tensor a "
            "server shares the GPU memory of one node with the trainer; correct sglang.urls, or "
            "set sglang.sync_method=disk"
        )
    neighbours = [place for place, rank in enumerate(ranks) if rank.node == node]
    gpus = range(server.first_gpu, server.first_gpu + server.size)
    return [neighbours[gpu % len(neighbours)] for gpu in gpus]


def _placement(server: Server) -> ServerPlacement:
    assert server.info is not None, "a server that answers was admitted"
    info = server.info
    return ServerPlacement(server.client.url, info.first_gpu, info.tensor_size, info.nodes)


def _is_here(url: str) -> bool:
    """Whether the address is this machine's: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(urllib.parse.urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_binds(family, address) for family, _, _, _, address in found)


def _binds(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
