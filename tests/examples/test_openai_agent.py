"""The agent of the tutorial, trained for a step by the tutorial's command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = [pytest.mark.agents, pytest.mark.slow]
PAGE = ROOT / "docs" / "tutorials" / "agent.md"


def test_the_tutorials_command_trains_the_unmodified_agent(tmp_path: Path):
    """Fewer steps of the cold start: the model calls seldom, and its answers are wrong."""
    (line,) = [each for each in PAGE.read_text().splitlines() if "agents.function=examples" in each]
    words = shlex.split(line)[1:]
    more = ["cold_start.steps=30", "train.num_rollout=2", "rollout.rollout_batch_size=2"]
    more += ["rollout.n_samples_per_prompt=4", "rollout.dynamic_sampling=false"]
    more += ["evaluation.eval_interval=0", f"run.dir={tmp_path}/run"]
    subprocess.run([sys.executable, *words, *more], cwd=ROOT, check=True, timeout=600)
    (file,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(row) for row in file.read_text().splitlines()]
    trained = [row for row in rows if "episode/calls" in row]
    assert len(trained) == 2
    for row in trained:
        assert row["unverifiable"] == 0 and row["sequences"] == 8
        assert row["episode/sequences"] == 1 <= row["episode/calls"]
        assert row["logprob_diff_max"] < 1e-3, "the policy is trained on the engine's tokens"
