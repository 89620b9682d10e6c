"""Relays in this process, and weights that take a step of training."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_stare.sync.delta.relay import RelayServer


@contextlib.contextmanager
def serving(directory: Path, port: int = 0, key: str = "") -> Iterator[RelayServer]:
    """A relay that listens on loopback."""
    server = RelayServer(directory, "127.0.0.1", port, key)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def full_disk(room: int = 1 << 16) -> Iterator[None]:
    """This process can write no file of more than `room` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def url_of(server: RelayServer) -> str:
    return f"http://127.0.0.1:{server.port}"


def weights_in(directory: Path) -> dict[str, Tensor]:
    """All tensors of a relay's directory."""
    found: dict[str, Tensor] = {}
    for file in sorted((directory / "weights").glob("*.safetensors")):
        found |= load_file(file)
    return found


def stepped(weights: dict[str, Tensor], seed: int, share: float = 0.02) -> dict[str, Tensor]:
    """Other weights: about this share of each tensor's elements moved a little."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(
            torch.rand(tensor.shape, generator=generator) < share, tensor * 1.01, tensor
        ).to(tensor.dtype)
        for name, tensor in weights.items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all bits are equal."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one
    )
