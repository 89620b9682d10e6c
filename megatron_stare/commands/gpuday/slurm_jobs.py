"""K10: jobs on two nodes under Slurm: every node accepted, and a run that is requeued."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_stare.commands.gpuday.results import Day, Measurement, Skipped, holds, read_result
from megatron_stare.commands.gpuday.runs import ShortRun
from megatron_stare.commands.gpuday.stages import checked, checkout, last_line
from megatron_stare.recipes import find_recipe

NODES, GPUS_PER_NODE = 2, 8
RECIPE = "short_cot_32b"
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
PATIENCE_SECONDS = 400.0


class Job:
    """A submitted job on NODES nodes, with the output in a file. Options of a cluster (account,
    partition, memory) come from Slurm's own variables, SBATCH_ACCOUNT and the like.
    """

    def __init__(
        self, root: Path, output: Path, script: str, *words: str, **variables: str
    ) -> None:
        self.output = output
        place = [f"--output={output}", f"--chdir={root}", f"--nodes={NODES}"]
        command = ["sbatch", "--parsable", *place, str(root / "slurm" / script), *words]
        submitted = checked(command, MEGATRON_STARE=str(root), **variables)
        self.number = last_line(submitted.partition(";")[0])

    def __getitem__(self, field: str) -> str:
        """A field of `scontrol show job`."""
        shown = checked(["scontrol", "show", "job", self.number])
        found = re.search(rf"\b{field}=(\S*)", shown)
        return found[1] if found else ""

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.is_file() else ""

    def until(self, come: Callable[[], bool], what: str) -> None:
        """Wait. RuntimeError: the job ended before, or it takes too long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not come():
            state = self["JobState"]
            if (state in OVER and not come()) or time.monotonic() > deadline:
                end = last_line(self.text)
                raise RuntimeError(f"no {what}: job {self.number} is {state}; {end}")
            time.sleep(2.0)


def run(day: Day) -> Iterator[Measurement]:
    """K0 and K5 on every node, the links between them, and a run that USR1 moves on."""
    root = checkout()
    if root is None or not shutil.which("sbatch"):
        raise Skipped("needs sbatch and the checkout; run it where jobs are submitted")
    try:
        checked(["sinfo", "--noheader"])
    except (OSError, RuntimeError) as error:
        raise Skipped(f"Slurm does not answer: {error}") from error
    yield from _nodes(day, root)
    yield from _requeued(day, root)


def _nodes(day: Day, root: Path) -> Iterator[Measurement]:
    place = day.path / "nodes"
    words = ["--stages", "K0,K5", *["--rehearse"] * day.rehearsal]
    job = Job(root, day.path / "nodes.out", "gpuday.sbatch", *words, GPUDAY=str(place))
    job.until(lambda: job["JobState"] in OVER, "end")
    files = sorted(place.glob("*/K*.json"))
    yield holds(f"{NODES} nodes accepted", len(files) == 2 * NODES, f"{len(files)} results")
    for file in files:
        result = read_result(file.parent, file.stem)
        assert result is not None
        faults = [row.what for row in result.rows if row.verdict == "FAIL"]
        found = f"{result.status}, FAIL: {', '.join(faults) or 'none'}"
        yield holds(f"{file.stem} on {file.parent.name}", not result.faulty, found)
    finding = r"^(?:OK|WARN|FAIL) +((?:bandwidth|clocks|versions): .*)$"
    for line in re.findall(finding, job.text, re.M):
        yield Measurement("between the nodes", line)


def _requeued(day: Day, root: Path) -> Iterator[Measurement]:
    short = ShortRun(day, "requeued", 10_000, servers=None)
    short.command()  # writes the file that a rehearsal trains on
    source = str(short.directory.with_suffix(".yaml")) if day.rehearsal else RECIPE
    place, shared = day.path / "requeued.out", str(int(not day.rehearsal))
    job = Job(root, place, "train.sbatch", source, *short.settings, COLOCATED=shared)
    try:
        job.until(lambda: len(short.rows()) >= 3, "step 3")
        if not day.rehearsal:
            count = NODES * GPUS_PER_NODE // find_recipe(RECIPE).sglang.gpus_per_server
            urls = len(re.findall(r"http://", job.text.partition("servers: http")[2])) + 1
            yield holds("servers have the recipe's GPUs", urls >= count, f"{urls} servers")
        checked(["scancel", "--batch", "--signal=USR1", job.number])
        job.until(lambda: int(job["Restarts"] or 0) > 0, "requeue")
        step = len(short.rows())
        job.until(lambda: len(short.rows()) > step, f"step {step + 1} after the requeue")
        steps = [row["step"] for row in short.rows()]
        yield holds("every step once", steps == list(range(1, len(steps) + 1)), f"{len(steps)}")
    finally:
        checked(["scancel", job.number])
