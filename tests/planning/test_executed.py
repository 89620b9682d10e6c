"""The plan of every recipe against a rank of it that was really run (docs/null_ranks.json)."""

from __future__ import annotations

import pytest

from megatron_stare.planning.executed import executed
from megatron_stare.planning.machine import H100
from megatron_stare.recipes import CLUSTERS, find_recipe
from tests.paths import ROOT

RANKS = executed(ROOT / "docs")


def test_every_recipe_was_run_on_every_stage() -> None:
    """Else: tools/nullcuda/run .venv/bin/python benchmarks/null_ranks.py RECIPE"""
    stages = {(each.recipe, each.figures["stage"]) for each in RANKS}
    assert stages == {
        (name, stage)
        for name in CLUSTERS
        for stage in range(find_recipe(name).policy.pipeline_model_parallel_size)
    }


@pytest.mark.parametrize("rank", RANKS, ids=lambda rank: rank.recipe)
def test_plans_are_within_a_tenth_of_the_allocation(rank) -> None:
    assert rank.figures["transformer_engine"]
    assert rank.ratio == pytest.approx(1.0, abs=0.10)
    policy = find_recipe(rank.recipe).policy
    positions = rank.figures["positions"]
    assert 0.98 * policy.max_tokens_per_gpu <= positions <= policy.max_tokens_per_gpu
    for phase in rank.figures["phases"].values():
        assert phase["reserved_bytes"] < H100.usable_bytes
