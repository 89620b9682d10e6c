"""The plan of every recipe against a rank of it that was really run (docs/null_ranks.json)."""

from __future__ import annotations

import json

import pytest

from megatron_stare.planning.machine import H100
from megatron_stare.recipes import CLUSTERS, find_recipe
from tests.paths import ROOT
from tools.pages.planner import FIGURES_NAME, Executed, executed

FIGURES = json.loads((ROOT / "docs" / FIGURES_NAME).read_text(encoding="utf-8"))
RECIPES = [recipe for recipe, ranks in FIGURES.items() for _ in ranks]


@pytest.fixture(scope="module")
def measured() -> list[Executed]:
    """Planned here, because every process of a parallel test run imports this file."""
    return executed(ROOT / "docs")


def test_every_recipe_was_run_on_every_stage(measured: list[Executed]) -> None:
    """Else: tools/nullcuda/run .venv/bin/python benchmarks/null_ranks.py RECIPE"""
    stages = {(each.recipe, each.figures["stage"]) for each in measured}
    assert stages == {
        (name, stage)
        for name in CLUSTERS
        for stage in range(find_recipe(name).policy.pipeline_model_parallel_size)
    }


@pytest.mark.parametrize("number", range(len(RECIPES)), ids=RECIPES)
def test_plans_are_within_a_tenth_of_the_allocation(measured: list[Executed], number: int) -> None:
    rank = measured[number]
    assert rank.figures["transformer_engine"]
    assert rank.ratio == pytest.approx(1.0, abs=0.10)
    policy = find_recipe(rank.recipe).policy
    positions = rank.figures["positions"]
    assert 0.98 * policy.max_tokens_per_gpu <= positions <= policy.max_tokens_per_gpu
    for phase in rank.figures["phases"].values():
        assert phase["reserved_bytes"] < H100.usable_bytes
