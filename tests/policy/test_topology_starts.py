"""A process may start several layouts, one after another."""

from __future__ import annotations

import gc
from pathlib import Path

from megatron_stare import api
from megatron_stare.config import PolicyConfig
from megatron_stare.policy import topology as topologies
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
    counts = []
    for number in range(3):
        directory = tmp_path / str(number)
        directory.mkdir()
        api.train(small_config(directory, "train.num_rollout=1"))
        models = [each for each in gc.get_objects() if type(each).__name__ == "GPTModel"]
        counts.append((threads(), len(models)))
    first, *later = counts
    assert first[1] == 0
    assert later == [first, first]
