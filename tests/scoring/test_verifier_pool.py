"""The pool: order, deadlines, crashes, floods of memory, retries,
and that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from megatron_stare.config import UserError
from megatron_stare.scoring.verdict import Sample, Verdict
from megatron_stare.scoring.verifier_pool import VerifierPool, _VerifierProcess
from tests.killed_at_start import MODULE, killed, write_module

CASES = "tests.scoring.verifier_cases"
SPECS = {name: (f"{CASES}.{name}", {}) for name in ("obedient", "modules", "pid")}


@contextlib.contextmanager
def pool_of(
    processes: int = 2, deadline: float = 30.0, memory_mib: int = 256
) -> Iterator[VerifierPool]:
    with contextlib.closing(VerifierPool(SPECS, processes, deadline, memory_mib)) as pool:
        yield pool


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    with pool_of() as made:
        yield made


def obey(
    pool: VerifierPool, *orders: str, label: str = "right", mark: Path | None = None
) -> list[Verdict]:
    return pool.judge("obedient", [Sample(order, label, {"mark": str(mark)}) for order in orders])


def gone(pid: int) -> bool:
    """Whether a process no longer runs; a zombie has ended too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true; patient, for the machine may be busy."""
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_verdicts_come_in_order_from_persistent_processes(pool: VerifierPool) -> None:
    orders = [f"{number}" for number in range(500)]
    assert [verdict.extracted for verdict in obey(pool, *orders)] == orders
    first = set(pool.pids())
    assert [verdict.extracted for verdict in obey(pool, *orders)] == orders
    assert set(pool.pids()) == first and len(first) == 2
    assert {
        int(verdict.extracted or 0) for verdict in pool.judge("pid", [Sample("", "")] * 64)
    } <= first


def test_no_process_runs_before_the_first_sample() -> None:
    with pool_of() as pool:
        assert pool.judge("obedient", []) == [] and pool.pids() == []


@pytest.mark.parametrize(
    ("order", "deadline", "reason"),
    [
        ("hang", 1.0, "no verdict within 1 s"),
        ("hang in C", 1.0, "no verdict within 1 s"),
        ("exit", 30.0, "exit code 3"),
        ("allocate", 30.0, "exit code 77"),
    ],
)
def test_a_fault_is_killed_tried_again_and_then_unverifiable(
    order: str, deadline: float, reason: str
) -> None:
    with pool_of(deadline=deadline) as pool:
        verdicts = obey(pool, "right", order, "wrong", "right")
    assert [verdict.verdict for verdict in verdicts] == [
        "correct",
        "unverifiable",
        "wrong",
        "correct",
    ]
    assert [verdict.kills for verdict in verdicts] == [0, 2, 0, 0]
    assert verdicts[1].value is None and reason in verdicts[1].reason


@pytest.mark.parametrize("order", ["hang", "exit", "allocate"])
def test_a_fault_that_does_not_come_again_costs_one_process(tmp_path: Path, order: str) -> None:
    with pool_of(deadline=2.0) as pool:
        [verdict] = obey(pool, f"once:{order}", label=f"once:{order}", mark=tmp_path / "mark")
    assert (verdict.verdict, verdict.kills) == ("correct", 1)


@pytest.mark.usefixtures("ahead")  # who gets no processor is not at fault
@pytest.mark.parametrize(
    ("order", "deadline", "reason"),
    [
        ("busy", 3.0, "no verdict within 3 s"),
        ("hang in C", 3.0, "no verdict within 3 s"),
        ("allocate", 30.0, "exit code 77"),
    ],
)
def test_a_response_that_exhausts_time_or_memory_is_wrong_at_the_first_kill(
    order: str, deadline: float, reason: str
) -> None:
    with pool_of(deadline=deadline) as pool:
        found = obey(pool, "right", f"own fault:{order}", "right")
    assert [verdict.verdict for verdict in found] == ["correct", "wrong", "correct"]
    assert [verdict.kills for verdict in found] == [0, 1, 0]
    assert (found[1].value, found[1].extracted) == (0.0, "a bomb") and reason in found[1].reason


@pytest.mark.parametrize(("order", "reason"), [("hang", "no verdict"), ("exit", "exit code 3")])
def test_a_crash_and_a_process_that_got_no_processor_are_never_the_response_s_fault(
    order: str, reason: str
) -> None:
    with pool_of(deadline=1.0) as pool:
        [verdict] = obey(pool, f"own fault:{order}")
    assert (verdict.verdict, verdict.kills, verdict.value) == ("unverifiable", 2, None)
    assert reason in verdict.reason


@pytest.mark.parametrize("deadlines", [1, 3])
def test_a_process_that_waits_for_a_processor_has_further_deadlines(
    deadlines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processor time stands still at every look; after some deadlines it ends by itself."""
    looks, order = 0, "busy until marked"

    def look(process: object) -> float:
        nonlocal looks
        looks += 1
        if looks > deadlines:  # the first look comes before the first deadline
            (tmp_path / "mark").touch()
        return 0.0

    monkeypatch.setattr(_VerifierProcess, "_processor_seconds", look)
    with pool_of(processes=1, deadline=1.0) as pool:
        [verdict] = obey(pool, order, label=order, mark=tmp_path / "mark")
    assert (verdict.verdict, verdict.kills) == ("correct", 0) and looks > deadlines


def test_a_process_that_never_gets_a_processor_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    never = lambda process: looks.append(process) or 0.0  # noqa: E731
    monkeypatch.setattr(_VerifierProcess, "_processor_seconds", never)
    with pool_of(processes=1, deadline=0.2) as pool:
        [verdict] = obey(pool, "own fault:busy")
    assert (verdict.verdict, verdict.kills) == ("unverifiable", 2)
    assert len(looks) <= 2 * (1 + 5), "two attempts, a look before each and at five deadlines"


