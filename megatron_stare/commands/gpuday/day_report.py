"""The report of a day, and machine.yaml, which `plan --machine` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_stare.commands.gpuday.results import Day, Measured, Result
from megatron_stare.commands.gpuday.stages import STAGES
from megatron_stare.system import atomic_write

REPORT, MACHINE = "report.md", "machine.yaml"
MEANINGLESS = (
    "**Rehearsal.** This machine computes nothing, or the shapes are tiny: the figures below show "
    "that every stage runs. They say nothing of any GPU."
)


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


def _line(row: Measured) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
    cells = (row.what, _figure(row.expected), _figure(row.measured), row.unit, ratio, row.verdict)
    return f"| {' | '.join(map(_cell, cells))} |"


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
