"""The suggested layout fits, and costs no more than the one that was asked about."""

from __future__ import annotations

import pytest

from megatron_stare.config import UserError, override
from megatron_stare.planning.plan import changes, make_plan, suggest
from megatron_stare.recipes import CLUSTERS, Cluster, find_recipe


def test_a_suggestion_fits_and_is_cheaper() -> None:
    name = "short_cot_7b"
    config, cluster = find_recipe(name), CLUSTERS[name]
    found = suggest(config, cluster)
    assert not found.faults and found.gpu_hours <= make_plan(config, cluster).gpu_hours
    words = changes(config, found)
    again = make_plan(override(config, words), found.cluster)
    assert again.config == found.config and again.gpu_hours == found.gpu_hours
    apart = override(config, ["sglang.colocated=false", "sglang.sync_method=broadcast"])
    back = suggest(apart, Cluster(4, 4))  # finds the trainer's GPUs again
    assert back.config.sglang.colocated and back.cluster.rollout_gpus == 0


def test_no_suggestion_fits_a_model_that_is_too_large() -> None:
    with pytest.raises(UserError, match=r"no layout of models/Qwen2\.5-32B fits 2 GPUs"):
        suggest(find_recipe("short_cot_32b"), Cluster(2, 8))
