"""Short runs of the kit's model, started by the command line as a user starts them; and K9, one
from sampling to weight sync, killed and resumed, against its plan.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from megatron_stare.commands.gpuday.models import model_of, problems
from megatron_stare.commands.gpuday.results import Day, Measurement, at_least, at_most, holds
from megatron_stare.commands.gpuday.stages import checked
from megatron_stare.config import Config, override
from megatron_stare.planning.plan import GIB, RunPlan, make_plan
from megatron_stare.recipes import Cluster
from megatron_stare.reporting.logbook import read_metrics

REACH_SECONDS = 400.0  # until a step is written
REWARD = "megatron_stare.commands.gpuday.models.even_length"


class ShortRun:
    """`steps` steps in the folder `name` of the day. `servers`: how many have GPUs of their own; 0:
    one for each GPU of the trainer; None: rollouts in the trainer's process. In a rehearsal one
    rank trains, and 0 is one server on the CPU.
    """

    def __init__(
        self, day: Day, name: str, steps: int, *options: str, servers: int | None = 0
    ) -> None:
        self.directory, self.steps = day.path / name, steps
        small, self.apart = day.rehearsal, 0 if day.rehearsal else servers or 0
        self.ranks = 1 if small else max(1, day.gpus - self.apart)
        if self.apart and day.gpus >= 8:
            self.ranks = 4
        batch, tokens = (2, 12) if small else (8, 1024)
        self.settings = [
            f"policy.hf_checkpoint={model_of(day)}",
            f"policy.dtype={'fp32' if small else 'bf16'}",
            f"policy.max_tokens_per_gpu={128 if small else 8192}",
            f"data.prompt_data={problems(day)}",
            "data.rollout_max_prompt_len=64",
            f"rollout.rollout_batch_size={batch}",
            f"rollout.n_samples_per_prompt={4 if small else 8}",
            f"rollout.rollout_max_response_len={tokens}",
            "rollout.max_generation_rounds=8",
            f"scoring.reward={REWARD}",
            f"train.num_rollout={steps}",
            f"policy.use_distributed_optimizer={str(not small).lower()}",
            "run.save_interval=1000",
            f"run.dir={self.directory}",
        ]
        if servers is not None:
            self.settings += [
                "rollout.engine=sglang",
                f"sglang.num_servers={servers or self.ranks}",
            ]
        if not small and self.ranks >= 4:
            self.settings += [
                "policy.tensor_model_parallel_size=4",
                "policy.sequence_parallel=true",
            ]
        if servers == 0 and not small:
            self.settings += ["sglang.colocated=true", "policy.offload_while_generating=true"]
        self.settings += [*options, *day.overrides]

    @property
    def config(self) -> Config:
        return override(Config(), self.settings)

    def command(self, name: str = "train") -> list[str]:
        """The command `name` of the package on every rank of the run."""
        file = self.directory.with_suffix(".yaml")
        file.write_text("{}\n")
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(self.ranks)]
        words = ["-m", "megatron_stare", name, str(file), *self.settings]
        return [sys.executable, *(launcher if self.ranks > 1 else ()), *words]

    def start(self) -> subprocess.Popen[bytes]:
        """The run as a process that writes to the stage's log."""
        return subprocess.Popen(
            self.command(), stdout=sys.stdout.fileno(), stderr=subprocess.STDOUT
        )

    def finish(self) -> list[dict[str, Any]]:
        """The rows of the whole run, which is continued where it has begun. RuntimeError: it
        failed.
        """
        checked(self.command())
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """The rows that the run has written to metrics.jsonl so far."""
        file = self.directory / "metrics.jsonl"
        return read_metrics(file) if file.is_file() else []

    def reach(self, process: subprocess.Popen[bytes], step: int) -> int:
        """Wait until `step` is written; the last one that is. RuntimeError: it does not come."""
        self.wait(process, lambda: len(self.rows()) >= step, f"step {step}")
        return len(self.rows())

    def wait(self, process: subprocess.Popen[bytes], come: Callable[[], bool], what: str) -> None:
        """Wait for the run to come to a state. RuntimeError: it ended, or takes too long."""
        deadline = time.monotonic() + REACH_SECONDS
        while not come():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {what}: the run wrote {len(self.rows())} steps")
            time.sleep(0.005)

    def plan(self, length: float) -> RunPlan:
        """The plan of the run, for responses of this mean length."""
        apart = self.apart or int(not self.config.sglang.colocated)
        return make_plan(self.config, Cluster(self.ranks, apart), response_tokens=length)


