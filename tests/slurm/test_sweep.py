"""slurm/sweep.sbatch: a task for every arm and seed."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import QUICKSTART, Job, Run

pytestmark = pytest.mark.slurm


def test_an_array_trains_every_arm_with_every_seed(cluster, calm):
    few = (*QUICKSTART, "train.num_rollout=2")
    sweep = {
        "SEEDS": "0 7",
        "ARMS": "as_it_is; lower loss.target_entropy=0.2",
        "SWEEP_DIR": str(cluster.folder / "sweep"),
    }
    first = cluster.submit("--array=0,3,4", "sweep", *few, **sweep)
    tasks = [Job(cluster, f"{first.number}_{number}", first.output) for number in (0, 3, 4)]
    tasks[0].ended()
    tasks[1].ended()
    tasks[2].ended("FAILED")
    assert "submit with --array 0-3" in first.text
    directory = cluster.folder / "sweep"
    rows = {
        name: Run(directory / name / f"seed{seed}", f"seed{seed}/stare").rows()
        for name, seed in (("as_it_is", 0), ("lower", 7))
    }
    assert [len(found) for found in rows.values()] == [2, 2]
    # The same seed on one node equals the run on two, up to rounding; another seed does not.
    assert rows["as_it_is"][0]["entropy"] == pytest.approx(calm.rows()[0]["entropy"], rel=1e-4)
    assert rows["lower"][0]["entropy"] != pytest.approx(calm.rows()[0]["entropy"], rel=1e-4)
