"""The runs of a page: directories of runs and comparisons, and what each is called.

A run directory holds config.yaml and metrics.jsonl. A comparison directory holds summary.json
(`runs`, `seeds`, and where known `command` and `caveats`) and one run per arm in seed<N>/<arm>/.
One that is still training has the runs and config.yaml, and no summary yet.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_stare import config as configuration
from megatron_stare.config import Config, UserError
from megatron_stare.reporting.logbook import METRICS_NAME, read_metrics
from megatron_stare.reporting.problem_scores import start_key
from megatron_stare.reporting.summary import (
    SUMMARY_NAME,
    Claim,
    arm_label,
    check_comparison,
    mean_and_interval,
    summarize_run,
    target_of,
)

CONFIG_NAME = "config.yaml"
Point = tuple[float, float]  # step, value


@dataclass(frozen=True)
class Run:
    """One arm under one seed."""

    arm: str  # the page's name for it; runs of one name are seeds of one arm and share a colour
    seed: str
    directory: Path
    rows: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]  # empty before the first step

    def series(self, key: str) -> list[Point]:
        """(step, value) wherever a row has a finite number for the key; of an evaluation also that
        of the start, at step 0.
        """
        start = start_key(key)
        begin = [(0, row[start]) for row in self.rows[:1] if start != key and start in row]
        return begin + [
            (row["step"], float(row[key]))
            for row in self.rows
            if isinstance(row.get(key), int | float) and math.isfinite(row[key])
        ]

    def config(self) -> Config | None:
        """The settings; None where config.yaml is missing or of another version of the package."""
        try:
            return configuration.load(self.directory / CONFIG_NAME)
        except UserError:
            return None


@dataclass(frozen=True)
class Source:
    """The runs of one directory."""

    directory: Path
    runs: list[Run]
    targets: tuple[float, ...]  # entropies that runs were steered to
    command: str | None
    claims: Sequence[Claim] = ()
    caveats: Sequence[str] = ()


def read_sources(directories: Sequence[Path]) -> list[Source]:
    """Every directory, a run or a comparison. An arm of several of them is called after its
    directory too. UserError: a directory is neither, or is given twice.
    """
    twice = [str(path) for path, count in Counter(map(Path, directories)).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]} is named twice; give each run once")
    sources = [_read_source(Path(directory)) for directory in directories]
    holders = Counter(arm for source in sources for arm in {run.arm for run in source.runs})
    return [
        replace(
            source,
            runs=[
                replace(run, arm=f"{run.arm}, {source.directory}") if holders[run.arm] > 1 else run
                for run in source.runs
            ],
        )
        for source in sources
    ]


def _read_source(directory: Path) -> Source:
    if (directory / SUMMARY_NAME).exists():
        return _read_comparison(directory)
    if (directory / METRICS_NAME).exists():
        return _read_run(directory)
    begun = sorted(directory.glob(f"seed*/*/{METRICS_NAME}"))
    if begun:
        return _read_unfinished(directory, begun)
    raise UserError(
        f"{directory} holds neither {METRICS_NAME} (a run) nor {SUMMARY_NAME} (a comparison); give "
        "the run.dir of a run that has taken a step"
    )


def _read_run(directory: Path) -> Source:
    config = configuration.load(directory / CONFIG_NAME)
    target = target_of(config, 0.0)
    run = _run(directory, config.loss.name, str(config.run.seed), target)
    command = f"python -m megatron_stare train {directory / 'config.yaml'}"
    return Source(directory, [run], (target,) if target else (), command)


def _run(directory: Path, arm: str, seed: str, target: float) -> Run:
    rows = read_metrics(directory / METRICS_NAME)
    taken = any("entropy" in row for row in rows)
    summary = summarize_run(directory, target) if taken else {}
    return Run(arm_label(arm), seed, directory, rows, summary)


def _read_unfinished(directory: Path, begun: Sequence[Path]) -> Source:
    shared = configuration.load(directory / CONFIG_NAME).loss.target_entropy
    runs = []
    for arm in (path.parent for path in begun):
        target = target_of(configuration.load(arm / CONFIG_NAME), shared)
        runs.append(_run(arm, arm.name, arm.parent.name.removeprefix("seed"), target))
    caveats = ["The comparison is still training, or was interrupted: nothing is checked yet."]
    return Source(directory, runs, _targets(runs), None, caveats=caveats)


def _targets(runs: Sequence[Run]) -> tuple[float, ...]:
    return tuple(sorted({run.summary["target_entropy"] for run in runs if run.summary}))


def _read_comparison(directory: Path) -> Source:
    path = directory / SUMMARY_NAME
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        seeds = summary.get("seeds") or {str(summary["seed"]): summary["runs"]}
        runs = [
            Run(
                arm_label(arm),
                str(seed),
                directory / f"seed{seed}" / arm,
                read_metrics(directory / f"seed{seed}" / arm / METRICS_NAME),
                numbers,
            )
            for seed, arms in seeds.items()
            for arm, numbers in arms.items()
        ]
        targets = _targets(runs)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path}: {error!r}; it must hold seeds, or seed and runs, each with its target_entropy"
        ) from None
    return Source(
        directory,
        runs,
        targets,
        summary.get("command"),
        check_comparison(summary),
        summary.get("caveats", ()),
    )


def arms_of(runs: Sequence[Run]) -> list[str]:
    """The arms, each once, in the order in which they come."""
    return list({run.arm: None for run in runs})


def mean_over_seeds(many: Sequence[Sequence[Point]]) -> list[tuple[float, float, float]]:
    """(step, mean, half width of its 95% interval) at every step that all seeds have."""
    tables = [dict(series) for series in many]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    found = []
    for step in shared:
        mean, half_width = mean_and_interval([table[step] for table in tables])
        found.append((step, mean, half_width or 0.0))
    return found
