"""The stages of an acceptance day: their table, the process of each, and their result files."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from megatron_stare.commands.gpuday.rows import Day, Measurement, Skipped, Verdict, holds
from megatron_stare.config import UserError
from megatron_stare.config.errors import nearest
from megatron_stare.system import atomic_write, end_with_parent

Status = Literal["finished", "failed", "timed out", "skipped", "unfinished"]
GRACE_SECONDS = 10.0
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "MEGATRON_STARE_CPU": "1"}


@dataclass
class Result:
    """The result file of one stage: its rows so far, and how it ended."""

    stage: str
    status: Status = "unfinished"
    seconds: float = 0.0
    machine: str = ""
    reason: str = ""  # why it failed or was skipped
    rows: list[Measurement] = field(default_factory=list)

    @property
    def faulty(self) -> bool:
        """Whether the stage failed as a whole, or one of its rows did."""
        return self.status not in ("finished", "skipped") or self.count("FAIL") > 0

    def count(self, verdict: Verdict) -> int:
        """The number of rows with this verdict."""
        return sum(row.verdict == verdict for row in self.rows)

    def write(self, directory: Path) -> None:
        """Write the result file atomically."""
        content = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        atomic_write(directory / f"{self.stage}.json", content)


def kept(directory: Path, stage: str) -> Result | None:
    """The stage's result; None if there is none. UserError: the file is damaged."""
    file = directory / f"{stage}.json"
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        rows = [Measurement(**row) for row in content.pop("rows")]
        return Result(**content, rows=rows)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} is not a result of a stage ({error}); remove it") from error


@dataclass(frozen=True)
class Stage:
    """One stage, whose FUNCTION(day) yields its rows."""

    name: str
    place: str  # MODULE:FUNCTION; .MODULE is one of this folder
    minutes: tuple[int, int]  # planned, on one GPU and on eight; both 0: not a part of the day
    gpus: int  # that it needs at least
    what: str
    on_cpu: bool = False  # where it is rehearsed: its servers are SGLang's for CPUs
    limit: float = 600.0  # seconds

    def planned(self, day: Day) -> int:
        """The planned minutes on this machine; with two to seven GPUs those of eight."""
        return self.minutes[day.gpus > 1]


STAGES = (
    Stage("K0", ".node:run", (1, 1), 0, "driver, torch, NCCL, compilers, network, leftovers"),
    Stage("K1", ".kernels:right", (2, 2), 1, "the project's kernels at real sizes against float64"),
    Stage("K2", ".ranks:equal", (6, 8), 1, "training steps: GPU against CPU, layouts, bits"),
    Stage("K3", ".kernels:fast", (1, 1), 1, "memory, matrix products, attention, head"),
    Stage("K4", ".rank_memory:run", (6, 6), 1, "one rank of every recipe against its plan"),
    Stage("K5", ".ranks:collectives", (0, 4), 2, "bandwidth of every collective over the node"),
    Stage("K6", ".runs:transports", (3, 8), 1, "weights to servers: parts, checksums", True),
    Stage("K7", ".runs:faults", (0, 6), 3, "a server killed in a sync; memory moved", True),
    Stage("K8", ".runs:decoding", (6, 9), 1, "log-probs, rates, a long answer", True),
    Stage("K9", ".runs:training", (7, 10), 1, "a run: killed, resumed, replayed", limit=1200.0),
    Stage("K10", ".runs:jobs", (0, 0), 0, "under Slurm: two nodes; a run requeued", limit=7200.0),
)


def find_stages(names: str) -> list[Stage]:
    """The stages of a comma-separated list; all of them for "". UserError: one is unknown."""
    table = {stage.name: stage for stage in STAGES}
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in table:
            raise UserError(f"--stages {name} is unknown{nearest(name, table)}; see --list")
    return [table[name] for name in table if not wanted or name in wanted]


def run_stages(
    day: Day, stages: Iterable[Stage], budget: float = 0.0, again: bool = False
) -> Iterator[Result]:
    """The results of the stages, in order. A stage that has a result is not run again, except with
    `again`. With a budget in minutes, a stage whose planned minutes are not left is not started.
    """
    begin = time.monotonic()
    for stage in stages:
        known = kept(day.path, stage.name)
        left = budget - (time.monotonic() - begin) / 60 if budget else float("inf")
        if known and known.status != "unfinished" and not again:
            yield known
        elif day.gpus < stage.gpus and not day.rehearsal:
            reason = f"needs {stage.gpus} GPUs; {day.gpus} are seen"
            yield Result(stage.name, "skipped", reason=reason)
        elif stage.planned(day) > left:
            yield Result(stage.name, "unfinished", reason=f"{left:.0f} minutes of --budget left")
        else:
            yield _run(day, stage)


def _run(day: Day, stage: Stage) -> Result:
    """Run the stage in a process of its own, in a group that ends with it."""
    (day.path / f"{stage.name}.json").unlink(missing_ok=True)
    begin, log = time.monotonic(), day.path / f"{stage.name}.log"
    process = multiprocessing.get_context("spawn").Process(target=_work, args=(day, stage, log))
    process.start()
    try:
        process.join(stage.limit)
        timed_out = process.is_alive()
    finally:  # whatever it started must not disturb the next stage
        assert process.pid is not None, "it was started"
        _end(process.pid, process.join)
        process.kill()  # if it had no group yet
        process.join(GRACE_SECONDS)  # one that a driver holds in the kernel stays
    result = kept(day.path, stage.name) or Result(stage.name)
    result.seconds = round(time.monotonic() - begin, 1)
    if result.status == "unfinished":
        result.status = "timed out" if timed_out else "failed"
        reason = f"limit of {stage.limit:g} s" if timed_out else last_line(text_of(log))[:300]
        result.reason = f"{reason}; see {log}"
    result.write(day.path)
    return result


