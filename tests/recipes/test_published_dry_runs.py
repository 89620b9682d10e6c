"""Every recipe takes two steps on four ranks: on a tiny model, under its own layout, precision,
sampling and loss.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.compare.compare import compare
from megatron_stare.config import override
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.recipes import BASELINE, RECIPES, cluster_of
from megatron_stare.reporting.logbook import read_metrics
from tests.distributed import run_distributed
from tests.recipes.shrunk import ROUTED, WORLD, shrunk, write_world
from tests.rollout.sglang.world import start_server, wait_for

# One without a server for every run of the tests, the others with the slow ones.
QUICK = ("long_cot_30b_a3b", "long_cot_30b_a3b_lora")
EMBEDDED = "rollout.engine=embedded"
# The agent offers the recipe's tool; the endpoint takes the place of the trainer's own loop.
ENDPOINT = (
    *("tools.environment=", "agents.function=examples.agents.tool_environment.python"),
    "agents.hosts=1",
)
PUBLISHED = tuple(name for name in RECIPES if cluster_of(name))
SLOW = tuple(name for name in PUBLISHED if name not in QUICK)
# With a server: experts and adapters, multi-turn tools, the largest dense model.
SERVED = (*QUICK, "tool_use_7b", "long_cot_32b")
REST = tuple(name for name in PUBLISHED if name not in SERVED)


def trained(
    rank: int,
    world: int,
    directory: str,
    names: tuple[str, ...],
    *overrides: str,
    urls: dict[str, str] | None = None,
) -> list[bool]:
    """Run each recipe to its end in one world; `urls`: the server of each model."""
    done = []
    for name in names:
        config = shrunk(name, Path(directory), *overrides)
        if urls:
            config = override(config, [f"sglang.urls=[{urls[config.policy.hf_checkpoint]}]"])
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
        assert row["lr"] == pytest.approx(1e-5 if "_lora" in name else 1e-6)
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


def test_the_tool_recipe_through_the_endpoint(tmp_path: Path) -> None:
    write_world(tmp_path)
    words = (str(tmp_path), ("tool_use_7b",), EMBEDDED, *ENDPOINT)
    assert all(all(its) for its in run_distributed(trained, WORLD, *words))
    check("tool_use_7b", tmp_path)
    assert all(row["episode/calls"] >= 1 for row in rows_of("tool_use_7b", tmp_path))


@pytest.mark.slow
def test_all_other_recipes_and_baselines_take_two_steps(tmp_path: Path) -> None:
    write_world(tmp_path)
    words = (str(tmp_path), SLOW, EMBEDDED)
    done = run_distributed(trained, WORLD, *words, timeout_s=1200.0)
    assert all(all(its) for its in done)
    for name in SLOW:
        check(name, tmp_path)


@pytest.mark.sglang
@pytest.mark.parametrize("names", [SERVED, pytest.param(REST, marks=pytest.mark.slow)])
def test_recipes_and_their_baselines_take_two_steps_with_a_real_server(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    """The same ranks under the same layouts. One server of each family of models, without a GPU,
    stands for the recipes' own: every run sends it weights, and asks what it holds.
    """
    write_world(tmp_path)
    with started(tmp_path, names) as urls:
        words = (str(tmp_path), names, "sglang.server_args=")
        every = functools.partial(trained, urls=urls)
        done = run_distributed(every, WORLD, *words, timeout_s=1800.0)
    assert all(all(its) for its in done)
    for name in names:
        check(name, tmp_path)
        assert all(row["engine_corrupt_syncs"] == 0 for row in rows_of(name, tmp_path))


@pytest.mark.sglang
@pytest.mark.slow
def test_the_tool_recipe_through_the_endpoint_with_a_real_server(tmp_path: Path) -> None:
    write_world(tmp_path)
    with started(tmp_path, ("tool_use_7b",)) as urls:
        words = (str(tmp_path), ("tool_use_7b",), "sglang.server_args=", *ENDPOINT)
        every = functools.partial(trained, urls=urls)
        assert all(all(its) for its in run_distributed(every, WORLD, *words, timeout_s=600.0))
    check("tool_use_7b", tmp_path)
    for row in rows_of("tool_use_7b", tmp_path):
        assert row["episode/calls"] >= 1 and row["engine_corrupt_syncs"] == 0


@contextlib.contextmanager
def started(directory: Path, names: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """A server of each model in `directory` that the recipes train: where it answers."""
    checkpoints = sorted({Path(shrunk(name, directory).policy.hf_checkpoint) for name in names})
    with contextlib.ExitStack() as ended:
        servers = {}
        for checkpoint in checkpoints:
            log = directory / f"{checkpoint.name}.log"
            asked = ("--enable-return-routed-experts",) if checkpoint.name in ROUTED else ()
            server = start_server(checkpoint, log, 0, "--dtype", "bfloat16", *asked)
            ended.callback(server.stop)
            servers[str(checkpoint)] = server
        for name, server in servers.items():
            wait_for([server], Path(name))
        yield {name: server.url for name, server in servers.items()}
