"""The suggested layout fits, and costs no more than the one that was asked about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stare.config import UserError, override
from megatron_stare.planning.machine import H100
from megatron_stare.planning.plan import make_plan, placements
from megatron_stare.planning.suggest import _layouts, changes, suggest
from megatron_stare.planning.tables import plan_text
from megatron_stare.recipes import CLUSTERS, Cluster, find_recipe
from tests.policy.huggingface.test_families import PUBLISHED


def test_a_suggestion_fits_and_is_cheaper() -> None:
    name = "short_cot_7b"
    config, cluster = find_recipe(name), CLUSTERS[name]
    found = suggest(config, cluster)
    assert not found.faults and found.gpu_hours <= make_plan(config, cluster).gpu_hours
    words = changes(config, found)
    again = make_plan(override(config, words), found.cluster)
    assert again.config == found.config and again.gpu_hours == found.gpu_hours
    assert found.serving is not None and again.config.sglang.num_servers == found.serving.servers
    apart = override(config, ["sglang.colocated=false", "sglang.sync_method=broadcast"])
    back = suggest(apart, Cluster(4, 4))  # finds the trainer's GPUs again
    assert back.config.sglang.colocated and back.cluster.rollout_gpus == 0


def test_a_suggestion_has_the_runs_settings_and_mean_response() -> None:
    """loss.scope=sequence excludes context parallelism, which is tried for two GPUs."""
    config = override(find_recipe("short_cot_1_5b"), ["loss.scope=sequence"])
    found = suggest(config, Cluster(2, 0), response_tokens=1000)
    assert found.config.policy.context_parallel_size == 1 and found.tokens.response == 1000


def test_tensor_and_context_ranks_divide_the_heads_of_delta_nets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3.5-27B"]["config"]))
    config = override(find_recipe("short_cot_7b"), [f"policy.hf_checkpoint={tmp_path}"])
    split = {
        policy.tensor_model_parallel_size * policy.context_parallel_size
        for policy, _ in _layouts(config, 64, H100)
    }
    assert split == {1, 2, 4, 8, 16}, "16 heads of keys"


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("rollout.long_tail=restart", 0),  # not without on_policy
        (
            "sglang.colocated=false rollout.asynchrony=fully_async mismatch.correction=token_tis "
            "rollout.cache_over_versions=kept policy.offload_while_generating=false",
            0,  # not without fully_async
        ),
        ("sglang.colocated=false", 2),
    ],
)
def test_servers_are_not_planned_where_a_setting_forbids_them(words: str, count: int) -> None:
    config = override(find_recipe("short_cot_7b"), words.split())
    assert len(placements(config, Cluster(4, 4))) == count


def test_a_plan_says_how_many_servers_a_node_has_to_start() -> None:
    config = find_recipe("short_cot_7b")
    assert "num_servers" not in plan_text("", make_plan(config, Cluster(4, 0)))
    for gpus in (8, 16):  # one node and two
        text = plan_text("", make_plan(config, Cluster(gpus, 0)))
        assert "sglang.num_servers=4 starts another number: set sglang.num_servers=8" in text
    running = override(config, ["sglang.urls=[http://a:1]"])
    assert "num_servers" not in plan_text("", make_plan(running, Cluster(8, 0)))


def test_no_suggestion_fits_a_model_that_is_too_large() -> None:
    with pytest.raises(UserError, match=r"no layout of models/Qwen2\.5-32B fits 2 GPUs"):
        suggest(find_recipe("short_cot_32b"), Cluster(2, 8))