def _end(stage: int, wait: Callable[[float], object]) -> None:
    """End the stage with all that it started. What it has not ended itself after the grace, as in a
    native call of a GPU that hangs, in which no handler of a signal runs, is killed.
    """
    left = below(stage)
    with contextlib.suppress(ProcessLookupError):
        os.kill(stage, signal.SIGTERM)
    wait(GRACE_SECONDS)
    kill(left)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(stage, signal.SIGKILL)


def below(pid: int) -> list[psutil.Process]:
    """All processes below this one, torchrun's ranks in sessions of their own, too; none if it has
    ended.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to those that still run."""
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _work(day: Day, stage: Stage, log: Path) -> None:
    """The stage's process: every row is written as soon as it is known."""
    os.setsid()
    # As an exception, so that what a stage started ends with it: runs, and jobs on other machines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the stage was ended"))
    threading.Thread(target=_end_with_kit, daemon=True).start()
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    on_cpu = stage.on_cpu and day.rehearsal
    if on_cpu:
        os.environ.update(ON_CPU)
    result = Result(stage.name, machine="no GPU")
    if day.gpus and not on_cpu:
        import torch

        result.machine = f"{day.gpus} x {torch.cuda.get_device_name(0)}"
    result.write(day.path)
    module, _, name = stage.place.partition(":")
    run: Callable[[Day], Iterator[Measurement]]
    run = getattr(importlib.import_module(module, __package__), name)
    try:
        for row in run(day):
            if day.rehearsal and row.rated:
                row = dataclasses.replace(row, verdict="-")  # a speed that means nothing
            print(row, flush=True)
            result.rows.append(row)
            result.write(day.path)
        result.status = "finished"
    except Skipped as skipped:
        result.status, result.reason = "skipped", str(skipped)
    result.write(day.path)


def _end_with_kit() -> None:
    """End this stage once the kit's process has ended."""
    kit = multiprocessing.parent_process()
    assert kit is not None, "a stage is a child"
    kit.join()
    _end(os.getpid(), time.sleep)


def _on_rank[T](work: Callable[..., T], *arguments: Any) -> T:
    end_with_parent()  # a rank that outlives a killed stage keeps its GPU
    return work(*arguments)


def on_ranks[T](
    count: int, environment: dict[str, str], work: Callable[..., T], *arguments: Any
) -> T:
    """work(*arguments) on `count` ranks of this node, started as torchrun starts them; what the
    first rank returns. RuntimeError: a rank failed; the message has its error.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(1, 1, count, run_id="gpuday", max_restarts=0)
    launch.rdzv_backend, launch.rdzv_endpoint = "c10d", "localhost:0"
    before = dict(os.environ)
    # Ranks inherit it: libraries of CUDA read their variables when they are loaded.
    os.environ.update(environment)
    try:
        found: dict[int, T] = elastic_launch(launch, _on_rank)(work, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        recorded: Any = failure.message  # a text where the rank recorded no exception
        said = recorded if isinstance(recorded, str) else recorded["message"]
        raise RuntimeError(f"rank {rank}: {said}") from None
    finally:
        for name in environment:
            del os.environ[name]
        os.environ.update(before)
    return found[0]


def checked(command: Sequence[str], **environment: str) -> str:
    """The command's whole output, which also goes to the stage's log as it comes. RuntimeError: its
    exit code is not 0; the message has its last line.
    """
    lines = []
    env, pipe = os.environ | environment, subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, env=env) as process:
        assert process.stdout is not None
        try:
            for line in (each.decode(errors="replace") for each in process.stdout):
                print(line, end="", flush=True)
                lines.append(line)
        except BaseException:  # it would be waited for
            kill([psutil.Process(process.pid), *below(process.pid)])
            raise
    said = "".join(lines)
    if process.returncode:
        name = " ".join(command[:6])
        raise RuntimeError(f"{name} ... ended with {process.returncode}: {last_line(said)}")
    return said


def succeeds(what: str, command: Sequence[str], found: str = "") -> Measurement:
    """A command that must end with 0: its last line, or `found`. Rows follow its failure, too."""
    try:
        return holds(what, True, found or last_line(checked(command)).strip("= "))
    except RuntimeError as error:
        return holds(what, False, str(error))


def text_of(log: Path) -> str:
    """The content of a log; "" where nothing has written it."""
    return log.read_text(errors="replace") if log.is_file() else ""


def last_line(text: str) -> str:
    """The last line that is not empty. Where torchrun's report of a failed rank is the end, it is
    of what was said before: the report ends in a row of "=" and lacks the rank's own error.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    if not lines[-1].strip("="):
        before = itertools.takewhile(lambda line: "torch/distributed/elastic/" not in line, lines)
        lines = list(before) or lines
    return lines[-1]


def checkout() -> Path | None:
    """The repository that this package is a part of; None where it was installed without it."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "tests").is_dir() and (root / "slurm").is_dir() else None
