"""The tool-use quickstart, shortened:
from a careless cold start to calls that come and come right.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stare.reporting.logbook import read_metrics
from tests.paths import ROOT


@pytest.mark.slow
def test_rl_teaches_a_tiny_model_to_use_the_calculator(tmp_path: Path):
    settings = (
        "train.num_rollout=24",
        "evaluation.eval_interval=24",
        "evaluation.n_samples_per_eval_prompt=2",
    )
    command = [
        sys.executable,
        "-m",
        "megatron_stare",
        "train",
        "tool_use_quickstart",
        f"run.dir={tmp_path}/run",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *settings],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run/seed0/stare/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 25))

    def change(key: str) -> tuple[float, float]:
        return statistics.fmean(row[key] for row in rows[:4]), statistics.fmean(
            row[key] for row in rows[-4:]
        )

    (calls, later_calls), (reward, later_reward), (void, later_void) = map(
        change, ("episode/tool_calls", "reward", "episode/void")
    )
    assert later_calls > calls + 0.05 and later_reward > reward + 0.1 and later_void < void
    assert all(row["logprob_diff_max"] < 1e-4 for row in rows), (
        "tool tokens or not, both sides see the same sequence"
    )
    assert rows[-1]["eval/heldout/avg_at_k"] > reward
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert "calculator" in summary["caveats"][0]
