"""Real hangs of real ranks: stopped, elsewhere than the others, held in C with the interpreter
lock; and a long wait that is none.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_stare.config import RunConfig
from megatron_stare.loop.watchdog import HUNG, Watchdog
from megatron_stare.reporting import heartbeat
from tests.distributed import fork_server

TIMEOUT = 15.0  # a fifth of it is the margin on a busy machine: 3 s
WORLD = 3  # rank 1 is at fault
SCENARIOS = ("stopped", "elsewhere", "held", "failing", "waiting", "alone", "again")
PATIENCE_SECONDS = 120.0


def read_a_row_that_never_comes() -> None:
    time.sleep(1000)


def match_for_years() -> bool:
    """Backtracks without giving up the interpreter lock."""
    return bool(re.match(r"(a|aa|aaa)+$", "a" * 90 + "b"))


def go_wrong(scenario: str) -> None:
    time.sleep(TIMEOUT / 5)  # a few beats: of who is silent, the others know the last one
    if scenario == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif scenario in ("elsewhere", "alone", "again"):
        read_a_row_that_never_comes()
    elif scenario == "held":
        match_for_years()
    elif scenario == "failing":
        raise ValueError("no more rows\nthan these")
    elif scenario == "waiting":
        for _ in range(21):
            heartbeat.moved()
            time.sleep(TIMEOUT / 15)


def leave_an_old_report(file: Path, rank: int) -> None:
    """What the same command left when it hung before; there before any rank looks."""
    if rank == 0:
        file.parent.mkdir(exist_ok=True)
        file.write_text("hang: of an earlier start")
    while not (file.exists() or file.with_suffix(".old").exists()):
        time.sleep(0.01)


def one_rank(scenario: str, rank: int, world: int, folder: Path) -> None:
    os.dup2(os.open(folder / f"stderr_{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_PORT=str(folder))  # one start of one run
    guard = Watchdog(RunConfig(dir=str(folder), hang_timeout=TIMEOUT))
    if scenario == "again":
        leave_an_old_report(guard.report_file, rank)
    with guard as watchdog:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=PATIENCE_SECONDS),
        )
        with watchdog.naming_failures():
            for step in range(1, 4):
                heartbeat.start_step(step)
                with heartbeat.phase("rollout"):
                    if step == 3 and rank == min(1, world - 1):
                        go_wrong(scenario)
                with heartbeat.phase("update"):
                    dist.all_reduce(torch.ones(2))
    os._exit(0)


class Ended:
    """The exit codes of a scenario's ranks, and their files."""

    def __init__(self, folder: Path, codes: list[int | None]) -> None:
        self.folder, self.codes = folder, codes
        self.stderr = [(folder / f"stderr_{rank}").read_text() for rank in range(len(codes))]
        reports = list((folder / "ranks").glob("hang_*.txt"))
        assert len(reports) <= 1
        self.report = reports[0].read_text() if reports else ""

    @property
    def headline(self) -> str:
        return self.report.partition("\n")[0]

    def of_rank(self, rank: int) -> str:
        return re.search(rf"^rank {rank}\b.*(\n .*)*", self.report, re.MULTILINE)[0]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All scenarios side by side: what they take is waiting."""
    context, running = fork_server(), {}
    for scenario in SCENARIOS:
        folder = tmp_path_factory.mktemp(scenario)
        world = 1 if scenario == "alone" else WORLD
        ranks = [
            context.Process(target=one_rank, args=(scenario, rank, world, folder), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        running[scenario] = folder, ranks
    return {scenario: Ended(folder, _codes(ranks)) for scenario, (folder, ranks) in running.items()}


def _moves(process: Any) -> bool:
    """Whether the process has not ended and is not stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_alive() and psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    return False


def _codes(ranks: list[Any]) -> list[int | None]:
    """Their exit codes; None of a stopped one, which only a launcher can end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(_moves(process) for process in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


def test_a_stopped_rank_is_named_by_the_others(ended):
    hang = ended["stopped"]
    assert hang.codes == [HUNG, None, HUNG]
    found = re.match(
        r"hang: rank 1 has been silent for ([\d.]+) s, last in (.*?): (.*) \(run", hang.headline
    )
    assert found[2] == "step 3, rollout" and found[3] == "its process is stopped (SIGSTOP)"
    assert float(found[1]) <= TIMEOUT
    assert "step 3, update: has stood still for" in hang.of_rank(0)
    assert "s in all_reduce" in hang.of_rank(0) and "test_watchdog.py" in hang.of_rank(2)
    # of the rank itself: where it was when it was last heard of
    assert re.search(r"last heard of:\n +MainThread:\n", hang.of_rank(1))


def test_a_rank_outside_of_the_collective_is_named_by_all(ended):
    hang = ended["elsewhere"]
    assert hang.codes == [HUNG] * WORLD
    assert "the others wait for rank 1 (step 3, rollout: read_a_row" in hang.headline
    assert float(re.search(r"moved for ([\d.]+) s", hang.headline)[1]) <= TIMEOUT
    assert re.search(r"MainThread:\n +\S+test_watchdog.py:\d+ in read_a_row", hang.of_rank(1))
    assert "s in all_reduce\n" in hang.of_rank(0) and "s in all_reduce\n" in hang.of_rank(2)


def test_a_rank_that_holds_the_interpreter_lock_is_dumped_in_c(ended):
    hang = ended["held"]
    assert hang.codes[0] == hang.codes[2] == HUNG
    assert "rank 1 has been silent" in hang.headline and "held in a call of C" in hang.headline
    assert "in match_for_years" in hang.of_rank(1) and "in go_wrong" in hang.of_rank(1)


def test_the_report_is_printed_by_one_rank_and_named_by_the_others(ended):
    for scenario in ("stopped", "elsewhere", "held"):
        texts = ended[scenario].stderr
        assert sum(text.startswith("hang: ") for text in texts) == 1
        assert (
            sum("the run hangs: see " in text for text in texts)
            == len([code for code in ended[scenario].codes if code == HUNG]) - 1
        )


def test_a_single_process_reports_its_hang(ended):
    hang = ended["alone"]
    assert hang.codes == [HUNG]
    assert (
        "all are in read_a_row_that_never_comes, no collective (step 3, rollout)" in hang.headline
    )


def test_the_report_of_an_earlier_hang_is_kept_and_ends_no_later_start(ended):
    hang = ended["again"]
    assert hang.codes == [HUNG] * WORLD
    assert sum(text.startswith("hang: ") for text in hang.stderr) == 1
    (old,) = (hang.folder / "ranks").glob("hang_*.old")
    assert old.read_text() == "hang: of an earlier start"
    assert "the others wait for rank 1 (step 3, rollout: read_a_row" in hang.headline


def test_the_first_failure_is_named_where_it_happens(ended):
    codes, stderr = ended["failing"].codes, ended["failing"].stderr
    assert all(codes) and HUNG not in codes
    found = re.search(
        r"^failed: rank 1 on (\S+) \((.*)\) at ([\d.]+): (.*)$", stderr[1], re.MULTILINE
    )
    assert found[2] == "step 3, rollout" and found[4] == "ValueError: no more rows"
    for other in (0, 2):
        later = re.search(
            rf"^failed: rank {other} on .* at ([\d.]+): ", stderr[other], re.MULTILINE
        )
        assert float(found[3]) < float(later[1])


def test_waiting_for_an_active_rank_is_not_a_hang(ended):
    assert ended["waiting"].codes == [0] * WORLD
    assert not ended["waiting"].report
