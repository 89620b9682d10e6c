"""Weights on their way to servers: buckets of tensors, and the protocol of every transport."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_stare.rollout.sglang.server import Server
from megatron_stare.rollout.sglang.weights import buckets

NamedTensors = list[tuple[str, Tensor]]


class WeightBucket(NamedTuple):
    """Some of the weights. `contents`: for each server, one string for each of its tensor-parallel
    ranks, sent in place of the tensors; empty if the trainer's ranks share no memory with servers.
    """

    tensors: NamedTensors
    last: bool = False
    contents: Sequence[Sequence[str]] = ()


class Transport:
    """One way of sending buckets to servers.

    `session`: the servers must know where an update begins and ends. `counts_changes`: the
    transport itself measures the fraction of the weights that changed.
    """

    session = True
    counts_changes = False

    def send(self, bucket: WeightBucket, servers: Sequence[Server], tag: str | None) -> None:
        """Deliver one bucket to all the servers. `tag`, the name of the weights, comes with the
        last bucket.
        """
        raise NotImplementedError

    def wait(self) -> None:
        """Return when the servers have loaded all buckets; raises their failure. Nothing to do if
        `send` waits.
        """

    def abandon(self, error: Exception) -> None:
        """The stream of weights ended with this error, or arrived wrong. Another stream follows."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the last sync."""
        return {}


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the ended functions in an error's traceback, and in those of its
    causes: a caller that keeps the error must not keep a bucket with it.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def in_buckets(weights: Iterable[tuple[str, Tensor]], size_bytes: int) -> Iterator[WeightBucket]:
    """The weights in buckets of up to `size_bytes`. Keeps no bucket."""
    return itertools.starmap(WeightBucket, buckets(weights, size_bytes))


def flattened(tensors: NamedTensors, room: Tensor | None = None) -> Tensor:
    """The tensors' bytes, concatenated [uint8]: on their own device, or at the start of `room`."""
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in tensors]
    if room is None:
        return torch.cat(parts)
    room = room[: sum(part.numel() for part in parts)]
    for place, part in zip(room.split([part.numel() for part in parts]), parts, strict=True):
        place.copy_(part)
    return room


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
