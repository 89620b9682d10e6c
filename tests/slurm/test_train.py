"""slurm/train.sbatch on a real Slurm, without and with faults."""

from __future__ import annotations

import re
import time

import pytest

from tests.slurm.cluster import SLOWNESS, Cluster, Job, Run

pytestmark = pytest.mark.slurm
AT_ONCE = "--nodes=2 --signal=B:USR1@60"


def resumed(cluster: Cluster, job: Job, run: Run, calm: Run, what: str) -> None:
    """The job was requeued once, continued after its last checkpoint, and equals the calm run."""
    job.until(lambda: job["Restarts"] == "1")
    begun, before = time.monotonic(), len(run.rows())
    assert before < 10
    job.until(run.has(before + 1))
    cluster.note(f"{what}: requeued to the next step", time.monotonic() - begun)
    job.ended()
    assert job["Restarts"] == "1"
    assert run.rows() == calm.rows()
    started = (job.logs(1) / "rank_00000.log").read_text()
    assert "stare   1/10" not in started and "stare  10/10" in started


def test_one_node_trains_as_two_nodes_do(cluster, calm):
    job, run = cluster.train("one", "--nodes=1")
    job.ended()
    assert "trainers: n1;" in job.text
    assert len(run.rows()) == 10
    assert all(row["skipped"] == 0 for row in calm.rows()), "every step moved the weights"
    # Sums are rounded differently, which eventually changes a sampled token.
    for one, two in zip(run.rows()[:3], calm.rows()[:3], strict=True):
        assert one["entropy"] == pytest.approx(two["entropy"], rel=1e-4)
        assert one["response_length"] == two["response_length"]


def test_a_preempted_run_is_requeued_and_resumes_exactly(cluster, calm):
    job, run = cluster.train("preempted", AT_ONCE, **{SLOWNESS: "0.1"})
    job.until(run.has(2))
    urgent = "--nodes=3 --partition=urgent --output=/dev/null --wrap=hostname"
    cluster.call("sbatch", *urgent.split())
    resumed(cluster, job, run, calm, "preempted")
    assert "asked to stop: saving" in job.text and "stopped on a signal; requeued" in job.text


@pytest.mark.slow
def test_a_run_at_its_time_limit_is_requeued_and_resumes_exactly(cluster, calm):
    # Slurm looks at time limits every half a minute. The job has nine minutes to save: a machine
    # under load does not make it meet its limit.
    job, run = cluster.train(
        "limited", "--nodes=2 --time=600 --signal=B:USR1@600", **{SLOWNESS: "0.3"}
    )
    job.until(run.has(2))
    used = [int(part) for part in job["RunTime"].split(":")]
    limit = used[0] * 60 + used[1] + 10
    cluster.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
    job.until(lambda: "stopped on a signal; requeued" in job.text)
    cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=600")
    resumed(cluster, job, run, calm, "time limit")


def test_a_run_that_loses_a_node_continues_on_another(cluster, calm):
    job, run = cluster.train("lost", AT_ONCE, **{SLOWNESS: "0.1"})
    job.until(run.has(2))
    assert job["NodeList"] == "n[1-2]"
    cluster.program("kill-node", "n2")
    resumed(cluster, job, run, calm, "lost node")
    assert job["NodeList"] == "n[1,3]"
    cluster.program("start-node", "n2")


@pytest.mark.slow
def test_a_hang_is_named_and_the_run_resumes_exactly(cluster, calm):
    job, run = cluster.train("hung", AT_ONCE, "run.hang_timeout=30", **{SLOWNESS: "0.1"})
    job.until(run.has(2))
    begun = time.time()
    cluster.signal_rank(job, 1, "n2", "STOP")
    job.until(lambda: "hang: rank 1 has been silent" in job.text)
    report = next((run.directory / "ranks").glob("hang_*.txt"))
    cluster.note("hang of 30 s: stopped to the report", report.stat().st_mtime - begun)
    resumed(cluster, job, run, calm, "hang")
    text = job.text
    # On another node, whose processes are not visible here.
    assert re.search(
        r"silent for [\d.]+ s, last in step \d+, .*: it, or its host n2, is gone", text
    )
    assert re.search(r"rank 0 on n1, pid \d+: step \d+, .* has stood still", text)
    assert "the ranks hung; requeued" in text


def test_the_rank_that_fails_first_is_named_with_its_log(cluster):
    job, run = cluster.train("killed", AT_ONCE, **{SLOWNESS: "0.1"})
    job.until(run.has(1))
    cluster.signal_rank(job, 1, "n2", "KILL")
    job.ended("FAILED")
    found = re.search(r"rank (\d+) failed first, .*; the end of (\S+):\n(.*)", job.text, re.DOTALL)
    assert found[1] == "1" and found[2] == str(job.logs(0) / "rank_00001.log")
    assert "rank 1 on n2 was killed by SIGKILL" in found[3]
    assert job["Restarts"] == "0"


def test_a_node_that_is_not_healthy_ends_the_job_before_anything_starts(cluster):
    job, run = cluster.train("unhealthy", "--nodes=2", LEAST_DISK_MIB="1000000000")
    job.ended("FAILED")
    for node in ("n1", "n2"):
        assert re.search(
            rf"{node}: \S+/attempt_0 has \d+ MiB free, fewer than 1000000000", job.text
        )
    assert not run.directory.exists()
