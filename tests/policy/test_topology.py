"""Messages between ranks with a GPU, and their backends."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from megatron_stare.policy.topology import Topology, gather_values, release_workspaces

pytestmark = pytest.mark.nullcuda


def test_control_takes_no_multiprocessor(topology: Topology) -> None:
    """Objects, barriers and small tensors of the host go by gloo, in every group; NCCL has the
    device's tensors.
    """
    from tools.nullcuda.counters import counting

    with counting() as counts:
        assert topology.gather("word") == ["word"]
        dist.barrier()
        for group in (topology.groups.tp_ep_pp, topology.data, topology.pipeline):
            assert gather_values(1, group) == [1]
        dist.all_reduce(torch.ones(1), group=topology.host)
    assert counts.collective_calls == 0 and counts.launches == 0
    with counting() as counts:
        dist.all_reduce(torch.ones(1, device="cuda"), group=topology.data)
    assert counts.collective_calls == 1


def test_workspaces_are_given_back(topology: Topology) -> None:
    gc.collect()  # tensors of earlier tests that only cycles hold would be freed in between
    release_workspaces()  # of the tests before
    reserved, before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    square = torch.ones(64, 64, device="cuda")
    square = square @ square  # cuBLAS takes a workspace of megabytes and keeps it
    del square
    assert torch.cuda.memory_allocated() > before
    release_workspaces()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() <= reserved
