"""Hooks of every test run, and fixtures for tests of several folders."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_stare.config import Config
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from tests.nullcuda.branches import watch
from tests.paths import ROOT

TRAINERS_PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
AGENTS_PYTHON = ROOT / ".venv-agents" / "bin" / "python"
SGLANG_PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose CUDA device, SGLang server or other trainers are missing; say why."""
    missing = {
        "nullcuda": ""
        if os.environ.get("NULLCUDA_LIBRARY")
        else "not on the null device: run `make nullcuda`, or tools/nullcuda/run pytest ...",
        "gpu": "" if torch.cuda.is_available() else "no GPU here",
        "sglang": ""
        if os.access(SGLANG_PYTHON, os.X_OK)
        else f"no {SGLANG_PYTHON}: run `make sglang`",
        "slurm": ""
        if shutil.which("slurmctld") and os.geteuid() == 0
        else "no Slurm here, or no root: run `make slurm-test`",
        "agents": "" if AGENTS_PYTHON.is_file() else f"no {AGENTS_PYTHON}: run `make agents`",
        "trainers": ""
        if os.access(TRAINERS_PYTHON, os.X_OK)
        else f"no {TRAINERS_PYTHON}: run `make trainers`",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    asking = [item for item in items if item.path.name == "test_branches.py"]
    if (
        asking and not missing["nullcuda"]
    ):  # last, because it checks the branches that all other tests have entered
        items[:] = [item for item in items if item not in asking] + asking
        watch()


@pytest.fixture
def topology() -> Iterator[Topology]:
    """One process, one group of each kind."""
    yield topologies.start(Config().policy)
    topologies.stop()


@pytest.fixture
def ahead() -> Iterator[None]:
    """As root: processes that the test starts have a higher priority than those of other tests."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """Fill a file system up to `leave` bytes; the path of the file that fills it."""
    state = os.statvfs(place)
    filler = place / "filler"
    filler.write_bytes(bytes(state.f_bavail * state.f_frsize - leave))
    return filler
