"""This process as one rank of a world that is not there: every rank holds what this one holds."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from tools.nullcuda.library import library

_stores: list[dist.Store] = []  # C++ keeps no reference to a store's Python half


class _EchoStore(dist.Store):
    """A store in which every key is: what this process set, else a few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.held[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self.held.get(key, bytes(128))

    def add(self, key: str, amount: int) -> int:
        total = int(self.held.get(key, b"0")) + amount
        self.held[key] = str(total).encode()
        return total

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        return None

    def check(self, keys: list[str]) -> bool:
        return True

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.set(key, desired)
        return self.held[key]

    def delete_key(self, key: str) -> bool:
        return self.held.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.held)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        return None


def join(rank: int, size: int) -> None:
    """Join as `rank` of `size` over NCCL, on device `rank` modulo 8. `topology.start` then splits
    this world. Shapes that pipeline stages send each other must be said: `expect_shape`.
    """
    library().nullcuda_alone(1)
    _stores.append(_EchoStore())
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", store=_stores[-1], rank=rank, world_size=size)


def expect_shape(shape: tuple[int, ...]) -> None:
    """The shape of every tensor that a neighbouring pipeline stage would send."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    plain = P2PCommunicator._communicate_shapes

    def communicate_shapes(
        self: Any, send_next: Any, send_prev: Any, from_prev: Any, from_next: Any, *rest: Any
    ) -> Any:
        plain(self, send_next, send_prev, from_prev, from_next, *rest)
        return tuple(list(shape) if wanted else [0, 0, 0] for wanted in (from_prev, from_next))

    P2PCommunicator._communicate_shapes = communicate_shapes
