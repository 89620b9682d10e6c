"""Bytes from the ranks that hold them to the ranks that need them, over a CPU process group; and
from host memory to a device.

Nothing is pickled or padded. In addition to the bytes that it sends and receives, a rank never
holds more than three buckets.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

BUCKET_BYTES = 16 << 20


class Parcel(NamedTuple):
    """`size` bytes that lie on one rank and are wanted on others."""

    size: int
    holder: int
    wanted: tuple[int, ...]


class _Piece(NamedTuple):
    """Bytes [start, stop) of one parcel."""

    parcel: int
    start: int
    stop: int


def all_gather_bytes(content: bytes, group: ProcessGroup) -> list[bytes]:
    """Every rank's content, in rank order, on every rank: for what all ranks must know.

    Each writes its own into zeros of the whole length, and the sum is everyone's.
    """
    rank, ends = dist.get_rank(group), list(itertools.accumulate(_lengths(content, group)))
    whole = torch.zeros(ends[-1], dtype=torch.uint8)
    if content:
        own = torch.from_numpy(numpy.frombuffer(content, numpy.uint8).copy())
        whole[ends[rank] - len(content) : ends[rank]] = own
    for bucket in whole.split(BUCKET_BYTES):
        dist.all_reduce(bucket, group=group)
    return [whole[a:b].numpy().tobytes() for a, b in itertools.pairwise([0, *ends])]


def gather_bytes(content: bytes, group: ProcessGroup) -> list[bytes]:
    """Every rank's content, in rank order, on the first rank; nothing on the others."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return [content]
    lengths = enumerate(_lengths(content, group))
    parcels = [Parcel(length, holder, (0,)) for holder, length in lengths]
    there = deliver(lambda _: numpy.frombuffer(content, numpy.uint8), parcels, group)
    return [there[holder].tobytes() for holder in range(size)] if rank == 0 else []


def _lengths(content: bytes, group: ProcessGroup) -> list[int]:
    """The length of every rank's content."""
    lengths_R = torch.zeros(dist.get_world_size(group), dtype=torch.long)
    lengths_R[dist.get_rank(group)] = len(content)
    dist.all_reduce(lengths_R, group=group)
    return lengths_R.tolist()


def deliver(
    held: Callable[[int], numpy.ndarray], parcels: Sequence[Parcel], group: ProcessGroup
) -> dict[int, numpy.ndarray]:
    """The parcels that this rank wants, by number, each as flat uint8. Collective: every rank gives
    the same parcels, and by `held` the bytes of those that it holds, made when they are needed.

    A parcel goes to the first rank that wants it, and from each to the next: no rank sends it more
    than once, however many want it. Ranks that want parcels together want them in the same order,
    and no rank is in two such chains.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    there: dict[int, numpy.ndarray] = {}
    leaving, coming = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, parcel in enumerate(parcels):
        first = parcel.wanted[0]
        if parcel.holder == rank != first:
            leaving[first].append(number)
        elif first == rank:
            coming[parcel.holder].append(number)
    for number in coming.pop(rank, ()):
        there[number] = held(number)
    for shift in range(1, size):
        target, source = (rank + shift) % size, (rank - shift) % size
        given = _buckets(parcels, leaving[target])
        awaited = _buckets(parcels, coming[source])
        for out, back in itertools.zip_longest(given, awaited):
            sending = dist.isend(_joined(held, out), target, group) if out else None
            if back:
                _take(there, parcels, back, source, group)
            if sending is not None:
                sending.wait()
    mine = [number for number, parcel in enumerate(parcels) if rank in parcel.wanted]
    there |= {number: numpy.zeros(0, numpy.uint8) for number in mine if not parcels[number].size}
    if mine:
        _pass_on(there, parcels, mine, rank, group)
    return there


def _pass_on(
    there: dict[int, numpy.ndarray],
    parcels: Sequence[Parcel],
    mine: list[int],
    rank: int,
    group: ProcessGroup,
) -> None:
    """Pass the parcels from each rank of the chain to the next, while more arrive."""
    chain = parcels[mine[0]].wanted
    place = chain.index(rank)
    sending = None
    for pieces in _buckets(parcels, mine):
        if place:
            _take(there, parcels, pieces, chain[place - 1], group)
        if place + 1 < len(chain):
            if sending is not None:
                sending.wait()
            sending = dist.isend(_joined(there.__getitem__, pieces), chain[place + 1], group)
    if sending is not None:
        sending.wait()


def _take(
    there: dict[int, numpy.ndarray],
    parcels: Sequence[Parcel],
    pieces: list[_Piece],
    source: int,
    group: ProcessGroup,
) -> None:
    """Receive these bytes into their places."""
    buffer = torch.empty(sum(piece.stop - piece.start for piece in pieces), dtype=torch.uint8)
    dist.recv(buffer, source, group)
    place = 0
    for number, start, stop in pieces:
        if number not in there:
            there[number] = numpy.empty(parcels[number].size, numpy.uint8)
        there[number][start:stop] = buffer.numpy()[place : place + stop - start]
        place += stop - start


def _buckets(parcels: Sequence[Parcel], numbers: Sequence[int]) -> Iterator[list[_Piece]]:
    """The bytes of these parcels, in stretches of BUCKET_BYTES; the last one is shorter."""
    bucket, room = list[_Piece](), BUCKET_BYTES
    for number in numbers:
        start, size = 0, parcels[number].size
        while start < size:
            stop = min(size, start + room)
            bucket.append(_Piece(number, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield bucket
                bucket, room = [], BUCKET_BYTES
    if bucket:
        yield bucket


def _joined(source: Callable[[int], numpy.ndarray], pieces: list[_Piece]) -> Tensor:
    parts = [source(piece.parcel)[piece.start : piece.stop] for piece in pieces]
    return torch.from_numpy(numpy.concatenate(parts))


def to_device(values: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """The host tensor, or the numbers as int64, on `device`, after the work queued there so far.

    The host does not wait: a copy out of pageable memory would make it wait until the device has
    caught up, one out of pinned memory is only queued, as a kernel is. Pinned memory comes from
    torch's own cache, which keeps it until the copy is done.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
