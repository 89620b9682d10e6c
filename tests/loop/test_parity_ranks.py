"""`parity` on several ranks: the figures of one, and the table of an alarm, under any placement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.debug.parity import parity
from megatron_stare.loop.interrupt import Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.huggingface.weights import HFWeights
from tests.distributed import run_distributed
from tests.small_run import small_config

LAYOUTS = {
    "TP2": ("policy.tensor_model_parallel_size=2",),
    "TP2 SP": ("policy.tensor_model_parallel_size=2", "policy.sequence_parallel=true"),
    "PP2": ("policy.pipeline_model_parallel_size=2",),
    "DP2": (),
    "CP2": ("policy.context_parallel_size=2",),
}
PACKED = "policy.packed_sequences=true"
NAME = "model.layers.1.mlp.down_proj.weight"


def compare(directory: str, layout: tuple[str, ...], name: str) -> None:
    config = small_config(Path(directory), PACKED, f"run.dir={directory}/{name}", *layout)
    assert parity(config, topologies.start(config.policy), prompts=5, tokens=12) == 0


def alarm(directory: str, layout: tuple[str, ...], name: str) -> None:
    """A run whose engine has a wrong weight."""
    sound = HFWeights.__iter__

    def wrong(weights: HFWeights) -> Any:
        for each, tensor in sound(weights):
            yield each, tensor * 2 if each == NAME else tensor

    settings = ("train.num_rollout=1", "rollout.dynamic_sampling=false", "alarms.mismatch=1e-3")
    config = small_config(
        Path(directory), PACKED, f"run.dir={directory}/{name}", *settings, *layout
    )
    HFWeights.__iter__ = wrong  # type: ignore[method-assign]
    try:
        assert Trainer(config, topologies.start(config.policy)).run(Interrupt())
    finally:
        HFWeights.__iter__ = sound  # type: ignore[method-assign]


def on_ranks(rank: int, size: int, directory: str) -> None:
    for name, layout in LAYOUTS.items():
        compare(directory, layout, name)
        alarm(directory, layout, f"{name} alarm")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The table of the command, and under "... alarm" the table of the alarm; of one rank alone
    under "one".
    """
    directory = tmp_path_factory.mktemp("parity")
    small_config(directory)
    run_distributed(on_ranks, 2, str(directory))
    compare(str(directory), (), "one")
    alarm(str(directory), (), "one alarm")
    topologies.stop()
    every: dict[str, Any] = {}
    for name in (*LAYOUTS, "one"):
        every[name] = json.loads((directory / name / "parity.json").read_text())
        every[f"{name} alarm"] = (
            directory / f"{name} alarm" / "parity_step_00000001.txt"
        ).read_text()
    return every


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_figures_are_those_of_one_rank(layout: str, found: dict[str, Any]) -> None:
    """The same responses, of which both sides have the same log-probs, within rounding."""
    ours, theirs = found[layout]["pairs"], found["one"]["pairs"]
    assert [pair["pair"] for pair in ours] == ["decode - trainer", "trainer - trainer alone"]
    for pair, other in zip(ours, theirs, strict=True):
        assert pair["tokens"] == other["tokens"] > 30
        assert pair["largest"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_alarms_table_is_that_of_one_rank(layout: str, found: dict[str, Any]) -> None:
    ours, theirs = found[f"{layout} alarm"].splitlines(), found["one alarm"].splitlines()
    assert ours[-1] == theirs[-1] and ours[-1].startswith("sequences of the batch: [")
    assert len(ours) == len(theirs)
    row, other = (
        next(line.split("|") for line in table if line.startswith("| decode - trainer"))
        for table in (ours, theirs)
    )
    assert row[2] == other[2], "tokens"
    assert float(row[3]) == pytest.approx(float(other[3]), rel=0.02) and float(row[3]) > 1e-3
