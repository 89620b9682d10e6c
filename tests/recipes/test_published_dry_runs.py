"""Every recipe takes two steps on four ranks: on a tiny model, under its own layout, precision,
sampling and loss.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.compare.compare import compare
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.recipes import BASELINE, RECIPES, cluster_of
from megatron_stare.reporting.logbook import read_metrics
from tests.distributed import run_distributed
from tests.recipes.shrunk import WORLD, shrunk, write_world

# One of each setting and of each layout, with a server; one of them without, the others with the
# slow tests.
SETTINGS = ("short_cot_7b", "long_cot_8b", "long_cot_30b_a3b", "tool_use_7b")
QUICK = ("long_cot_30b_a3b",)
EMBEDDED = "rollout.engine=embedded"
SLOW = [name for name in RECIPES if cluster_of(name) and name not in QUICK]


def trained(
    rank: int, world: int, directory: str, names: tuple[str, ...], *engine: str
) -> list[bool]:
    """Run each recipe to its end in one world."""
    done = []
    for name in names:
        config = shrunk(name, Path(directory), *engine)
        topology = topologies.start(config.policy, config.run.seed)
        if config.compare.arms:
            done.append(compare(config, topology, Interrupt(), name))
        else:
            done.append(Trainer(config, topology).run(Interrupt()))
    return done


def rows_of(name: str, directory: Path) -> list[dict[str, Any]]:
    arm = BASELINE if name.endswith(BASELINE) else "stare"
    run = directory / "runs" / name
    inner = run / "seed0" / arm
    return read_metrics((inner if inner.is_dir() else run) / "metrics.jsonl")


def check(name: str, directory: Path) -> None:
    """Two steps that learnt something, with the objective of the recipe. That trainer and engine
    agree on log-probs is the run's own alarm.
    """
    first, second = rows_of(name, directory)
    for number, row in enumerate((first, second), start=1):
        assert row["step"] == number and row["skipped"] == row["nonfinite"] == 0.0
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0
        assert row["lr"] == pytest.approx(1e-6)
        assert ("weight_w" in row) != name.endswith(BASELINE)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dry")
    write_world(directory)
    assert all(all(its) for its in run_distributed(trained, WORLD, str(directory), QUICK, EMBEDDED))
    return directory


@pytest.mark.parametrize("name", QUICK)
def test_two_steps_without_a_server(name: str, quick: Path) -> None:
    check(name, quick)


@pytest.mark.slow
def test_all_other_recipes_and_twins_take_two_steps(tmp_path: Path) -> None:
    write_world(tmp_path)
    words = (str(tmp_path), tuple(SLOW), EMBEDDED)
    done = run_distributed(trained, WORLD, *words, timeout_s=1200.0)
    assert all(all(its) for its in done)
    for name in SLOW:
        check(name, tmp_path)


@pytest.mark.sglang
def test_each_setting_takes_two_steps_with_a_real_server(tmp_path: Path) -> None:
    """The same ranks under the same layouts; a server of no GPU stands for the recipe's own."""
    write_world(tmp_path)
    server = ("sglang.num_servers=1", "sglang.gpus_per_server=1", "sglang.server_args=")
    # a rank of these tests may start no worker process
    words = (str(tmp_path), SETTINGS, *server, "rollout.workers_per_node=0")
    assert all(all(its) for its in run_distributed(trained, WORLD, *words, timeout_s=900.0))
    for name in SETTINGS:
        check(name, tmp_path)
        assert all(row["engine_restarts"] == 0 for row in rows_of(name, tmp_path))
