"""A signal inside a step: a launcher waits half a minute, so a long step must not be waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config import Config, EngineError, dump
from megatron_stare.loop.interrupt import SAME_REQUEST_SECONDS, Interrupt
from megatron_stare.loop.trainer import Trainer
from megatron_stare.policy.topology import Topology
from tests.forked import Command
from tests.paths import ROOT
from tests.rewards import even_characters
from tests.small_run import rows_of, small_config

RECORD = "TESTS_INTERRUPT_RECORD"
SHORT = ("scoring.reward=tests.loop.test_interrupt.recorded", "run.save_interval=0")
# 8,192 rollouts, decoded one at a time: minutes of sampling.
LONG = (
    "rollout.rollout_batch_size=512",
    "rollout.n_samples_per_prompt=16",
    "rollout.engine_batch_size=1",
)


def recorded(response: str, label: str, metadata: dict[str, Any]) -> float:
    """A reward that leaves a mark where this run's environment says."""
    if RECORD in os.environ:
        Path(os.environ[RECORD]).touch()
    return even_characters(response, label, metadata)


def launch(directory: Path, *settings: str) -> subprocess.Popen[str]:
    """The run under torchrun, on two ranks."""
    file = directory / "run.yaml"
    dump(small_config(directory, *SHORT, *settings), file)
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    command = [torchrun, "--nproc-per-node", "2", "--standalone", "-m", "megatron_stare"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), RECORD: str(directory / "record")}
    return subprocess.Popen(
        [*command, "train", str(file)],
        cwd=ROOT,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def four_steps(directory: Path, asynchrony: str) -> Config:
    """A run with an evaluation in its middle; sampling ahead takes so long that it can be ended."""
    ahead = asynchrony == "one_step_off"
    return small_config(
        directory,
        f"rollout.asynchrony={asynchrony}",
        "rollout.dynamic_sampling=false",
        f"rollout.engine_batch_size={4 if ahead else 256}",
        f"evaluation.n_samples_per_eval_prompt={1 if ahead else 8}",
        "train.num_rollout=4",
        "evaluation.eval_interval=2",
        f"evaluation.eval_data.held={directory}/problems.jsonl",
    )


class Undisturbed:
    """The metrics of `four_steps` without a signal, by asynchrony; each is run once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.known: dict[str, list[dict[str, Any]]] = {}

    def rows(self, asynchrony: str, topology: Topology) -> list[dict[str, Any]]:
        if asynchrony not in self.known:
            directory = self.directory / asynchrony
            directory.mkdir()
            config = four_steps(directory, asynchrony)
            assert Trainer(config, topology).run(Interrupt())
            self.known[asynchrony] = rows_of(config)
        return self.known[asynchrony]


@pytest.mark.slow
def test_sigterm_under_torchrun_ends_a_step_that_would_take_minutes(
    tmp_path: Path, topology: Topology
) -> None:
    """In time, with what was trained saved; the step is then taken again as if nothing was."""
    latest, record = tmp_path / "run/checkpoints/latest", tmp_path / "record"
    first = small_config(tmp_path, *SHORT, "train.num_rollout=1")
    assert Trainer(first, topology).run(Interrupt())
    long = launch(tmp_path, "train.num_rollout=2", *LONG)
    deadline = time.monotonic() + 240
    while not record.exists():  # until the first group of the long step has been judged
        assert long.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    long.send_signal(signal.SIGTERM)
    # The launcher kills after half a minute: who had waited for the step would not have come to
    # say this.
    said, _ = long.communicate(timeout=120)
    assert "continues from the last checkpoint" in said
    assert latest.read_text().strip() == "step_00000001"
    config = small_config(tmp_path, *SHORT, "train.num_rollout=2")
    assert Trainer(config, topology).run(Interrupt())
    assert [row["step"] for row in rows_of(config)] == [1, 2]


def hanging(response: str, label: str, metadata: dict[str, Any]) -> float:
    """A reward that never ends."""
    Path(os.environ[RECORD]).touch()
    while True:
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_run_whose_reward_hangs(
    number: signal.Signals, tmp_path: Path
) -> None:
    file, mark = tmp_path / "run.yaml", tmp_path / "judging"
    reward = "scoring.reward=tests.loop.test_interrupt.hanging"
    dump(small_config(tmp_path, reward, "scoring.function_timeout=0"), file)
    words = ["-m", "megatron_stare", "train", str(file)]
    run = Command(words, tmp_path / "said.txt", variables={RECORD: str(mark)})
    try:
        while not mark.exists():
            assert run.code is None, run.output
            time.sleep(0.1)
        run.signal(number)
        run.signal(signal.SIGTERM)  # of a launcher that delivers one request twice
        time.sleep(2 * SAME_REQUEST_SECONDS)
        assert run.code is None
        run.signal(number)
        assert run.wait(60) == 128 + number
    finally:
        run.kill()
    assert "stopped at once" in run.output and "Traceback" not in run.output


def test_sigterm_after_sigusr1_saves_and_the_next_one_ends_a_wait_in_c(
    tmp_path: Path,
) -> None:
    """Slurm announces a preemption by SIGUSR1, and then sends the first SIGTERM."""
    program = """
import ctypes, signal
from megatron_stare.loop import interrupt
interrupt.SAME_REQUEST_SECONDS = 0.0
with interrupt.Interrupt(exits=True) as noted:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.raise_signal(number)
        print(noted.noted, flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call never returns, and no signal interrupts it
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
    (tmp_path / "program.py").write_text(program)
    run = Command([str(tmp_path / "program.py")], tmp_path / "said.txt")
    try:
        while run.output != "10\n15\n":
            assert run.code is None, run.output
            time.sleep(0.1)
        time.sleep(1.0)
        assert run.code is None
        run.signal(signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
    finally:
        run.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "phase",
    [
        "wait",
        *(pytest.param(phase, marks=pytest.mark.slow) for phase in ("evaluate", "score", "update")),
    ],
)
def test_a_signal_in_any_phase_loses_and_doubles_nothing(
    phase: str, tmp_path: Path, topology: Topology, undisturbed: Undisturbed
) -> None:
    """Every line is written once, and equals that of an uninterrupted run; only a batch whose
    sampling ahead was ended is sampled again, by the weights there are then.
    """
    asynchrony = "one_step_off" if phase == "wait" else "on_policy"
    config = four_steps(tmp_path, asynchrony)
    with Interrupt() as interrupt:
        trainer = Trainer(config, topology)
        owner, name = {
            "evaluate": (trainer.evaluator, "evaluate"),
            "wait": (trainer.collector, "finish_step"),
            "score": (trainer.actor, "score"),
            "update": (trainer.actor, "update"),
        }[phase]
        work = getattr(owner, name)

        def signalled(*arguments: Any, **options: Any) -> Any:
            if trainer.step >= 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return work(*arguments, **options)

        setattr(owner, name, signalled)
        assert not trainer.run(interrupt)
    # an update under way is finished; one that is not begun is left to the run that resumes
    assert trainer.step == (1 if phase in ("score", "wait") else 2) and len(rows_of(config)) < 4
    resumed = Trainer(config, topology)
    assert resumed.run(Interrupt())
    rows, wanted = rows_of(config), undisturbed.rows(asynchrony, topology)
    if phase == "wait":
        assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[0] == wanted[0]
        assert {row["stale_token_fraction"] for row in rows} == {0.0, 1.0}
        assert resumed.collector.stream.position == 16, "no problem was left out"
    else:
        assert rows == wanted and len(rows) == 4


def test_the_evaluation_at_the_start_is_in_the_line_of_an_interrupted_first_step(
    tmp_path: Path, topology: Topology
) -> None:
    words = (f"evaluation.eval_data.held={tmp_path}/problems.jsonl", "train.num_rollout=1")
    config = small_config(tmp_path, *words, "evaluation.eval_at_start=true")
    trainer, interrupt = Trainer(config, topology), Interrupt()

    def aborted(*_: Any) -> None:
        interrupt.ask()
        raise EngineError("aborted")

    trainer.collector.finish_step = aborted  # type: ignore[method-assign]
    assert not trainer.run(interrupt)
    assert trainer.step == 1 and rows_of(config) == []
    assert Trainer(config, topology).run(Interrupt())
    (row,) = rows_of(config)
    assert "entropy" in row and "eval_start/held/avg_at_k" in row
