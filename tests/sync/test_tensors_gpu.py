"""Handles to a GPU's memory, as ranks hand them to servers."""

from __future__ import annotations

import base64
import pickle
import pickletools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import BOTH_BACKENDS, Topology
from megatron_stare.sync.tensors import with_handles
from tests.distributed import run_distributed

pytestmark = pytest.mark.nullcuda


def test_a_handle_names_its_own_gpu_and_has_no_weights_in_it(topology: Topology) -> None:
    """One for each of a server's ranks: torch counts who has opened one."""
    weights = [(f"w{n}", torch.full((1 << 14,), float(n), device="cuda")) for n in range(3)]
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    parts = with_handles(iter(weights), 2 << 16, [[0, 0], [0]], topology)
    for number, part in enumerate(parts):
        names = [name for name, _ in part.tensors]
        assert names == [["w0", "w1"], ["w2"]][number] and part.last == (number == 1)
        contents = [content for of_server in part.contents for content in of_server]
        assert len(contents) == 3 and len(set(contents)) == 3
        for content in contents:
            raw = base64.b64decode(content)
            assert len(raw) < 4096
            said = [argument for _, argument, _ in pickletools.genops(raw)]
            assert uuid in said
            assert "torch.multiprocessing.reductions rebuild_cuda_tensor" in said
            assert set(names) <= {*filter(lambda one: isinstance(one, str), said)}


def uuid_of(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def opened(content: str) -> tuple[int, torch.Tensor]:
    """The GPU and the values, as a server's process finds them: it looks the device up by UUID."""
    rebuild = reductions.rebuild_cuda_tensor

    def by_uuid(*arguments: Any) -> torch.Tensor:
        device = [uuid_of(n) for n in range(torch.cuda.device_count())].index(arguments[6])
        return rebuild(*arguments[:6], device, *arguments[7:])

    reductions.rebuild_cuda_tensor = by_uuid
    try:
        flat = pickle.loads(base64.b64decode(content))["flattened_tensor"]
    finally:
        reductions.rebuild_cuda_tensor = rebuild
    return flat.device.index, flat.view(torch.float32).cpu()


def trainer_or_server(rank: int, world_size: int) -> list[Any]:
    """Ranks 0 and 1 train, on a GPU each; rank 2 opens what they hand out."""
    topology = topologies.start(PolicyConfig())
    weights = [(f"w{number}", torch.full((8,), 1.0 + number, device="cuda")) for number in range(3)]
    givers = [[0, 1]]
    found = []
    for part in with_handles(iter(weights), 64, givers, topology):
        sent = topology.gather(part.contents)[0]  # rank 0's requests
        if rank == 2:
            found.append([opened(content) for content in sent[0]])
            torch.cuda.synchronize()
        dist.barrier()
    return found


def test_every_rank_of_a_server_opens_memory_of_its_own_gpu() -> None:
    *trainers, server = run_distributed(trainer_or_server, 3, backend=BOTH_BACKENDS)
    assert trainers == [[], []]
    expected = [torch.tensor([1.0] * 8 + [2.0] * 8), torch.tensor([3.0] * 8)]
    for buckets, values in zip(server, expected, strict=True):
        assert [device for device, _ in buckets] == [0, 1]
        assert all(torch.equal(value, values) for _, value in buckets)
