"""One cluster for all tests, and one run without faults that the other runs are compared with."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, Run

FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[str]:
    """For the suite's last lines."""
    return request.config.stash.setdefault(FIGURES, [])


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, figures: list[str]) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), figures).running() as cluster:
        yield cluster


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures; no test asserts them, because they depend on the machine."""
    for figure in terminalreporter.config.stash.get(FIGURES, []):
        terminalreporter.write_line(f"slurm: {figure}")


@pytest.fixture(scope="session")
def calm(cluster: Cluster) -> Run:
    """A run on two nodes without a fault."""
    begun = time.monotonic()
    job, run = cluster.train("calm", "--nodes=2")
    job.until(run.has(1))
    cluster.note("two nodes, submission to the first step", time.monotonic() - begun)
    job.ended()
    cluster.note("two nodes, submission to the end of 10 steps", time.monotonic() - begun)
    assert len(run.rows()) == 10
    return run
