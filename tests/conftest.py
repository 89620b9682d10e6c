"""Hooks of every test run, and fixtures for tests of several folders."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression

from megatron_stare.config import Config
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology
from tests.distributed import PRELOADED
from tests.nullcuda.branches import watch
from tests.paths import ROOT

TRAINERS_PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
AGENTS_PYTHON = ROOT / ".venv-agents" / "bin" / "python"
SGLANG_PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))

_threads_kept = 0  # after the last collection of garbage
MARKS = ("gpu", "nullcuda", "slurm", "sglang", "trainers", "agents", "browser", "slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file none of whose tests the run's `-m` selects: to import all files takes as
    long as many tests.
    """
    selection = config.option.markexpr
    if not selection or not collection_path.match("test_*.py"):
        return None
    with contextlib.suppress(SyntaxError):  # pytest reports it later
        selected = Expression.compile(selection).evaluate
        names = marks_in(collection_path)
        sizes = range(len(names) + 1)
        of_a_test = itertools.chain(*(itertools.combinations(names, size) for size in sizes))
        return None if any(selected(marks.__contains__) for marks in of_a_test) else True
    return None


@cache
def marks_in(file: Path) -> tuple[str, ...]:
    """The marks that tests of a file may have, by its text."""
    text = file.read_text(encoding="utf-8")
    chosen = "getattr(pytest.mark, " in text  # by a table
    return tuple(name for name in MARKS if chosen or f"mark.{name}" in text)


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
        its = {mark.name for mark in item.iter_markers()}
        for marker in MARKS:
            if marker in its and marker not in marks_in(item.path):
                raise pytest.UsageError(
                    f"{item.path} does not name mark.{marker} of {item.name}: "
                    f"`pytest -m {marker}` would not find the file"
                )
        for marker, reason in missing.items():
            if reason and marker in its:
                item.add_marker(pytest.mark.skip(reason=reason))
    asking = [item for item in items if item.path.name == "test_branches.py"]
    if (
        asking and not missing["nullcuda"]
    ):  # last, because it checks the branches that all other tests have entered
        items[:] = [item for item in items if item not in asking] + asking
        watch()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Cut the traceback off an exception that is a parameter and was raised: pytest keeps the
    parameter to the end, and with it the test's process groups, whose threads wake 100 times a
    second.
    """
    parameters = getattr(item, "callspec", None)
    for value in parameters.params.values() if parameters else ():
        if isinstance(value, BaseException):
            value.__traceback__ = value.__context__ = value.__cause__ = None


def pytest_runtest_logfinish() -> None:
    """Collect garbage where tests left many threads: process groups in cycles, of which a training
    run leaves twenty, have threads of gloo that wake 100 times a second.
    """
    global _threads_kept
    if threads() > _threads_kept + 100:
        gc.collect()
        _threads_kept = threads()


def threads() -> int:
    """The threads of this process, those without Python too; 0 where the system lists none."""
    place = Path("/proc/self/task")
    return len(os.listdir(place)) if place.is_dir() else 0


def pytest_collection_finish() -> None:
    """Collections of garbage, of which every training run makes some, leave out the objects of all
    imports and tests: each would visit them for half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> Iterator[None]:
    """A process has one fork server, with the imports that its first caller names. The worker
    processes of a run name fewer than ranks and commands need, each of which would then import the
    rest for seconds.
    """

    def preload(*_: object) -> None:
        forkserver.set_forkserver_preload(PRELOADED)

    with pytest.MonkeyPatch.context() as patch:
        if not (os.environ.get("NULLCUDA_LIBRARY") or torch.cuda.is_available()):
            patch.setattr(ForkServerContext, "set_forkserver_preload", preload)
        yield


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
