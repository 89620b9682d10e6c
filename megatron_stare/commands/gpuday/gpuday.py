"""`gpuday`: runs the stages on this machine and writes the report."""

from __future__ import annotations

from pathlib import Path

from megatron_stare.commands.gpuday.day_report import MACHINE, write_report
from megatron_stare.commands.gpuday.results import Day, read_result
from megatron_stare.commands.gpuday.stages import STAGES, Stage, find_stages, minutes, run_stages
from megatron_stare.config import UserError


def listed() -> str:
    """The table of stages, and the planned minutes of a day."""
    lines = [f"{'':4}{'1 GPU':>6}{'8 GPUs':>8}  (planned minutes)"]
    for stage in STAGES:
        one, eight = (str(each) if each else "-" for each in stage.minutes)
        lines.append(f"{stage.name:4}{one:>6}{eight:>8}  {stage.what}")
    totals = [sum(stage.minutes[which] for stage in STAGES) for which in (0, 1)]
    return "\n".join([*lines, f"{'':4}{totals[0]:>6}{totals[1]:>8}  the whole day"])


def gpuday(day: Day, names: str, budget: float, again: bool) -> int:
    """Run the stages, printing each result, and write the report. The exit code is 1 if any row or
    stage failed.
    """
    if budget < 0:
        raise UserError(f"--budget {budget:g} must be 0 (no limit) or more minutes")
    if day.model and not (Path(day.model) / "config.json").is_file():
        raise UserError(f"--model {day.model} has no config.json; give a Hugging Face directory")
    wanted = find_stages(names)
    day.write()
    today = [stage for stage in wanted if names or _today(stage, day)]
    for result in run_stages(day, today, budget, again):
        faults = sum(row.verdict == "FAIL" for row in result.rows)
        said = f"{len(result.rows)} rows, {faults} FAIL; {result.reason}".rstrip("; ")
        print(f"{result.stage}: {result.status} in {result.seconds:.0f} s, {said}", flush=True)
    known = [found for stage in STAGES if (found := read_result(day.path, stage.name))]
    print(f"report: {write_report(day, known)}\nfor plan --machine: {day.path / MACHINE}")
    return int(any(result.faulty for result in known))


def seen_gpus() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _today(stage: Stage, day: Day) -> bool:
    """Whether the stage is part of this machine's day. A rehearsal has all stages; K10 is asked for
    by its name.
    """
    return day.rehearsal or bool(minutes(stage, day)) or day.gpus < stage.gpus
