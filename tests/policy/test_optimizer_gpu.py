"""The trainer's memory on a GPU that servers share."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from megatron_stare.policy import optimizer
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.optimizer import make_room, restore_gradients
from megatron_stare.policy.topology import Topology, release_workspaces
from tests.small_run import small_config

pytestmark = pytest.mark.nullcuda
SHARED = ("rollout.engine=sglang", "sglang.colocated=true", "sglang.sync_method=tensor")
BLOCK = 512  # bytes: what the allocator rounds a tensor up to


@pytest.mark.parametrize("offload", [True, False])
def test_weights_stay_and_so_does_an_optimizer_without_offload(
    offload: bool, tmp_path: Path, topology: Topology
) -> None:
    gc.collect()  # what the tests before have left
    release_workspaces()
    before = torch.cuda.memory_allocated()
    kind = ("policy.dtype=bf16", f"policy.offload_while_generating={str(offload).lower()}")
    actor = Actor(small_config(tmp_path, *SHARED, *kind), topology, 10)
    make_room(actor.optimizer, 1)
    parameters = [value for chunk in actor.chunks for value in chunk.parameters()]
    count, tensors = sum(value.numel() for value in parameters), len(parameters)
    release_workspaces()
    whole = torch.cuda.memory_allocated()  # with what TransformerEngine keeps for this process
    assert whole - before > (2 + 4 + 12) * count
    actor.make_room()
    release_workspaces()
    freed = (4 + 12 if offload else 4) * count
    assert freed <= whole - torch.cuda.memory_allocated() <= freed + 8 * BLOCK * tensors
    block = actor._host_block
    assert block.numel() <= offload * (12 * count + 3 * BLOCK * tensors), "no powers of two"
    assert block.is_pinned() == offload
    restore_gradients(actor.runnable)
    buffers = [buffer.grad_data for chunk in actor.runnable for buffer in chunk.buffers]
    assert sum(buffer.untyped_storage().nbytes() for buffer in buffers) >= 4 * count
    assert not any(buffer.any() for buffer in buffers)


def test_a_block_of_host_memory_is_registered_while_it_exists() -> None:
    block = optimizer._pinned(1 << 16)
    address, view = block.data_ptr(), block[:8]
    assert block.is_pinned() and view.is_pinned()
    del block, view
    assert torch.cuda.cudart().cudaHostUnregister(address) != torch.cuda.cudart().cudaError.success
