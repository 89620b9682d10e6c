"""The acceptance kit: its runner, its report, and K0 on a machine without a driver."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from megatron_stare import system
from megatron_stare.__main__ import main
from megatron_stare.commands.gpuday import gpuday, kernels, node, rank_memory, runs, stages
from megatron_stare.commands.gpuday.gpuday import MACHINE, write_report
from megatron_stare.commands.gpuday.rows import Day, Measurement, at_least, at_most, within
from megatron_stare.commands.gpuday.stages import Result, Stage, find_stages, run_stages
from megatron_stare.config import UserError
from megatron_stare.planning.machine import H100, read_machine
from megatron_stare.planning.shapes import model_shape
from megatron_stare.reporting.logbook import METRICS_NAME, Alarm, append_alarm
from tests.commands.gpuday.stages_of_tests import FIRST, MODULE, SECOND, run_first


def day_of(place: Path, way: str, **settings: object) -> Day:
    return Day(place, 0, overrides=(way,), **settings)  # type: ignore[arg-type]


def test_a_stage_that_fails_keeps_its_rows_and_does_not_stop_the_next(tmp_path: Path) -> None:
    results = list(run_stages(day_of(tmp_path, "raises"), [FIRST, SECOND]))
    assert [result.status for result in results] == ["failed", "failed"]
    assert all("the cable is loose" in result.reason for result in results)
    assert results[0].rows == [at_least("rate", 3.0, 4.0, "GB/s", "node_rate")]
    assert results[0].faulty and (tmp_path / "K1.log").is_file()


def test_a_stage_whose_rank_fails_has_the_error_of_the_rank(tmp_path: Path) -> None:
    """And the rank had its environment from its first import on."""
    (result,) = run_stages(day_of(tmp_path, "fails on a rank"), [FIRST])
    said = "rank 0: ValueError: when this rank was loaded, the cable was loose"
    assert result.status == "failed" and said in result.reason


@pytest.mark.parametrize(
    ("way", "ending"),
    [
        ("hangs on a rank", signal.SIGTERM),
        ("hangs below", signal.SIGKILL),
        ("hangs in a call", signal.SIGKILL),
        pytest.param("hangs on a rank", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("hangs below", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("hangs in a call", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_what_a_stage_started_ends_when_the_kit_is_killed(
    way: str, ending: signal.Signals, tmp_path: Path
) -> None:
    day = day_of(tmp_path, way)
    kit = multiprocessing.get_context("spawn").Process(target=run_first, args=(day,))
    kit.start()
    deadline = time.monotonic() + 300
    try:
        while not (tmp_path / "rank").is_file() or not (tmp_path / "rank").read_text():
            assert kit.is_alive() and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(kit.pid or 0, ending)
        kit.join()
    wait_for_the_end(int((tmp_path / "rank").read_text()), deadline)


def wait_for_the_end(number: int, deadline: float) -> None:
    """Of a process that is no child of this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(number).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_last_line_of_an_output_is_not_that_of_torchruns_report() -> None:
    report = """E1130 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: 1)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
==================
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
==================
"""
    assert stages.last_line(f"step 1\nerror: no room\n\n{report}") == "error: no room"
    assert stages.last_line(report) == "=================="
    assert stages.last_line(" \n") == "no output"


def test_a_rehearsal_on_the_cpu_asks_for_no_gpu(tmp_path: Path) -> None:
    stage = dataclasses.replace(FIRST, on_cpu=True)
    day = dataclasses.replace(day_of(tmp_path, "skips"), gpus=1, rehearsal=True)
    (result,) = run_stages(day, [stage])
    assert (result.status, result.machine) == ("skipped", "no GPU")


def test_a_stage_that_hangs_is_ended_at_the_limit(tmp_path: Path) -> None:
    (result,) = run_stages(day_of(tmp_path, "hangs"), [dataclasses.replace(FIRST, limit=30.0)])
    assert result.status == "timed out" and "limit of 30 s" in result.reason
    assert [row.what for row in result.rows] == ["rate"]


