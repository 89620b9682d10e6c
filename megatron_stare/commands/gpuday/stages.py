"""The table of stages, and the process of each."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_stare.commands.gpuday.results import Day, Measurement, Result, Skipped, read_result
from megatron_stare.config import UserError
from megatron_stare.config.errors import nearest
from megatron_stare.system import end_with_parent

FOLDER = "megatron_stare.commands.gpuday"
LIMIT_SECONDS = 600.0
GRACE_SECONDS = 10.0
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "MEGATRON_STARE_CPU": "1"}


@dataclass(frozen=True)
class Stage:
    """One stage: run(day) of `module`, in this folder, yields its rows. Minutes are planned: on one
    GPU and on a node of eight; 0: it is not part of that day.
    """

    name: str
    module: str  # or a module's whole name; MODULE:FUNCTION, if it is not `run`
    minutes: tuple[int, int]
    gpus: int  # that it needs at least
    what: str
    on_cpu: bool = False  # where it is rehearsed: its servers are SGLang's for CPUs


STAGES = (
    Stage("K0", "seams", (1, 1), 0, "driver, torch, NCCL, compilers, network, leftovers"),
    Stage("K1", "kernels", (2, 2), 1, "the project's kernels at real sizes against float64"),
    Stage("K2", "equal", (6, 8), 1, "training steps: GPU against CPU, layouts, repeated bits"),
    Stage("K3", "speed", (1, 1), 1, "memory, matrix products, attention, head"),
    Stage("K4", "rank_memory", (6, 6), 1, "one rank of every recipe against its plan"),
    Stage("K5", "collectives", (0, 4), 2, "bandwidth of every collective over the node"),
    Stage("K6", "with_servers:transports", (3, 8), 1, "weights to servers: parts, checksums", True),
    Stage("K7", "with_servers:faults", (0, 6), 3, "a server killed in a sync; memory moved", True),
    Stage("K8", "with_servers:decoding", (6, 9), 1, "log-probs, rates, a long answer", True),
    Stage("K9", "runs:training", (7, 10), 1, "a run: sample, train, sync, kill, resume, replay"),
    Stage("K10", "slurm_jobs", (0, 0), 0, "under Slurm: two nodes, and a run that is requeued"),
)


def find_stages(names: str) -> list[Stage]:
    """The stages of a comma-separated list; all of them for "". UserError: one is unknown."""
    table = {stage.name: stage for stage in STAGES}
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in table:
            raise UserError(f"--stages {name} is unknown{nearest(name, table)}; see --list")
    return [table[name] for name in table if not wanted or name in wanted]


def minutes(stage: Stage, day: Day) -> int:
    """The planned minutes on this machine."""
    return stage.minutes[day.gpus >= 8]


def run_stages(
    day: Day, stages: Iterable[Stage], budget: float = 0.0, again: bool = False
) -> Iterator[Result]:
    """The results of the stages, in order. A stage that has a result is not run again, except with
    `again`. With a budget in minutes, a stage whose planned minutes are not left is not started.
    """
    begin = time.monotonic()
    for stage in stages:
        known = read_result(day.path, stage.name)
        if known and known.status != "unfinished" and not again:
            yield known
            continue
        if day.gpus < stage.gpus and not day.rehearsal:
            reason = f"needs {stage.gpus} GPUs; {day.gpus} are seen"
            yield Result(stage.name, "skipped", reason=reason)
            continue
        left = budget - (time.monotonic() - begin) / 60 if budget else float("inf")
        if minutes(stage, day) > left:
            yield Result(stage.name, "unfinished", reason=f"{left:.0f} minutes of --budget left")
            continue
        yield _run(day, stage)


def _run(day: Day, stage: Stage) -> Result:
    """Run the stage in a process of its own, in a group that ends with it."""
    (day.path / f"{stage.name}.json").unlink(missing_ok=True)
    begin, status = time.monotonic(), 0
    with (day.path / f"{stage.name}.log").open("w") as log:
        command = [sys.executable, "-m", __name__, day.directory, stage.name, stage.module]
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent,
            env=os.environ | (ON_CPU if stage.on_cpu and day.rehearsal else {}),
        )
        try:
            status = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            _end(process)
    result = read_result(day.path, stage.name) or Result(stage.name)
    result.seconds = round(time.monotonic() - begin, 1)
    if result.status == "unfinished":
        timed_out = status == -1
        result.status = "timed out" if timed_out else "failed"
        last = f"limit of {LIMIT_SECONDS:g} s" if timed_out else _last_line(Path(log.name))
        result.reason = f"{last}; see {log.name}"
    result.write(day.path)
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the stage's process group: what a failed stage started must not disturb the next."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(file: Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def work(directory: Path, name: str, module: str) -> None:
    """The stage's process: every row is written as soon as it is known."""
    day = Day.read(directory)
    result = Result(name, machine=machine_name(day))
    result.write(directory)
    begin = time.monotonic()
    try:
        place, _, name = (module if "." in module else f"{FOLDER}.{module}").partition(":")
        run: Callable[[Day], Iterator[Measurement]]
        run = getattr(importlib.import_module(place), name or "run")
        for row in run(day):
            if day.rehearsal and row.rated:
                row = dataclasses.replace(row, verdict="-")  # a speed that means nothing
            print(row, flush=True)
            result.rows.append(row)
            result.write(directory)
        result.status = "finished"
    except Skipped as skipped:
        result.status, result.reason = "skipped", str(skipped)
    result.seconds = round(time.monotonic() - begin, 1)
    result.write(directory)


def machine_name(day: Day) -> str:
    """The GPUs of this machine by their own name; "no GPU" where torch sees none."""
    if not day.gpus:
        return "no GPU"
    import torch

    return f"{day.gpus} x {torch.cuda.get_device_name(0)}"


def ranks(module: str, count: int, *arguments: str) -> list[str]:
    """The command that starts a module of this package on `count` ranks of this node."""
    python = [sys.executable, "-m"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    return [*python, *launcher, "-m", f"{FOLDER}.{module}", *arguments]


def output_of(command: Sequence[str], **environment: str) -> Iterator[str]:
    """The lines of the command's output, as they come. RuntimeError: its exit code is not 0; the
    message has its last line.
    """
    last = "no output"
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
            yield line
    if process.returncode:
        said = f"{' '.join(command[:6])} ... ended with {process.returncode}: {last}"
        raise RuntimeError(said)


def checked(command: Sequence[str], **environment: str) -> str:
    """The command's whole output, which also goes to the stage's log. RuntimeError: as of
    `output_of`.
    """
    lines = []
    for line in output_of(command, **environment):
        print(line, end="", flush=True)
        lines.append(line)
    return "".join(lines)


def checkout() -> Path | None:
    """The repository that this package is a part of; None where it was installed without it."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "tests").is_dir() and (root / "slurm").is_dir() else None


def tool(name: str) -> str:
    """The path of a program of the system; "" if there is none."""
    return shutil.which(name) or ""


if __name__ == "__main__":
    work(Path(sys.argv[1]), *sys.argv[2:])
