"""slurm/gpuday.sbatch."""

from __future__ import annotations

import json

import pytest

from megatron_stare.commands.gpuday.results import read_result
from tests.paths import ROOT

pytestmark = pytest.mark.slurm


def test_a_node_is_accepted_by_a_job(cluster):
    place = cluster.folder / "day"
    words = ("--rehearse", "--stages", "K3", "--output", str(place))
    job = cluster.submit("--mem=1G", "gpuday", *words)
    job.ended()
    assert "K3: finished" in job.text
    assert json.loads((place / "K3.json").read_text())["status"] == "finished"


def test_two_nodes_are_accepted_and_a_run_moves_on(cluster, monkeypatch):
    """K10, started where jobs are submitted."""
    place = cluster.folder / "submitted"
    python = ROOT / ".venv" / "bin" / "python"
    words = ("gpuday", "--rehearse", "--stages", "K10", "--output", str(place))
    options = {"SBATCH_GPUS_PER_NODE": "0", "SBATCH_MEM_PER_NODE": "1G"}
    cluster.call(str(python), "-m", "megatron_stare", *words, **options)
    result = read_result(place, "K10")
    assert result is not None and result.status == "finished" and not result.faulty
    rows = {row.what for row in result.rows}
    assert {"2 nodes accepted", "every step once"} <= rows
    assert sum(row.startswith("K5 on ") for row in rows) == 2
