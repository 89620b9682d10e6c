"""slurm/gpuday.sbatch."""

from __future__ import annotations

import json

import pytest

from megatron_stare.commands.gpuday.stages import kept
from tests.paths import ROOT

pytestmark = pytest.mark.slurm


def test_a_node_is_accepted_by_a_job(cluster):
    place = cluster.folder / "day"
    words = ("--rehearse", "--stages", "K3", "--output", str(place))
    job = cluster.submit("--mem=1G", "gpuday", *words)
    job.ended()
    assert "K3: finished" in job.text
    assert json.loads((place / "K3.json").read_text())["status"] == "finished"


@pytest.mark.slow  # up to ten minutes
def test_two_nodes_are_accepted_by_k10(cluster):
    """K10, started where jobs are submitted."""
    place = cluster.folder / "submitted"
    python = ROOT / ".venv" / "bin" / "python"
    words = ("gpuday", "--rehearse", "--stages", "K10", "--output", str(place))
    options = {"SBATCH_GPUS_PER_NODE": "0", "SBATCH_MEM_PER_NODE": "1G"}
    command = [str(python), "-m", "megatron_stare", *words]
    # It ends with 1, because K0 misses the driver of both nodes.
    cluster.call("bash", "-c", '"$@" || [ $? = 1 ]', "bash", *command, **options)
    result = kept(place, "K10")
    assert result is not None and result.status == "finished"
    rows = {row.what: row.verdict for row in result.rows}
    assert {"2 nodes accepted", "every step once", "between the nodes"} <= rows.keys()
    assert {what for what, verdict in rows.items() if verdict == "FAIL"} == {"K0 on n1", "K0 on n2"}
    assert rows["K5 on n1"] == rows["K5 on n2"] == "OK"
