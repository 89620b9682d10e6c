"""The jobs of the tests: a cluster of three nodes on this machine, and its submitted jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.rewards import even_characters
from tests.small_run import without_seconds

PROGRAM = ROOT / "tools" / "slurm_cluster" / "cluster"
PATIENCE_SECONDS = 400.0
SLOWNESS = "TESTS_SLURM_SLOWNESS"
# The quickstart in a few steps that take a moment; a checkpoint after each.
QUICKSTART = (
    "quickstart",
    "compare.run=[stare]",
    "cold_start.steps=10",
    "evaluation.eval_interval=0",
    "rollout.rollout_batch_size=4",
    "rollout.n_samples_per_prompt=4",
    "scoring.reward=tests.slurm.cluster.reward",
    "train.num_rollout=10",
    "run.save_interval=1",
)


def reward(response: str, label: str, metadata: dict[str, Any]) -> float:
    """A reward with signal from the first step on, so that every step moves the weights. It is as
    slow as a verifier may be, if the job's environment says so.
    """
    time.sleep(float(os.environ.get(SLOWNESS, "0")))
    return even_characters(response, label, metadata)


class Job:
    """One job, or one task of an array."""

    def __init__(self, cluster: Cluster, number: str, output: Path) -> None:
        self.cluster, self.number, self.output = cluster, number, output

    def __getitem__(self, field: str) -> str:
        """A field of `scontrol show job`."""
        shown = self.cluster.call("scontrol", "show", "job", self.number)
        return re.search(rf"\b{field}=(\S*)", shown)[1]

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def logs(self, attempt: int) -> Path:
        return self.cluster.folder / "logs" / self.number / f"attempt_{attempt}"

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait; fail with the job's output if it ends before, or takes too long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            over = self["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            if time.monotonic() > deadline or (over and not condition()):
                raise AssertionError(f"{self['JobState']}: {self.text}")
            time.sleep(0.2)

    def ended(self, state: str = "COMPLETED") -> Job:
        self.until(lambda: self["JobState"] == state)
        return self


class Run:
    """A run directory of the quickstart's one arm, or of a run that is not a comparison."""

    def __init__(self, directory: Path, arm: str = "seed0/stare") -> None:
        self.directory = directory
        self.arm = directory / arm

    def rows(self) -> list[dict[str, Any]]:
        """The metrics without those that depend on time."""
        file = self.arm / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return without_seconds([json.loads(line) for line in lines])

    def has(self, steps: int) -> Callable[[], bool]:
        return lambda: len(self.rows()) >= steps


class Cluster:
    """Three nodes, n1 to n3; all files of the jobs are in `folder`."""

    def __init__(self, folder: Path, figures: list[str] | None = None) -> None:
        self.folder = folder
        self.figures = [] if figures is None else figures

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        self.program("start", "3")
        try:
            yield self
        finally:
            self.program("stop")

    def program(self, command: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(PROGRAM), command, str(self.folder / "slurm"), *arguments],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def call(self, *command: str, **more: str) -> str:
        """Run one of Slurm's programs in the repository; the text that it prints."""
        own = {
            "SLURM_CONF": str(self.folder / "slurm" / "slurm.conf"),
            "LOGS": str(self.folder / "logs"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "LEAST_DISK_MIB": "20",
            # longer than Slurm takes to notice: a node that it sets down in the moment in which the
            # job is requeued has it say that the job can never run, and hold it
            "LOST_SECONDS": "40",
        }
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | own | more, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.returncode} {done.stdout} {done.stderr}"
        return done.stdout

    def submit(
        self, options: str, script: str, *arguments: str, more: str = "", **environment: str
    ) -> Job:
        """sbatch; `options` before the script, `more` for a second component. There are no GPUs."""
        here = "--parsable --output={} --gpus-per-node=0"
        output = self.folder / f"{script}-{time.monotonic_ns()}.out"
        second = f"{more} --gpus-per-node=0".split() if more else []
        before = here.format(output).split() + options.split() + second
        number = self.call("sbatch", *before, f"slurm/{script}.sbatch", *arguments, **environment)
        return Job(self, number.split(";")[0].strip(), output)

    def train(
        self, name: str, options: str, *overrides: str, **environment: str
    ) -> tuple[Job, Run]:
        """The quickstart's few steps."""
        run = Run(self.folder / name)
        words = (*QUICKSTART, f"run.dir={run.directory}", *overrides)
        return self.submit(options, "train", *words, **environment), run

    def signal_rank(self, job: Job, rank: int, node: str, signal: str) -> None:
        """Process ids belong to the node, so a step on that node sends the signal."""
        number = (job.logs(int(job["Restarts"])) / "pids" / f"{node}.{rank}").read_text().strip()
        step = ("srun", f"--jobid={job.number}", "--overlap", "--nodelist", node, "--nodes=1")
        self.call(*step, "--ntasks=1", "kill", f"-{signal}", number)

    def note(self, what: str, seconds: float) -> None:
        """A figure for the suite's last lines."""
        self.figures.append(f"{what}: {seconds:.1f} s")
