"""`gpuday`: runs the stages on this machine, writes the report, and machine.yaml, which
`plan --machine` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_stare.commands.gpuday.results import Day, Measurement, Result, read_result
from megatron_stare.commands.gpuday.stages import STAGES, Stage, find_stages, minutes, run_stages
from megatron_stare.config import UserError
from megatron_stare.system import atomic_write

REPORT, MACHINE = "report.md", "machine.yaml"
MEANINGLESS = (
    "**Rehearsal.** This machine computes nothing, or the shapes are tiny: the figures below show "
    "that every stage runs. They say nothing of any GPU."
)


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


def write_report(day: Day, results: Sequence[Result]) -> Path:
    """Write report.md and machine.yaml into the day's directory; the path of the report."""
    titles = {stage.name: stage.what for stage in STAGES}
    names = sorted({result.machine for result in results if result.machine})
    lines = ["# First GPU day", "", f"Machine: {', '.join(names) or 'not known'}", ""]
    lines += [MEANINGLESS, ""] if _is_meaningless(day, names) else []
    lines += ["| stage | what | result | seconds | rows | FAIL | WARN |"]
    lines += ["|---|---|---|---:|---:|---:|---:|"]
    for result in results:
        count = {level: sum(r.verdict == level for r in result.rows) for level in ("FAIL", "WARN")}
        lines.append(
            f"| {result.stage} | {titles[result.stage]} | {result.status} | {result.seconds:.0f} | "
            f"{len(result.rows)} | {count['FAIL']} | {count['WARN']} |"
        )
    for result in results:
        lines += ["", f"## {result.stage}: {titles[result.stage]}", ""]
        lines += [f"{result.status}: {_cell(result.reason)}", ""] if result.reason else []
        if result.rows:
            lines += ["| what | expected | measured | unit | ratio | verdict |"]
            lines += ["|---|---:|---:|---|---:|---|", *map(_line, result.rows)]
    atomic_write(day.path / REPORT, "\n".join(lines) + "\n")
    _write_machine(day, results, names)
    return day.path / REPORT


def _is_meaningless(day: Day, names: Sequence[str]) -> bool:
    return day.rehearsal or any("(null)" in name or name == "no GPU" for name in names)


def _write_machine(day: Day, results: Sequence[Result], names: Sequence[str]) -> None:
    """The measured fields of planning.machine.Machine."""
    meaningless = _is_meaningless(day, names)
    title = ", ".join(names) or "not known"
    figures: dict[str, float | str] = {"name": f"{title}, rehearsal" if meaningless else title}
    for result in results:
        figures |= {row.figure: row.measured for row in result.rows if row.figure}
    atomic_write(day.path / MACHINE, yaml.safe_dump(figures, sort_keys=False))


def _line(row: Measurement) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    cells = (row.what, _figure(row.expected), _figure(row.measured), row.unit, ratio, row.verdict)
    return f"| {' | '.join(map(_cell, cells))} |"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
