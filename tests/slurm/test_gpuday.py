"""slurm/gpuday.sbatch."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slurm


def test_a_node_is_accepted_by_a_job(cluster):
    place = cluster.folder / "day"
    words = ("--rehearse", "--stages", "K3", "--output", str(place))
    job = cluster.submit("--mem=1G", "gpuday", *words)
    job.ended()
    assert "K3: finished" in job.text
    assert json.loads((place / "K3.json").read_text())["status"] == "finished"