def test_what_a_stage_started_ends_at_the_limit(tmp_path: Path) -> None:
    day = day_of(tmp_path, "hangs below")
    (result,) = run_stages(day, [dataclasses.replace(FIRST, limit=30.0)])
    assert result.status == "timed out"
    wait_for_the_end(int((tmp_path / "rank").read_text()), time.monotonic() + 20)


def test_a_stage_with_a_result_is_not_run_again_unless_asked(tmp_path: Path) -> None:
    (result,) = run_stages(day_of(tmp_path, "skips"), [FIRST])
    assert (result.status, result.reason) == ("skipped", "no second node")
    day = day_of(tmp_path, "true")
    (kept,) = run_stages(day, [FIRST])
    assert kept == result
    (again,) = run_stages(day, [FIRST], again=True)
    assert again.status == "finished" and not again.faulty


def test_a_stage_beyond_the_budget_or_the_gpus_is_not_started(tmp_path: Path) -> None:
    wide = Stage("K2", MODULE, (1, 1), 8, "a test")
    results = list(run_stages(day_of(tmp_path, "true"), [FIRST, wide], budget=1.0))
    assert [result.status for result in results] == ["unfinished", "skipped"]
    assert "--budget" in results[0].reason and "needs 8 GPUs; 0 are seen" in results[1].reason
    assert not list(tmp_path.glob("K*.json"))


def test_verdicts_follow_the_ratio() -> None:
    assert [at_least("a", value, 10, "s").verdict for value in (9, 7, 5)] == ["OK", "WARN", "FAIL"]
    assert [at_most("a", value, 10, "s").verdict for value in (11, 15, 25)] == [
        "OK",
        "WARN",
        "FAIL",
    ]
    assert within("a", float("nan"), 1.0).verdict == "FAIL"


def test_the_report_has_every_row_and_the_planner_reads_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day, rate = day_of(tmp_path, "true"), at_least("link", 3e11, 4e11, "B/s", "node_rate")
    found = Result("K0", "finished", 61.0, "8 x GPU", rows=[rate, Measurement("a|b", "c")])
    text = write_report(day, [found]).read_text()
    assert "| link | 4e+11 | 3e+11 | B/s | 0.75 | WARN |" in text and "| a/b |  | c |" in text
    assert "Rehearsal" not in text
    machine = read_machine(tmp_path / MACHINE)
    assert (machine.name, machine.node_rate) == ("8 x GPU", 3e11)
    assert machine.network_rate == H100.network_rate
    assert main(["plan", "short_cot_7b", "--machine", str(tmp_path / MACHINE)]) == 0
    assert "8 x GPU" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["8 x NVIDIA H100 80GB HBM3 (null)", "no GPU"])
def test_the_figures_of_a_machine_that_computes_nothing_say_so(name: str, tmp_path: Path) -> None:
    text = write_report(day_of(tmp_path, ""), [Result("K0", "finished", machine=name)]).read_text()
    assert "They say nothing of any GPU" in text
    assert read_machine(tmp_path / MACHINE).name == f"{name}, rehearsal"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("node_rat: 1", "node_rat is unknown.*node_rate"),
        ("node_rate: -1", "positive"),
        ("[", "read"),
    ],
)
def test_a_wrong_machine_file_is_refused(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=words):
        read_machine(file)


def test_without_a_driver_k0_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "DRIVER_FILE", tmp_path / "none")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("megatron_stare.debug.doctor.on_gpu", lambda: False)
    rows = itertools.takewhile(lambda row: row.what != "node", node.run(Day(tmp_path, 0)))
    found = {row.what: row for row in rows}
    driver, cuda = found["driver"], found["CUDA"]
    assert driver.verdict == cuda.verdict == "FAIL" and driver.expected == ">= 580"
    assert "no nvidia-smi; install NVIDIA's driver" in str(driver.measured)
    assert "no GPU is seen (torch was built for CUDA" in str(cuda.measured)


