"""The settings of every arm and where they differ, versions, commit and machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_stare import config as configuration
from megatron_stare.config import Config
from megatron_stare.reporting.page.runs import Run, Source, arms_of
from megatron_stare.reporting.provenance import read_starts

# Not of an arm: the place of the run, and the comparison that it belongs to.
_LEFT_OUT = ("run.dir", "run.seed", "compare.")


def about_of(sources: Sequence[Source]) -> dict[str, Any]:
    """{"starts": what the runs ran on, "differing": settings on which the arms differ, "common":
    those that all arms changed alike}; a row of settings is [key, default, a value of each arm].
    """
    runs = [run for source in sources for run in source.runs]
    rows = _changed(runs)
    return {
        "starts": _starts(sources, runs),
        "differing": [row for row in rows if len(set(row[2:])) > 1],
        "common": [row[:3] for row in rows if len(set(row[2:])) == 1],
        "commands": [source.command or "the command was not recorded" for source in sources],
    }


def _changed(runs: Sequence[Run]) -> list[list[str]]:
    """Every setting that is not the default in some arm. An arm stands for all of its seeds by the
    first; an arm whose config.yaml cannot be read has "not recorded".
    """
    defaults: dict[str, str] = {}
    arms: list[dict[str, str] | None] = []
    for arm in arms_of(runs):
        config = next(run for run in runs if run.arm == arm).config()
        if config is None:
            arms.append(None)
            continue
        changed = {}
        for key, default, value in configuration.differences(Config(), config):
            if not key.startswith(_LEFT_OUT):
                defaults[key], changed[key] = _written(default), _written(value)
        arms.append(changed)
    return [
        [key, default, *("not recorded" if arm is None else arm.get(key, default) for arm in arms)]
        for key, default in sorted(defaults.items())
    ]


def _written(value: Any) -> str:
    """A value as an override takes it; what is empty is named."""
    if value in ("", None):
        return "(empty)"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _starts(sources: Sequence[Source], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry for each environment that runs were started in: {"runs": their numbers, "facts":
    pairs of name and text}. Runs without a record share one entry without facts.
    """
    found: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        starts = read_starts(run.directory)
        if not starts:
            found.setdefault("", {"runs": [], "facts": []})["runs"].append(number)
        for start in starts:
            facts = _facts(start)
            entry = found.setdefault(json.dumps(facts), {"runs": [], "facts": facts, "times": []})
            entry["runs"] = list(dict.fromkeys([*entry["runs"], number]))
            entry["times"].append(str(start.get("time", "")))
    for entry in found.values():
        if times := sorted(entry.pop("times", [])):
            entry["facts"] = [["Started", _when(times)], *entry["facts"]]
    return list(found.values())


def _when(times: Sequence[str]) -> str:
    """The first and the last of several times, to the minute."""
    first, last = (time[:16].replace("T", " ") for time in (times[0], times[-1]))
    if len(times) == 1:
        return f"{first} UTC"
    return f"{first} to {last} UTC, {len(times)} starts"


def _facts(start: Mapping[str, Any]) -> list[list[str]]:
    versions, machine = dict(start.get("versions", {})), dict(start.get("machine", {}))
    own = versions.pop("megatron_stare", "")
    gpus = list(machine.get("gpus") or [])
    counted = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    driver = f", driver {machine['driver']}" if machine.get("driver") and gpus else ""
    facts = {
        "megatron_stare": own,
        "Commit": start.get("commit") or "not a checkout",
        "Versions": ", ".join(f"{name} {each}" for name, each in versions.items() if each),
        "Ranks": str(start.get("ranks", "")),
        "GPUs": counted + driver if gpus else "none",
        "Processor": f"{machine.get('processor', '')}, {machine.get('cores', '')} cores, "
        f"{machine.get('memory_gib', '')} GiB",
        "System": str(machine.get("system", "")),
    }
    return [[name, text] for name, text in facts.items()]
