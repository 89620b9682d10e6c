"""A process starts several layouts one after another, or none; what it keeps in between."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_stare import api
from megatron_stare.config import PolicyConfig, UserError
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology, release_workspaces
from tests.conftest import threads
from tests.distributed import run_distributed
from tests.small_run import small_config

LAYOUTS = [{"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}] * 2


def threads_after_each(rank: int, world_size: int) -> list[int]:
    counts = []
    for layout in LAYOUTS:
        topologies.start(PolicyConfig(**layout))
        gc.collect()
        counts.append(threads())
    return counts


def test_the_groups_of_an_earlier_layout_leave_no_thread() -> None:
    for tensor, context, *later in run_distributed(threads_after_each, 2):
        assert later == [tensor, context]


def test_a_run_leaves_neither_threads_nor_its_model(tmp_path: Path) -> None:
    """A second run of the process has the memory of the first one, at once."""

    def models() -> int:
        return sum(type(each).__name__ == "GPTModel" for each in gc.get_objects())

    gc.collect()  # models that earlier tests have left in cycles
    others, counts = models(), []
    for number in range(3):
        directory = tmp_path / str(number)
        directory.mkdir()
        api.train(small_config(directory, "train.num_rollout=1"))
        left = models()  # counted first: meanwhile the threads that were stopped end
        counts.append((threads(), left))
    first, *later = counts
    assert first[1] == others
    assert later == [first, first]


def test_a_start_that_is_refused_at_once_imports_no_megatron(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The import takes seconds and warns, and nothing has prepared it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(topologies, "unseen_gpus", lambda cuda: "torch sees no GPU")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(UserError, match="sees no GPU"), topologies.session(PolicyConfig()):
        pass


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert topologies._own_gpu() == 1
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"rank 2 of this node has no GPU.*sees 2.*'4,5'"):
        topologies._own_gpu()


def test_released_workspaces_include_rotary_angles(topology: Topology) -> None:
    from megatron.core.models.common.embeddings import RotaryEmbedding

    embedding = RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=topology.context)
    embedding(16)
    assert RotaryEmbedding.forward.cache_info().currsize > 0
    release_workspaces()
    assert RotaryEmbedding.forward.cache_info().currsize == 0