@pytest.mark.parametrize(("state", "waits"), [("R", True), ("D", True), ("S", False), ("T", False)])
def test_a_process_that_waits_for_a_disk_is_not_stuck(
    state: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first import from a network file system takes minutes."""
    monkeypatch.setattr(Path, "read_bytes", lambda path: f"7 (a) b) {state} 1 7".encode())
    process = object.__new__(_VerifierProcess)
    process.process = Mock(pid=7)
    assert process._is_runnable() is waits


def test_many_faults_are_judged_one_by_one() -> None:
    with pool_of(processes=1) as pool:
        verdicts = obey(pool, *["exit", "right"] * 3)
        assert [verdict.verdict for verdict in verdicts] == ["unverifiable", "correct"] * 3
        assert sum(verdict.kills for verdict in verdicts) == 6


def test_an_exception_is_unverifiable_without_a_kill(pool: VerifierPool) -> None:
    before = obey(pool, "right")
    [verdict, after] = obey(pool, "raise", "right")
    assert (verdict.verdict, verdict.kills) == ("unverifiable", 0)
    assert verdict.reason == "ZeroDivisionError: on purpose"
    assert after.verdict == before[0].verdict == "correct"


def test_the_output_of_a_verifier_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with pool_of() as pool:
        obey(pool, "print")
    out, err = capfd.readouterr()
    assert out == "" and "a verifier that talks" in err


def test_workers_import_neither_torch_nor_the_config() -> None:
    specs = {**SPECS, "math": ("megatron_stare.scoring.mathematics.answers.math", {})}
    with contextlib.closing(VerifierPool(specs, 1, 30.0, 4096)) as pool:
        assert (
            pool.judge("math", [Sample("\\boxed{\\frac{\\pi}{2}}", "\\pi/2")])[0].verdict
            == "correct"
        )
        [verdict] = pool.judge("modules", [Sample("torch numpy pydantic transformers sympy", "")])
    assert verdict.extracted == "sympy"


def test_many_threads_share_a_pool(pool: VerifierPool) -> None:
    found: dict[int, list[str | None]] = {}

    def ask(number: int) -> None:
        orders = [f"{number}-{place}" for place in range(50)]
        found[number] = [verdict.extracted for verdict in obey(pool, *orders)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number}-{place}" for place in range(50)] for number in range(8)}


def test_close_in_mid_sample_leaves_no_process_and_no_waiting_caller() -> None:
    pool = VerifierPool(SPECS, 2, 1000.0, 1024)
    answers: list[Verdict] = []
    thread = threading.Thread(target=lambda: answers.extend(obey(pool, *["hang"] * 5)))
    thread.start()
    assert eventually(lambda: len(pool.pids()) == 2)
    pids = pool.pids()
    pool.close()
    thread.join()
    assert [verdict.verdict for verdict in answers] == ["unverifiable"] * 5
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        obey(pool, "right")


def test_the_children_of_a_verifier_die_with_it() -> None:
    name = f"of-{os.getpid()}-{time.time_ns()}"
    with pool_of(deadline=2.0) as pool:
        obey(pool, "leave a child", label=name)

    def patients() -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get("PATIENT") == name
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.pid)
        return found

    assert eventually(lambda: patients() == [])


@pytest.mark.parametrize("order", ["right", "hang in C"])
def test_workers_die_with_a_parent_that_is_killed(order: str) -> None:
    program = f"""
from tests.scoring.test_verifier_pool import SPECS, obey
from megatron_stare.scoring.verifier_pool import VerifierPool
import threading, time
pool = VerifierPool(SPECS, 2, 1000.0, 1024)
threading.Thread(target=lambda: obey(pool, *[{order!r}] * 64), daemon=True).start()
while len(pool.pids()) < 2:
    time.sleep(0.01)
time.sleep(0.5)
print(*pool.pids(), flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and not any(gone(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert all(eventually(lambda pid=pid: gone(pid)) for pid in pids)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ((f"{CASES}.absent", {}), "has no attribute 'absent'"),
        (("no.such.module", {}), "No module named 'no'"),
    ],
)
def test_a_verifier_that_cannot_be_loaded_is_an_error_at_once(
    spec: tuple[str, dict[str, str]], reason: str
) -> None:
    with contextlib.closing(VerifierPool({"it": spec}, 2, 30.0, 1024)) as pool:
        with pytest.raises(UserError, match=reason):
            pool.judge("it", [Sample("", "")] * 200)
        with pytest.raises(UserError, match=reason):
            pool.judge("it", [Sample("", "")])


@pytest.mark.parametrize("kills", [2, 3])
def test_a_process_that_is_killed_before_its_first_sample_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """As by a system that is short of memory for a moment; for ever, it is an error."""
    verifier = "def verifier(response, label, metadata):\n    return float(response == label)\n"
    write_module(tmp_path, kills, verifier)
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = (f"{MODULE}.verifier", dict[str, str]())
    with contextlib.closing(VerifierPool({"it": spec}, 1, 30.0, 1024)) as pool:
        if kills == 3:
            with pytest.raises(UserError, match=r"ended \(exit code -9\) before the first sample"):
                pool.judge("it", [Sample("a", "a")])
        else:
            [verdict] = pool.judge("it", [Sample("a", "a")])
            assert verdict.verdict == "correct" and verdict.kills == 0
    assert killed(tmp_path) == kills


def test_metadata_that_cannot_be_sent_to_a_process_is_an_error(pool: VerifierPool) -> None:
    with pytest.raises(UserError, match="pickle"):
        pool.judge("obedient", [Sample("right", "right", {"function": lambda: 0})])
