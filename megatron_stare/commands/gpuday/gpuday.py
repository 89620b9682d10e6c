"""The command `gpuday`: runs the stages on this machine, writes the report, and machine.yaml, which
`plan --machine` reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_stare.commands.arguments import OVERRIDES, argument, command
from megatron_stare.commands.gpuday.rows import Day
from megatron_stare.commands.gpuday.stages import (
    STAGES,
    Result,
    find_stages,
    read_result,
    run_stages,
)
from megatron_stare.config import Config, UserError, override
from megatron_stare.system import atomic_write

REPORT, MACHINE = "report.md", "machine.yaml"
MEANINGLESS = (
    "**Rehearsal.** This machine computes nothing, or the shapes are tiny: the figures below show "
    "that every stage runs. They say nothing of any GPU."
)


@command(
    "gpuday",
    "accept a GPU machine: checks, speeds and short runs, as one report; resumable",
    OVERRIDES,
    argument("--list", action="store_true", help="print the stages with their planned minutes"),
    argument("--stages", default="", metavar="K0,K3", help="only these stages (all)"),
    argument("--budget", type=float, default=0.0, help="minutes; 0: no limit (0)"),
    argument("--output", type=Path, default=Path("runs/gpuday"), help="(runs/gpuday)"),
    argument("--model", default="", help="a Hugging Face directory; default: a random model"),
    argument("--gpus", type=int, default=-1, help="GPUs that the stages may use; default: all"),
    argument("--again", action="store_true", help="run stages again that have a result"),
    argument("--rehearse", action="store_true", help="tiny shapes, on any machine"),
    examples=("gpuday", "gpuday --stages K0,K3"),
)
def _gpuday(options: argparse.Namespace) -> int:
    """Print each stage's result and write the report. The exit code is 1 if any row or stage
    failed.
    """
    if options.list:
        print(_listed())
        return 0
    override(Config(), options.overrides)  # unknown settings fail before the first stage
    seen, model, budget = seen_gpus(), options.model, options.budget
    if options.gpus > seen:
        raise UserError(f"--gpus {options.gpus} is more than the {seen} that torch sees")
    if budget < 0:
        raise UserError(f"--budget {budget:g} must be 0 (no limit) or more minutes")
    if model and not (Path(model) / "config.json").is_file():
        raise UserError(f"--model {model} has no config.json; give a Hugging Face directory")
    gpus, model = seen if options.gpus < 0 else options.gpus, model and str(Path(model).absolute())
    overrides = tuple(options.overrides)
    day = Day(options.output.absolute(), gpus, model, options.rehearse, overrides)
    stages = find_stages(options.stages)
    if not options.stages and not day.rehearsal:  # K10 is asked for by its name
        stages = [each for each in stages if each.planned(day) or day.gpus < each.gpus]
    day.path.mkdir(parents=True, exist_ok=True)
    for result in run_stages(day, stages, budget, options.again):
        found = f"{len(result.rows)} rows, {result.count('FAIL')} FAIL; {result.reason}"
        seconds = f"{result.seconds:.0f} s"
        print(f"{result.stage}: {result.status} in {seconds}, {found.rstrip('; ')}", flush=True)
    known = [kept for stage in STAGES if (kept := read_result(day.path, stage.name))]
    print(f"report: {write_report(day, known)}\nfor plan --machine: {day.path / MACHINE}")
    return int(any(result.faulty for result in known))


def _listed() -> str:
    """The table of stages, and the planned minutes of a day."""
    lines = [f"{'':4}{'1 GPU':>6}{'8 GPUs':>8}  (planned minutes)"]
    for stage in STAGES:
        one, eight = (str(each) if each else "-" for each in stage.minutes)
        lines.append(f"{stage.name:4}{one:>6}{eight:>8}  {stage.what}")
    one, eight = (sum(each) for each in zip(*(stage.minutes for stage in STAGES), strict=True))
    return "\n".join([*lines, f"{'':4}{one:>6}{eight:>8}  the whole day"])


def seen_gpus() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def write_report(day: Day, results: Sequence[Result]) -> Path:
    """Write report.md and machine.yaml, the measured fields of planning.machine.Machine, into the
    day's directory; the path of the report.
    """
    titles = {stage.name: stage.what for stage in STAGES}
    machines = sorted({result.machine for result in results if result.machine})
    machine = ", ".join(machines) or "not known"
    figures: dict[str, float | str] = {"name": machine}
    lines = ["# First GPU day", "", f"Machine: {machine}", ""]
    if day.rehearsal or any("(null)" in name or name == "no GPU" for name in machines):
        figures["name"] = f"{machine}, rehearsal"
        lines += [MEANINGLESS, ""]
    lines += ["| stage | what | result | seconds | rows | FAIL | WARN |"]
    lines += ["|---|---|---|---:|---:|---:|---:|"]
    for result in results:
        counts = len(result.rows), result.count("FAIL"), result.count("WARN")
        seconds = f"{result.seconds:.0f}"
        lines.append(_line(result.stage, titles[result.stage], result.status, seconds, *counts))
    for result in results:
        lines += ["", f"## {result.stage}: {titles[result.stage]}", ""]
        if result.reason:
            lines += [f"{result.status}: {_cell(result.reason)}", ""]
        if result.rows:
            lines += ["| what | expected | measured | unit | ratio | verdict |"]
            lines += ["|---|---:|---:|---|---:|---|"]
        for row in result.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
            lines.append(_line(row.what, row.expected, row.measured, row.unit, ratio, row.verdict))
            if row.figure:
                figures[row.figure] = row.measured
    atomic_write(day.path / MACHINE, yaml.safe_dump(figures, sort_keys=False))
    atomic_write(day.path / REPORT, "\n".join(lines) + "\n")
    return day.path / REPORT


def _line(*cells: float | str) -> str:
    """A line of a table; numbers have four digits."""
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: float | str) -> str:
    text = value if isinstance(value, str) else f"{value:.4g}"
    return text.replace("|", "/").replace("\n", " ")