def test_a_warning_of_bash_is_no_fault_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "xx_XX.UTF-8")  # as a login from another machine leaves it
    whole, *rows = node._node(Day(tmp_path, 0))
    assert whole.verdict == "OK" and [row.what for row in rows] == ["Python.h"]


def test_k1_reports_failing_tests_as_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\n\n\n@pytest.mark.gpu\ndef test_it():\n    assert False\n"
    )
    monkeypatch.setattr(kernels, "checkout", lambda: tmp_path)
    row = next(kernels.right(Day(tmp_path, 0, rehearsal=True)))
    assert row.verdict == "FAIL" and "1 failed" in str(row.measured)


def test_a_recipe_that_fails_does_not_end_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter([MemoryError("no room"), None, None])

    def steps(*_: object) -> tuple[None, None, bool]:
        if error := next(outcomes):
            raise error
        return None, None, True

    day = Day(tmp_path, 0, rehearsal=True)
    for name, value in (("_answer", lambda: None), ("steps", steps)):
        monkeypatch.setattr(rank_memory, name, value)
    monkeypatch.setattr(rank_memory.topologies, "imagined", lambda *_: contextlib.nullcontext())
    failed, taken, again = rank_memory.run(day)
    assert failed.verdict == "FAIL" and failed.measured == "MemoryError: no room"
    assert taken.verdict == "OK" and taken.what == "short_cot_14b: two steps of rank 0 of 8"
    assert again.verdict == "OK" and "short_cot_7b, expandable" in again.what
    assert "no room" in capsys.readouterr().err


def test_a_run_of_a_stage_that_runs_again_has_no_earlier_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "model_of", lambda day: tmp_path)
    day = day_of(tmp_path, "run.seed=3")
    first = runs.ShortRun(day, "run", 3)
    first.directory.mkdir()
    (first.directory / METRICS_NAME).write_text('{"step": 1}\n')
    first.log.write_text("of the earlier run\n")
    assert len(first.rows()) == 1
    again = runs.ShortRun(day, "run", 3)
    assert again.rows() == [] and not again.log.exists()


def test_a_run_with_an_alarm_is_reported(tmp_path: Path) -> None:
    assert runs._without_alarm(tmp_path).verdict == "OK"
    append_alarm(tmp_path, Alarm(3, "mismatch", "they differ", 3, "check the dtype"))
    row = runs._without_alarm(tmp_path)
    assert (row.verdict, row.measured) == ("WARN", "mismatch")


def test_a_run_is_ended_with_all_below_it_and_its_last_line_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "model_of", lambda day: tmp_path)
    short = runs.ShortRun(day_of(tmp_path, "run.seed=3"), "run", 3)
    below = "sleep 600 & echo $!; wait"
    monkeypatch.setattr(short, "command", lambda: ["bash", "-c", below])
    with short.running() as process:
        short.wait(process, "line", lambda: bool(short.log.read_text().strip()))
        (pid,) = map(int, short.log.read_text().split())
        assert psutil.pid_exists(pid)
    assert process.returncode == -signal.SIGKILL
    wait_for_the_end(pid, time.monotonic() + 20)
    monkeypatch.setattr(short, "command", lambda: ["bash", "-c", "echo error: no room; exit 2"])
    with pytest.raises(RuntimeError, match=r"no step 3; .*error: no room"):
        short.finish()


