"""Two runs from one seed on a real server in its deterministic mode: the same metrics."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_stare.config import dump
from tests.rollout.sglang.test_sglang_run import run
from tests.rollout.sglang.world import NEWER, VERIFY
from tests.small_run import rows_of, small_config

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(not NEWER, reason="0.5.9 forgets its seeds"),
]
STEPS = 30


def rows_of_a_run(directory: Path, name: str, *settings: str) -> list[dict[str, float]]:
    common = ("rollout.engine=sglang", f"train.num_rollout={STEPS}", "sglang.sync_timeout=120")
    config = small_config(directory, *common, VERIFY, f"run.dir={directory / name}", *settings)
    dump(config, directory / f"{name}.yaml")
    done = run([sys.executable], "train", str(directory / f"{name}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    return rows_of(config)


@pytest.mark.parametrize("asynchrony", ["on_policy", "one_step_off"])
def test_two_runs_with_one_seed_are_equal(asynchrony: str, tmp_path: Path):
    settings = ("sglang.deterministic=true", f"rollout.asynchrony={asynchrony}")
    one, other = (rows_of_a_run(tmp_path, name, *settings) for name in ("one", "other"))
    assert len(one) == STEPS and len({row["surprisal"] for row in one}) == STEPS
    for first, second in zip(one, other, strict=True):
        assert first == second
