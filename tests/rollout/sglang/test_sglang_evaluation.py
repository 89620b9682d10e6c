"""An evaluation on a real server: the embedded engine's numbers,
found again instead of sampled again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.__main__ import main
from megatron_stare.config import dump
from megatron_stare.rollout.sglang.process import ServerProcess
from tests.rollout.sglang.proxy import Proxy
from tests.rollout.sglang.world import VERIFY
from tests.small_run import small_config

pytestmark = pytest.mark.sglang

# Two engines with random numbers of their own say the same; each problem is sampled once.
GREEDY = ("evaluation.per_set.held.temperature=0", "evaluation.per_set.held.n_samples=2")


def on(proxy: Proxy) -> tuple[str, ...]:
    """Settings of a run on the server after the proxy."""
    return (
        "rollout.engine=sglang",
        f"sglang.urls=[{proxy.url}]",
        "sglang.sync_method=tensor",
        VERIFY,
    )


def evaluated(
    directory: Path, checkpoint: Path, *settings: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The output of `evaluate`: the numbers and the problems."""
    paths = (
        f"policy.hf_checkpoint={checkpoint}",
        f"evaluation.eval_data.held={directory.parent}/problems.jsonl",
    )
    config = small_config(directory.parent, *paths, *GREEDY, f"run.dir={directory}", *settings)
    recipe = directory.with_suffix(".yaml")
    dump(config, recipe)
    assert main(["evaluate", str(recipe)]) == 0
    rows = (directory / "evaluation/problems.jsonl").read_text().splitlines()
    return json.loads((directory / "evaluation.json").read_text()), [
        json.loads(row) for row in rows
    ]


def test_a_server_evaluates_as_the_embedded_engine_does(
    server: ServerProcess, proxy: Proxy, checkpoint: Path, tmp_path: Path
):
    embedded = evaluated(tmp_path / "embedded", checkpoint)
    assert 0 < embedded[0]["eval/held/avg_at_k"] < 1
    assert evaluated(tmp_path / "served", checkpoint, *on(proxy)) == embedded
    assert proxy.seen["/generate"] == 36
    assert evaluated(tmp_path / "served", checkpoint, *on(proxy)) == embedded
    assert proxy.seen["/generate"] == 36, "finished rollouts are read, not sampled again"


def test_a_server_samples_from_the_candidates_that_top_k_leaves(
    proxy: Proxy, checkpoint: Path, tmp_path: Path
):
    """One candidate gives one response at any temperature; two give more."""
    settings = (*on(proxy), "evaluation.per_set.held.temperature=2")
    one = evaluated(tmp_path / "one", checkpoint, *settings, "evaluation.eval_top_k=1")
    embedded = evaluated(tmp_path / "embedded", checkpoint)
    assert one == embedded
    two = evaluated(tmp_path / "two", checkpoint, *settings, "evaluation.eval_top_k=2")
    assert two[0]["eval/held/k"] == 2 and two[1] != one[1]


def test_a_stop_string_ends_responses_of_both_engines_at_the_same_place(
    proxy: Proxy, checkpoint: Path, tmp_path: Path
):
    """The reward counts the bytes of a response, so the text of the stop must be in both."""
    free = evaluated(tmp_path / "free", checkpoint)
    files = (tmp_path / "free/evaluation/responses").rglob("*.jsonl")
    texts = [json.loads(line)["response"] for file in files for line in file.open()]
    inner = "".join(text[1:-1] for text in texts)  # so that it ends a response early
    stop = max(filter(str.isascii, sorted(set(inner))), key=inner.count)
    setting = f"rollout.stop=[{json.dumps(stop)}]"
    embedded = evaluated(tmp_path / "embedded", checkpoint, setting)
    assert embedded[0]["eval/held/response_length"] < free[0]["eval/held/response_length"]
    assert evaluated(tmp_path / "served", checkpoint, *on(proxy), setting) == embedded