@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("gpus", [1, 2, 4, 7, 8])
def test_the_runs_of_the_kit_are_valid_and_fit_their_gpus(
    gpus: int, servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "model"
    model_shape("Qwen3-8B" if gpus >= 8 else "Qwen3-1.7B").save_pretrained(place)
    monkeypatch.setattr(runs, "model_of", lambda day: place)
    day = dataclasses.replace(day_of(tmp_path, "run.seed=3"), gpus=gpus)
    apart = servers and min(servers, gpus // 2)
    if servers and not apart:
        return
    short = runs.ShortRun(day, "run", 20, servers=apart)
    config, plan = short.config, short.plan([{"response_length": 512.0}])
    assert config.run.seed == 3 and not plan.faults
    assert short.ranks + short.apart <= gpus
    assert config.sglang.colocated == (servers == 0)
    assert config.sglang.num_servers == (apart or short.ranks)
    for command in (short.command(), short.on_ranks("train", "a run", "--replay", "11")):
        assert ("torch.distributed.run" in command) == (short.ranks > 1)


SLURM = r"""#!/bin/bash
step() {
    local count; count=$(cat "$FAKE/requeued/metrics.jsonl" 2>/dev/null | wc -l)
    echo "{\"step\": $((count + 1))}" >> "$FAKE/requeued/metrics.jsonl"
}
echo "$(basename "$0") $*" >> "$FAKE/called"
case "$(basename "$0") $*" in
    sbatch*gpuday.sbatch*) mkdir -p "$GPUDAY/n1"; cp "$FAKE/K0.json" "$GPUDAY/n1"; echo 7 ;;
    sbatch*) mkdir "$FAKE/requeued"; step; step; step; echo 8 ;;
    scontrol*7) echo "JobState=COMPLETED Restarts=0" ;;
    scontrol*) step; echo "JobState=RUNNING Restarts=1" ;;
esac
"""


@pytest.mark.parametrize(("servers", "verdict"), [(4, "OK"), (16, "FAIL")])
def test_k10_reports_what_its_jobs_found_and_cancels_them(
    servers: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's commands are a script. Servers of one GPU would be four times the recipe's."""
    for name in ("sbatch", "scontrol", "scancel", "sinfo"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setattr(runs, "model_of", lambda day: tmp_path)
    Result("K0", "finished").write(tmp_path)
    (tmp_path / "nodes" / "n9").mkdir(parents=True)  # of an earlier call
    Result("K0", "failed").write(tmp_path / "nodes" / "n9")
    (tmp_path / "nodes.out").write_text("FAIL  bandwidth: 1.00 GB/s between 16 ranks (nccl)\n")
    urls = " ".join(["http://n1:30000"] * servers)
    (tmp_path / "requeued.out").write_text(f"servers: {urls}\nanother line of http://n1:30000\n")
    rows = runs.jobs(day_of(tmp_path, "run.seed=3"))
    assert [(row.what, row.verdict) for row in rows] == [
        ("2 nodes accepted", "FAIL"),
        ("K0 on n1", "OK"),
        ("between the nodes", "FAIL"),
        ("servers have the recipe's GPUs", verdict),
        ("every step once", "OK"),
    ]
    called = (tmp_path / "called").read_text().splitlines()
    assert called[1].endswith("/gpuday.sbatch --stages K0,K5 run.seed=3")
    assert "scancel 7" in called and called[-1] == "scancel 8"


@pytest.mark.parametrize("gpus", [0, 1, 4, 8])
def test_a_day_has_every_stage_but_that_of_slurm(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that needs more GPUs is reported as skipped."""
    started: list[Stage] = []
    monkeypatch.setattr(gpuday, "seen_gpus", lambda: gpus)
    monkeypatch.setattr(gpuday, "run_stages", lambda day, stages, *_: started.extend(stages) or [])
    assert main(["gpuday", "--output", str(tmp_path)]) == 0
    assert [stage.name for stage in started] == [f"K{number}" for number in range(10)]
    day = Day(tmp_path, gpus)
    assert all(stage.planned(day) for stage in started if gpus >= stage.gpus), "--budget counts it"


def test_the_command_checks_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpuday", "--list"]) == 0
    assert "the whole day" in capsys.readouterr().out
    for words, message in (
        (["--stages", "K77"], "--stages K77 is unknown"),
        (["--gpus", "999"], "--gpus 999 is more than"),
        (["--budget", "-1"], "--budget -1 must be"),
        (["--model", str(tmp_path)], "has no config.json"),
        (["sglang.pythn=x"], "did you mean"),
    ):
        assert main(["gpuday", "--output", str(tmp_path / "day"), *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "day").exists()
    assert [stage.name for stage in find_stages("k1, K0")] == ["K0", "K1"]