def family(process: subprocess.Popen[bytes], word: str) -> list[int]:
    """Processes below a run whose command has the word, the oldest first."""
    below = psutil.Process(process.pid).children(recursive=True)
    return sorted(one.pid for one in below if word in one.cmdline())


def median(rows: list[dict[str, Any]], key: str) -> float:
    """Over the rows that have it; 0 if none has."""
    return float(statistics.median([row[key] for row in rows if key in row] or [0.0]))


def against_plan(run: ShortRun, rows: list[dict[str, Any]]) -> Iterator[Measurement]:
    """Medians of the steps against the plan of the same lengths."""
    plan = run.plan(median(rows, "response_length"))
    busy = median(rows, "seconds_score") + median(rows, "seconds_update")
    yield at_most("seconds of score and update", busy, plan.training.seconds, "s")
    if plan.serving:
        spent = median(rows, "seconds_rollout")
        yield at_most("seconds of rollouts", spent, plan.serving.seconds, "s")
        spent = median(rows, "seconds_sync")
        yield at_most("seconds of sync", spent, plan.serving.sync_seconds, "s")
    for phase in ("rollout", "score", "update", "sync"):
        yield Measurement(f"seconds_{phase}", median(rows, f"seconds_{phase}"), "", "s")
    if peak := median(rows, "gpu_memory_peak"):
        planned = (plan.worst.training - plan.worst.communication) / GIB
        yield at_most("gpu_memory_peak", peak, planned, "GiB")
        yield at_least("mfu", median(rows, "mfu"), plan.mfu, "of peak")
        yield Measurement("tokens_per_second", median(rows, "tokens_per_second"), "", "per GPU")


def training(day: Day) -> Iterator[Measurement]:
    """K9: train, kill a rank with SIGKILL at half of the steps, resume, replay a step."""
    steps = 4 if day.rehearsal else 20
    kept = ("run.save_interval=1", "run.record=all")
    short = ShortRun(day, "run", steps, *kept, servers=None if day.rehearsal else 0)
    killed = _killed(short, steps // 2)
    yield holds(f"a rank is killed at step {killed}", bool(killed), str(killed))
    rows = short.finish()
    found = [row["step"] for row in rows]
    yield holds("every step once, after the resume", found == list(range(1, steps + 1)), str(found))
    yield from against_plan(short, rows[1:])
    if short.ranks == 1:  # raises where a figure differs
        replay = [sys.executable, "-m", "megatron_stare", "train", str(short.directory)]
        checked([*replay, "--replay", str(steps - 1)])
        yield holds(f"replay of step {steps - 1}", True, "the same figures")
    alarms = [key for row in rows for key in row if key.startswith("alarm")]
    yield holds("no alarm", not alarms, ", ".join(sorted(set(alarms))) or "none", "WARN")


def _killed(short: ShortRun, step: int) -> int:
    """Start the run and kill its last rank after `step`; the step that was written last."""
    process = short.start()
    try:
        last = short.reach(process, step)
        ranks = psutil.Process(process.pid).children() if short.ranks > 1 else []
        os.kill(max((rank.pid for rank in ranks), default=process.pid), signal.SIGKILL)
        process.wait(120.0)
    finally:
        process.kill()
        process.wait()
    return last
