"""Two ranks over the device's NCCL: whole steps under each way of splitting a model, with our
own layers, equal those of one rank on the CPU; and further places that only several ranks enter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_stare.config import Config, PolicyConfig
from megatron_stare.debug.cluster import examine_cluster
from megatron_stare.numerics.selection import Across
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.build import build_model, read_hf_config
from megatron_stare.policy.huggingface.weights import HFWeights
from megatron_stare.policy.topology import BOTH_BACKENDS
from tests.distributed import run_distributed
from tests.loop.test_trainer_layouts import EXPERTS, train_steps
from tests.nullcuda.runs import STEPS, assert_trained_alike

pytestmark = pytest.mark.nullcuda
QUICK = ("TP2 SP packed", "PP2 VPP2 packed", "CP2 packed", "EP2 distributed optimizer experts")
SLOW = (
    *("DP2 distributed optimizer", "EP2 packed experts", "TP2 SP EP2 whole experts"),
    *("DP2 overlapped", "PP2 VPP2 overlapped", "PP2 uneven"),
)
LAYOUTS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
World = Callable[[tuple[str, ...]], list[dict[str, Any]]]


def together(rank: int, size: int, directory: str, layouts: tuple[str, ...]) -> dict[str, Any]:
    """The results of one rank: its runs by layout, and two results of other collective work."""
    found = {name: train_steps(directory, name, size, steps=STEPS) for name in layouts}
    wire = dist.new_group(backend="nccl")  # which moves nothing from host memory
    total = Across(wire).sum(torch.tensor([rank + 1.0, 0.5]))
    return found | {"cluster": examine_cluster(Config()), "total": total}


@pytest.fixture(scope="module")
def world(models: str) -> World:
    """The results of two ranks for some layouts; a layout runs when it is first requested."""

    @functools.cache
    def ranks(layouts: tuple[str, ...]) -> list[dict[str, Any]]:
        return run_distributed(together, 2, models, layouts, timeout_s=500, backend=BOTH_BACKENDS)

    return ranks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one_on_the_cpu(
    layout: str, world: World, expected: dict[str, Any]
) -> None:
    model = EXPERTS if layout.endswith(EXPERTS) else "dense"
    ranks = world(QUICK if layout in QUICK else SLOW)
    assert_trained_alike([rank[layout] for rank in ranks], expected[model])


def test_tensors_in_host_memory_are_summed_over_nccl(world: World) -> None:
    assert [rank["total"] for rank in world(QUICK)] == [4.0, 4.0]


def test_the_cluster_is_examined_over_nccl(world: World) -> None:
    first, second = (rank["cluster"] for rank in world(QUICK))
    found = {one.what: one for one in first}
    assert "between 2 ranks (nccl)" in found["bandwidth"].found
    assert found["versions"].level == "OK" and second == []


def onto_first(rank: int, size: int, directory: str) -> tuple[int, int]:
    """Communicators that two ways of sending weights to rank 0 make, and tensors that arrive."""
    from tools.nullcuda.counters import counting

    policy = PolicyConfig(
        hf_checkpoint=f"{directory}/untied",
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    topology = topologies.start(policy)
    hf = read_hf_config(policy.hf_checkpoint)
    chunks = build_model(hf, policy, topology)
    with counting() as counts:
        arrived = sum(1 for _ in HFWeights(chunks, hf, topology, onto_first=True))
    return counts.communicators, arrived


def test_weights_reach_rank_0_over_the_world_communicator(models: str) -> None:
    """A single send would make a communicator for each pair of ranks."""
    first, *others = run_distributed(onto_first, 4, models, backend=BOTH_BACKENDS)
    assert first[1] > 20 and [made for made, _ in (first, *others)] == [0, 0, 0, 0]
    assert not any(arrived for _, arrived in others)
