"""The command `gpuday`: runs the stages on this machine and writes their report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_stare.commands.arguments import OVERRIDES, argument, command
from megatron_stare.commands.gpuday.rows import Day
from megatron_stare.commands.gpuday.stages import STAGES, Result, find_stages, kept, run_stages
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
    """Print each stage's result and write the report; 1 if any row or stage failed."""
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
        stages = [each for each in stages if any(each.minutes)]
    day.path.mkdir(parents=True, exist_ok=True)
    for result in run_stages(day, stages, budget, options.again):
        found = f"{len(result.rows)} rows, {result.count('FAIL')} FAIL; {result.reason}"
        seconds = f"{result.seconds:.0f} s"
        print(f"{result.stage}: {result.status} in {seconds}, {found.rstrip('; ')}", flush=True)
    known = [each for stage in STAGES if (each := kept(day.path, stage.name))]
    print(f"report: {write_report(day, known)}\nfor plan --machine: {day.path / MACHINE}")
    return int(any(result.faulty for result in known))


def _listed() -> str:
    """The table of stages, and the planned minutes of a day."""
    whole = (sum(each) for each in zip(*(stage.minutes for stage in STAGES), strict=True))
    rows = [(each.name, each.minutes, each.what) for each in STAGES] + [
        ("", whole, "the whole day")
    ]
    lines = [f"{'':4}{'1 GPU':>6}{'8 GPUs':>8}  (planned minutes)"]
    for name, minutes, what in rows:
        one, eight = (str(each or "-") for each in minutes)
        lines.append(f"{name:4}{one:>6}{eight:>8}  {what}")
    return "\n".join(lines)


def seen_gpus() -> int:
    """The number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def write_report(day: Day, results: Sequence[Result]) -> Path:
    """Write report.md and machine.yaml, the measured fields of planning.machine.Machine, into the
    day's directory; the path of the report.
    """
    titles = {stage.name: stage.what for stage in STAGES}
    machine = ", ".join(sorted({each.machine for each in results if each.machine})) or "not known"
    figures: dict[str, float | str] = {"name": machine}
    lines = ["# First GPU day", "", f"Machine: {machine}", ""]
    if day.rehearsal or "(null)" in machine or "no GPU" in machine:
        figures["name"] = f"{machine}, rehearsal"
        lines += [MEANINGLESS, ""]
    lines += ["| stage | what | result | seconds | rows | FAIL | WARN |"]
    lines += ["|---|---|---|---:|---:|---:|---:|"]
    for each in results:
        counts = len(each.rows), each.count("FAIL"), each.count("WARN")
        title, seconds = titles[each.stage], f"{each.seconds:.0f}"
        lines.append(_line(each.stage, title, each.status, seconds, *counts))
    for each in results:
        lines += ["", f"## {each.stage}: {titles[each.stage]}", ""]
        if each.reason:
            lines += [f"{each.status}: {_cell(each.reason)}", ""]
        if each.rows:
            lines += ["| what | expected | measured | unit | ratio | verdict |"]
            lines += ["|---|---:|---:|---|---:|---|"]
        for row in each.rows:
            ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
            lines.append(_line(row.what, row.expected, row.measured, row.unit, ratio, row.verdict))
        figures |= {row.figure: row.measured for row in each.rows if row.figure}
    atomic_write(day.path / MACHINE, yaml.safe_dump(figures, sort_keys=False))
    atomic_write(day.path / REPORT, "\n".join(lines) + "\n")
    return day.path / REPORT


def _line(*cells: float | str) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: float | str) -> str:
    text = value if isinstance(value, str) else f"{value:.4g}"
    return text.replace("|", "/").replace("\n", " ")
