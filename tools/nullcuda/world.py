"""This process as one rank of a world that is not there: every other rank holds what this one does.

NCCL's communicators are told that nobody else will come, and what the ranks would agree on through
the store they find in it: each is answered with its own words.
"""

from __future__ import annotations

import ctypes
import datetime
from typing import Any

import torch.distributed as dist

from tools.nullcuda.library import library

_kept: list[object] = []  # C++ holds no reference to a store's Python half


class _EchoStore(dist.Store):
    """Has every key: with what was set last under it, else with what was set last at all."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.last = b""

    def set(self, key: str, value: bytes | str) -> None:  # type: ignore[override]
        self.last = value.encode() if isinstance(value, str) else bytes(value)
        self.values[key] = self.last

    def get(self, key: str) -> bytes:
        return self.values.get(key, self.last)

    def add(self, key: str, amount: int) -> int:
        number = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(number).encode()
        return number

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Nobody else would set them."""

    def check(self, keys: list[str]) -> bool:
        return True

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.set(key, desired)
        return desired.encode()

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.values)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Nothing is waited for."""


def join(rank: int, size: int) -> None:
    """Be rank `rank` of `size`: NCCL on the device, and on the host torch's "fake" backend, which
    sends nothing and leaves what it should have filled; objects are gathered as if all were equal.
    """
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    library().nullcuda_alone(ctypes.c_int(1))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    _kept.append(_EchoStore())
    dist.init_process_group(
        "cpu:fake,cuda:nccl",
        store=_kept[-1],
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(minutes=30),
    )

    def all_gather_object(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * len(found)

    dist.all_gather_object = all_gather_object
