"""Weights on their way to servers, bucket by bucket; in memory that trainer and servers share where
they are on the same GPUs.

A handle to GPU memory opens on the machine that has it. So every rank of the trainer holds each
bucket at the same time, and a server gets handles from the ranks of its own node: each of its
tensor-parallel ranks from the one on its own GPU, where there is one. Rank 0 asks the servers, and
goes on when they have copied; until then the bucket stays where it is on all ranks.
"""

from __future__ import annotations

import itertools
import socket
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.policy.topology import Node, Topology, this_node
from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import buckets
from megatron_stare.sync.tensor_transport import (
    Bucket,
    encoded,
    flattened,
    pickled,
    pickled_handle,
    table_of,
)


class Part(NamedTuple):
    """One bucket. `contents`: for each server, what each of its tensor-parallel ranks is sent in
    the bucket's place; empty where ranks hand nothing out.
    """

    bucket: Bucket
    last: bool = False
    contents: Sequence[Sequence[str]] = ()


class Seat(NamedTuple):
    """Where a server is, and over how many GPUs, from which on."""

    url: str
    first_gpu: int
    size: int
    nodes: int


class Reach(NamedTuple):
    """A rank's node, and which seats it finds on its own machine."""

    node: Node
    here: list[bool]


def in_turn(weights: Iterable[tuple[str, Tensor]], size_bytes: int) -> Iterator[Part]:
    """The weights in buckets of up to `size_bytes`, none of which is kept here."""
    return itertools.starmap(Part, buckets(weights, size_bytes))


def handed_out(
    weights: Iterable[tuple[str, Tensor]],
    size_bytes: int,
    givers: Sequence[Sequence[int]],
    topology: Topology,
) -> Iterator[Part]:
    """The same with what the ranks hand out: handles, or a copy where they have no GPU. Collective:
    every rank is given all the weights, and iterates to the end.

    givers: `givers_of` the servers that are sent to.
    """
    count = sum(ranks.count(topology.rank) for ranks in givers)
    for bucket, last in buckets(weights, size_bytes):
        flat = flattened(bucket) if count and bucket else None
        # A handle of its own for each: torch counts who has opened one.
        mine = [] if flat is None else [_content(flat, bucket) for _ in range(count)]
        everyone = [iter(contents) for contents in topology.gather(mine)]
        yield Part(bucket, last, [[next(everyone[rank]) for rank in ranks] for ranks in givers])
        topology.gather(None)  # rank 0 is back, so that the servers have copied
        if flat is not None and flat.is_cuda:
            del flat
            torch.cuda.ipc_collect()


def givers_of(topology: Topology, servers: Sequence[Server] | None) -> list[list[int]]:
    """For each server that rank 0 names, the trainer's rank that hands each of its tensor-parallel
    ranks its memory. Collective. UserError on all ranks: a server is not on one of their nodes.
    """
    seats = topology.gather(None if servers is None else [_seat(server) for server in servers])[0]
    reach = Reach(this_node(), [_is_here(seat.url) for seat in seats])
    everyone = topology.gather(reach)
    return [givers(seat, number, everyone) for number, seat in enumerate(seats)]


def givers(seat: Seat, number: int, ranks: Sequence[Reach]) -> list[int]:
    """`givers_of` for seat `number`. A node's ranks are on its GPUs in their order; loopback, which
    every machine finds on itself, is rank 0's.
    """
    node = next((rank.node for rank in ranks if rank.here[number]), None)
    if node is None or seat.nodes > 1:
        where = "is on no node of this run" if node is None else f"spans {seat.nodes} nodes"
        raise UserError(
            f"{seat.url} {where}, and sglang.colocated=true with sglang.sync_method=tensor hands "
            "it GPU memory of its own node; correct sglang.urls, or set sglang.sync_method=disk"
        )
    beside = [place for place, rank in enumerate(ranks) if rank.node == node]
    return [beside[(seat.first_gpu + place) % len(beside)] for place in range(seat.size)]


def _seat(server: Server) -> Seat:
    assert server.info is not None, "a server that answers was admitted"
    info = server.info
    return Seat(server.client.url, info.first_gpu, info.tensor_size, info.nodes)


def _content(flat: Tensor, bucket: Bucket) -> str:
    table = table_of(bucket)
    return encoded(pickled_handle(flat, table) if flat.is_cuda else pickled(flat, table))


def _is_here(url: str) -> bool:
    """Whether the address is one of this machine's own: only such can be listened on."""
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
