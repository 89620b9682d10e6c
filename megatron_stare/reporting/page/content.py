"""The whole content of a page as one tree of plain values.

assets/ draw it and add no number of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.reporting.alarms import read_alarms
from megatron_stare.reporting.intervals import Interval, combine_seeds
from megatron_stare.reporting.page.figures import figures_of
from megatron_stare.reporting.page.inside import inside_of
from megatron_stare.reporting.page.runs import Point, Run, Source, arms_of, read_sources
from megatron_stare.reporting.summary import BAND, ROWS

# The places of the palette (assets/style.css) that belong to two arms; others take the rest.
OWN_COLOUR = {"STARE": 0, "GRPO-ds": 1}
PALETTE = 10
# Counters since the start of a process: a resumed run begins again at zero.
COUNTERS = {
    "engine_fault_connection": "servers that could not be reached",
    "engine_fault_timeout": "requests that took too long",
    "engine_fault_status": "requests that a server refused",
    "engine_fault_garbage": "answers that made no sense",
    "engine_restarts": "servers restarted",
    "engine_corrupt_syncs": "weights that arrived wrong and were sent again",
    "engine_recoveries": "recoveries",
    "engine_continued": "rollouts continued elsewhere",
    "engine_parts_dropped": "rollouts sampled again from their beginning",
    "engine_invalid_rollouts": "rollouts given up",
    "stale_groups_dropped": "groups dropped as too old",
}
# Counts of one step.
EVENTS = {
    "nonfinite": "steps left out: not finite",
    "skipped": "steps without a signal",
    "verifier_kills": "verifiers killed",
}


def content_of(directories: Sequence[Path]) -> dict[str, Any]:
    """The tree of a page. UserError: a directory is neither a run nor a comparison, or holds a file
    that cannot be read.
    """
    sources = read_sources(directories)
    runs = [run for source in sources for run in source.runs]
    arms = arms_of(runs)
    targets = {source.target_entropy for source in sources if source.target_entropy}
    tree = {
        "title": _title(sources, arms),
        "lead": _lead(sources, runs),
        "arms": [
            {"name": arm, "colour": place}
            for arm, place in zip(arms, colours_of(arms), strict=True)
        ],
        "runs": [
            {"arm": arms.index(run.arm), "seed": run.seed, "rows": len(run.rows)} for run in runs
        ],
        "bands": [[target, target * (1 - BAND), target * (1 + BAND)] for target in sorted(targets)],
        "band_share": BAND,
        "table": _table(runs),
        "findings": [claim._asdict() for source in sources for claim in source.claims],
        "caveats": [text for source in sources for text in source.caveats],
        "commands": [source.command or "the command was not recorded" for source in sources],
        "inside": inside_of(runs),
        "faults": [faults_of(run) for run in runs],
    }
    found: dict[str, Any] = short(tree | figures_of(runs))
    return found


def colours_of(arms: Sequence[str]) -> list[int]:
    """Each arm's place in the palette: two have their own, others take what is free, in order."""
    spare = [place for place in range(PALETTE) if place not in OWN_COLOUR.values()]
    free = iter(spare * (1 + len(arms)))
    return [OWN_COLOUR[arm] if arm in OWN_COLOUR else next(free) for arm in arms]


def _title(sources: Sequence[Source], arms: Sequence[str]) -> str:
    if len(sources) > 1:
        return enumerated([str(source.directory) for source in sources])
    return f"{arms[0]} run" if len(arms) == 1 else f"{enumerated(arms)} from one start"


def enumerated(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _seeds(runs: Sequence[Run]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """{seed: {arm: summary}} of the runs that have taken a step."""
    seeds: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        if run.summary:
            seeds.setdefault(run.seed, {})[run.arm] = run.summary
    return seeds


def _draws(runs: Sequence[Run]) -> int | None:
    """The k of avg@k and pass@k, where all runs share it."""
    found = {run.summary.get("k") for run in runs}
    return int(found.pop() or 0) or None if len(found) == 1 else None


def _lead(sources: Sequence[Source], runs: Sequence[Run]) -> str:
    if not any(run.summary for run in runs):
        return "No step was taken yet."
    clauses, solving = [], False
    for arm, values in combine_seeds(_seeds(runs)).items():
        entropy, solved = values.get("entropy_final"), values.get("heldout_pass_at_k")
        clause = f"{arm} ends at {entropy.mean:.2f} nats" if entropy else arm
        if solved:
            solving = True
            clause += f" and solves {solved.mean:.0%} of the held-out HARD problems"
        clauses.append(clause)
    targets = sorted({source.target_entropy for source in sources if source.target_entropy})
    target = f"Target entropy {', '.join(f'{each:g}' for each in targets)}. " if targets else ""
    tries = f", in {_draws(runs)} tries each" if solving and _draws(runs) else ""
    seeds = list({run.seed: None for run in runs})
    plural = "s" if len(seeds) > 1 else ""
    return f"{target}{'; '.join(clauses)}{tries}. Seed{plural} {', '.join(seeds)}."


def _table(runs: Sequence[Run]) -> dict[str, Any]:
    """{"arms", "rows": label and a cell of each arm, "seeds": that means are of}; a cell is None,
    or its mean, half width (or None) and the values of the seeds, as they are written.
    """
    seeds = _seeds(runs)
    combined = combine_seeds(seeds)
    rows = []
    for key, label, form in ROWS:
        if not any(values.get(key) for values in combined.values()):
            continue
        cells = []
        for arm, values in combined.items():
            each = [arms[arm].get(key) for arms in seeds.values() if arm in arms]
            cells.append(_cell(values.get(key), each, form))
        rows.append({"label": label.format(k=_draws(runs) or "k"), "cells": cells})
    return {"arms": list(combined), "rows": rows, "seeds": list(seeds)}


def _cell(interval: Interval | None, each: Sequence[Any], form: str) -> dict[str, Any] | None:
    if interval is None:
        return None
    half_width = f"{interval.half_width:{form}}" if interval.half_width else None
    values = [f"{value:{form}}" for value in each] if half_width else []
    return {"mean": f"{interval.mean:{form}}", "half_width": half_width, "each": values}


def faults_of(run: Run) -> dict[str, Any]:
    """{"counts": survived faults with their number and steps, "alarms": those of alarms.jsonl}."""
    counts = []
    for key, text in (COUNTERS | EVENTS).items():
        points = run.series(key)
        steps = increases(points) if key in COUNTERS else [each for each in points if each[1] > 0]
        if steps:
            total = sum(count for _, count in steps)
            counts.append(
                {"text": text, "key": key, "count": total, "first": steps[0][0]}
                | {"last": steps[-1][0]}
            )
    alarms = [dataclasses.asdict(alarm) for alarm in read_alarms(run.directory)]
    return {"counts": counts, "alarms": alarms}


def increases(points: Sequence[Point]) -> list[Point]:
    """(step, increase) of a counter; a counter that fell was restarted from zero."""
    found, before = [], 0.0
    for step, value in points:
        more = value - before if value >= before else value
        if more > 0:
            found.append((step, more))
        before = value
    return found


def short(value: Any) -> Any:
    """The tree with its fractions at five significant digits, which no screen shows more of."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value != int(value) else int(value)
    if isinstance(value, dict):
        return {key: short(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [short(each) for each in value]
    return value
