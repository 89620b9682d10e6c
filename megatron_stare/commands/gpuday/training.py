"""K9: a short run from sampling to weight sync, killed and resumed, against its plan."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from megatron_stare.commands.gpuday.models import model_of, problems
from megatron_stare.commands.gpuday.results import Day, Measured, at_least, at_most, holds
from megatron_stare.commands.gpuday.stages import checked
from megatron_stare.config import Config, override
from megatron_stare.planning.plan import GIB, make_plan
from megatron_stare.recipes import Cluster
from megatron_stare.reporting.logbook import read_metrics

PHASES = ("rollout", "score", "update", "sync")
KILL_SECONDS = 400.0  # until the step at which a rank is killed
REWARD = "megatron_stare.commands.gpuday.models.even_length"


def run(day: Day) -> Iterator[Measured]:
    """Train, kill a rank with SIGKILL at half of the steps, resume, replay a step."""
    steps = 4 if day.rehearsal else 20
    directory = day.path / "run"
    settings = settings_of(day, directory, steps)
    command, count = trainer(day, settings)
    killed = _killed(command, directory, steps // 2)
    yield holds(f"a rank is killed at step {killed}", bool(killed), str(killed))
    checked(command)
    rows = read_metrics(directory / "metrics.jsonl")
    found = [row["step"] for row in rows]
    yield holds("every step once, after the resume", found == list(range(1, steps + 1)), str(found))
    yield from _against_plan(override(Config(), settings), count, rows[1:])
    replay = [sys.executable, "-m", "megatron_stare", "train", str(directory)]
    if count == 1:
        checked([*replay, "--replay", str(steps - 1)])  # raises where a figure differs
        yield holds(f"replay of step {steps - 1}", True, "the same figures")
    alarms = [key for row in rows for key in row if key.startswith("alarm")]
    yield holds("no alarm", not alarms, ", ".join(sorted(set(alarms))) or "none", "WARN")


def settings_of(day: Day, directory: Path, steps: int) -> list[str]:
    """The overrides of a run of the kit's model on its problems; servers share the trainer's GPUs,
    except in a rehearsal, which samples in the trainer's process.
    """
    small = day.rehearsal
    batch, tokens = (2, 12) if small else (8, 1024)
    settings = [
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
        "run.save_interval=1",
        "run.record=all",
        f"run.dir={directory}",
    ]
    if not small:
        settings += ["rollout.engine=sglang", "sglang.colocated=true", "sglang.sync_method=tensor"]
        settings += ["policy.use_distributed_optimizer=true"]
        settings += ["policy.offload_while_generating=true", f"sglang.num_servers={day.gpus}"]
    return [*settings, *day.overrides]


def trainer(day: Day, settings: list[str]) -> tuple[list[str], int]:
    """The command of a run on every GPU, and its number of ranks."""
    file = day.path / "run.yaml"
    file.write_text("{}\n")
    count = 1 if day.rehearsal else max(1, day.gpus)
    words = ["-m", "megatron_stare", "train", str(file), *settings]
    if count == 1:
        return [sys.executable, *words], 1
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [sys.executable, *launcher, *words], count


def _killed(command: list[str], directory: Path, step: int) -> int:
    """Start the run and kill its last rank after `step`; the step that was written last."""
    process = subprocess.Popen(command, stdout=sys.stdout.fileno(), stderr=subprocess.STDOUT)
    deadline = time.monotonic() + KILL_SECONDS
    try:
        while (last := last_step(directory)) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not reach step {step}: it wrote {last} steps")
            time.sleep(0.2)
        os.kill(_last_rank(process.pid), signal.SIGKILL)
        process.wait(120.0)
    finally:
        process.kill()
        process.wait()
    return last


def _last_rank(launcher: int) -> int:
    """The newest process of torchrun that trains; the process itself if it has no ranks."""
    ranks = [
        child.pid
        for child in psutil.Process(launcher).children()
        if "megatron_stare" in child.cmdline() and "RANK" in child.environ()
    ]
    return max(ranks, default=launcher)


def last_step(directory: Path) -> int:
    """The last step of a run's metrics; 0 if there is none."""
    file = directory / "metrics.jsonl"
    rows: list[dict[str, Any]] = read_metrics(file) if file.is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def _against_plan(config: Config, count: int, rows: list[dict[str, Any]]) -> Iterator[Measured]:
    """Medians of the steps against the plan of the same lengths."""

    def median(key: str) -> float:
        return statistics.median([row[key] for row in rows if key in row] or [0.0])

    length = median("response_length")
    plan = make_plan(config, Cluster(count, 0), response_tokens=length)
    busy = median("seconds_score") + median("seconds_update")
    yield at_most("seconds of score and update", busy, plan.training.seconds, "s")
    if plan.serving:
        yield at_most("seconds of rollouts", median("seconds_rollout"), plan.serving.seconds, "s")
        yield at_most("seconds of sync", median("seconds_sync"), plan.serving.sync_seconds, "s")
    for phase in PHASES:
        yield Measured(f"seconds_{phase}", median(f"seconds_{phase}"), "", "s")
    if median("gpu_memory_peak"):
        rank = plan.worst
        planned = (rank.training - rank.communication) / GIB
        yield at_most("gpu_memory_peak", median("gpu_memory_peak"), planned, "GiB")
        yield at_least("mfu", median("mfu"), plan.mfu, "of peak")
        yield Measured("tokens_per_second", median("tokens_per_second"), "", "per GPU")
