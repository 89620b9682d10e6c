"""This process as one rank of a world that is not there: every rank holds what this one holds."""

from __future__ import annotations

import datetime
import importlib
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
    """Join as `rank` of `size`: over NCCL on device `rank` modulo 8, and for host memory over a
    backend that sends nothing (torch's "fake"); objects are gathered as if all were equal.
    `topology.start` then splits this world.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend

    library().nullcuda_alone(1)
    _stores.append(_EchoStore())
    torch.cuda.set_device(rank % torch.cuda.device_count())
    backends = "cpu:fake,cuda:nccl"
    dist.init_process_group(backends, store=_stores[-1], rank=rank, world_size=size)

    def all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * len(found)

    dist.all_gather_object = all_gather_object
