"""Bytes between ranks: parcels to one rank and to several, and empty ones."""

from __future__ import annotations

from typing import Any

import numpy
import torch.distributed as dist

from megatron_stare.numerics import exchange
from megatron_stare.numerics.exchange import Parcel, all_gather_bytes, deliver, gather_bytes
from tests.distributed import run_distributed

# Rank 0 trains alone; 1 and 2 want the same parcels.
PARCELS = [
    Parcel(size, holder, wanted)
    for size, holder, wanted in (
        *((5, 1, (0,)), (0, 1, (0,)), (7, 0, (1, 2)), (0, 0, (1, 2))),
        *((33, 2, (1, 2)), (0, 2, (1, 2)), (4, 0, (0,)), (0, 0, (0,))),
    )
]


def content(number: int) -> numpy.ndarray:
    return (numpy.arange(PARCELS[number].size) + 40 * number).astype(numpy.uint8)


def exchanged(rank: int, world_size: int) -> Any:
    exchange.BUCKET_BYTES = 6  # parcels that share a bucket, and one of several
    group = dist.group.WORLD
    assert group is not None
    there = deliver(content, PARCELS, group)
    own = bytes(range(3 * rank))  # rank 0 has none
    return there, gather_bytes(own, group), all_gather_bytes(own, group)


def test_every_rank_gets_what_it_wants_and_empty_parcels_too() -> None:
    whole = [bytes(range(3 * rank)) for rank in range(3)]
    for rank, (there, on_first, everywhere) in enumerate(run_distributed(exchanged, 3)):
        wanted = {number for number, parcel in enumerate(PARCELS) if rank in parcel.wanted}
        assert there.keys() == wanted
        assert all(there[number].tolist() == content(number).tolist() for number in wanted)
        assert on_first == (whole if rank == 0 else []) and everywhere == whole
