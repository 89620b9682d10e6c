"""Real SGLang servers as part of a job, across two of its nodes, and as a separate job."""

from __future__ import annotations

import pytest

from tests.paths import ROOT
from tests.slurm.cluster import Run

pytestmark = [pytest.mark.slurm, pytest.mark.sglang]
# One server for two nodes' worth of work; the model is the calm run's.
FEW = ("train.num_rollout=2", "sglang.start_timeout=300")


def served(cluster, calm, name: str) -> tuple[str, ...]:
    return (str(calm.arm / "config.yaml"), f"run.dir={cluster.folder / name}", *FEW)


def test_a_heterogeneous_job_trains_on_one_kind_of_node_and_serves_on_the_other(cluster, calm):
    job = cluster.submit(
        "--nodes=1", "train", *served(cluster, calm, "het"), more=": --nodes=1 --exclusive"
    )
    job.ended()
    run = Run(cluster.folder / "het", arm="")
    assert len(run.rows()) == 2 and run.rows()[-1]["engine_restarts"] == 0
    assert "servers: n" in job.text
    # the file with the servers' key is removed with the servers
    assert not list(job.logs(0).rglob("*.key.yaml"))


@pytest.mark.slow
def test_one_server_across_two_nodes_of_the_job(cluster, calm):
    nodes = {"ROLLOUT_NODES": "2", "NODES_PER_SERVER": "2", "SERVER_ARGS": "--tp-size 2"}
    job = cluster.submit("--nodes=3", "train", *served(cluster, calm, "across"), **nodes)
    job.ended()
    run = Run(cluster.folder / "across", arm="")
    assert len(run.rows()) == 2
    assert "servers: n2 n3" in job.text and job.text.count("http://") == 1


@pytest.mark.slow
def test_jobs_attach_to_the_servers_of_another(cluster, calm):
    key = {"SGLANG_API_KEY": "of-this-test"}
    serving = cluster.submit("--nodes=1", "serve_sglang", *served(cluster, calm, "serving"), **key)
    file = ROOT / f"serve-{serving.number}.urls"
    serving.until(file.exists)
    urls = file.read_text().strip()
    file.unlink()
    assert f"servers: {urls}" in serving.text
    small = ("evaluation.n_samples_per_eval_prompt=1", "evaluation.eval_max_response_len=4")
    attached = ("rollout.engine=sglang", f"sglang.urls=[{urls}]", "sglang.start_timeout=300")
    job = cluster.submit("--nodes=1", "evaluate", str(calm.arm), *small, *attached, **key)
    job.ended()
    cluster.call("scancel", serving.number)
