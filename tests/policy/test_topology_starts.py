"""A process may start several layouts, one after another."""

from __future__ import annotations

import gc
from pathlib import Path

from megatron_stare.config import PolicyConfig
from megatron_stare.policy import topology as topologies
from tests.distributed import run_distributed

LAYOUTS = [{"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}] * 2


def threads_after_each(rank: int, world_size: int) -> list[int]:
    counts = []
    for layout in LAYOUTS:
        topologies.start(PolicyConfig(**layout))
        gc.collect()
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    return counts


def test_the_groups_of_an_earlier_layout_leave_no_thread() -> None:
    for tensor, context, *later in run_distributed(threads_after_each, 2):
        assert later == [tensor, context]
