"""The whole content of a page as one tree of plain values.

assets/ draw it and add no number of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stare import config as configuration
from megatron_stare.config import Config
from megatron_stare.reporting import diagnostics
from megatron_stare.reporting.diagnostics import Diagnostics, SampledRollout
from megatron_stare.reporting.logbook import Alarm, read_alarms
from megatron_stare.reporting.page.figures import figures_of
from megatron_stare.reporting.page.runs import Point, Run, Source, arms_of, read_sources
from megatron_stare.reporting.provenance import read_starts
from megatron_stare.reporting.summary import BAND, Interval, combine_seeds, table_rows

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
    targets = {target for source in sources for target in source.targets}
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
        "caveats": [text for source in sources for text in source.caveats] + at_bound(runs),
        "about": about_of(sources),
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


def _lead(sources: Sequence[Source], runs: Sequence[Run]) -> str:
    if not any(run.summary for run in runs):
        return "No step was taken yet."
    shown = (
        row
        for row in table_rows(run.summary for run in runs if run.summary)
        if row[0].endswith("pass_at_k")
    )
    evaluated, label, _ = next(shown, ("", "", ""))
    clauses = []
    for arm, values in combine_seeds(_seeds(runs)).items():
        entropy, solved = values.get("entropy_final"), values.get(evaluated)
        clause = f"{arm} ends at {entropy.mean:.2f} nats" if entropy else arm
        clauses.append(clause + (f" ({label} {solved.mean:.0%})" if solved else ""))
    targets = sorted({target for source in sources for target in source.targets})
    target = f"Target entropy {', '.join(f'{each:g}' for each in targets)}. " if targets else ""
    seeds = list({run.seed: None for run in runs})
    plural = "s" if len(seeds) > 1 else ""
    return f"{target}{'; '.join(clauses)}. Seed{plural} {', '.join(seeds)}."


def _table(runs: Sequence[Run]) -> dict[str, Any]:
    """{"arms", "rows": label and a cell of each arm, "seeds": that means are of}; a cell is None,
    or its mean, half width (or None) and the values of the seeds, as they are written.
    """
    seeds = _seeds(runs)
    combined = combine_seeds(seeds)
    rows = []
    for key, label, form in table_rows(run.summary for run in runs if run.summary):
        if not any(values.get(key) for values in combined.values()):
            continue
        cells = []
        for arm, values in combined.items():
            each = [arms[arm].get(key) for arms in seeds.values() if arm in arms]
            cells.append(_cell(values.get(key), each, form))
        rows.append({"label": label, "cells": cells})
    return {"arms": list(combined), "rows": rows, "seeds": list(seeds)}


def _cell(interval: Interval | None, each: Sequence[Any], form: str) -> dict[str, Any] | None:
    if interval is None:
        return None
    half_width = f"{interval.half_width:{form}}" if interval.half_width else None
    values = [f"{value:{form}}" for value in each] if half_width else []
    return {"mean": f"{interval.mean:{form}}", "half_width": half_width, "each": values}


def faults_of(run: Run) -> dict[str, Any]:
    """{"counts": survived faults with their number and steps, "alarms": causes of alarms.jsonl}."""
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
    return {"counts": counts, "alarms": _causes(read_alarms(run.directory))}


def _causes(alarms: Sequence[Alarm]) -> list[dict[str, Any]]:
    """Alarms with one name and one remedy have one cause and share a row: how often and when they
    were raised, the last message, and every rollout that one of them named.
    """
    causes: dict[tuple[str, str], list[Alarm]] = {}
    for alarm in alarms:
        causes.setdefault((alarm.alarm, alarm.remedy), []).append(alarm)
    return [
        {
            "alarm": name,
            "remedy": remedy,
            "steps": [alarm.step for alarm in raised],
            "first_step": raised[0].first_step,
            "message": raised[-1].message,
            "rollouts": [pair for alarm in raised for pair in alarm.rollouts],
        }
        for (name, remedy), raised in causes.items()
    ]


def at_bound(runs: Sequence[Run]) -> list[str]:
    """A sentence for each run whose adaptive W stands at loss.w_max in a tenth of its steps or
    more: there a wider bound, and not another rule, would hold entropy up.
    """
    found = []
    for run in runs:
        weights = [value for _, value in run.series("weight_w")]
        config = run.config() if weights else None
        if config is None:
            continue
        loss = config.loss
        share = sum(value >= loss.w_max * (1 - 1e-6) for value in weights) / len(weights)
        if loss.adaptive and loss.reweight_w < loss.w_max and share >= 0.1:
            found.append(
                f"{run.arm}, seed {run.seed}: W stands at its bound loss.w_max={loss.w_max:g} in "
                f"{share:.0%} of the steps, so that the bound and not the rule decides; a larger "
                "loss.w_max leaves W more room."
            )
    return found


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


# Limits of one page, over all of its runs: steps with diagnostics, and tokens of rollouts.
MOST_STEPS, MOST_TOKENS = 48, 60_000
# The turns of the two families of chat templates that the models here use.
_TURNS = (
    re.compile(r"<\|im_start\|>([^\n]*)\n(.*?)(?:<\|im_end\|>\s*|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(.*?)<\|end_header_id\|>\s*(.*?)(?:<\|eot_id\|>\s*|\Z)", re.DOTALL
    ),
)


def inside_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each run: {"recorded": number of steps with diagnostics, "steps": the shown ones whose
    loss was finite, "rollouts": the shown ones, "sampled": number of rollouts in the shown steps}.
    """
    room = max(1, MOST_STEPS // max(1, len(runs)))
    tokens = MOST_TOKENS // max(1, len(runs))
    return [_run_inside(run, room, tokens) for run in runs]


def _run_inside(run: Run, most_steps: int, most_tokens: int) -> dict[str, Any]:
    # Later ones are of steps that the run went back from.
    last = run.rows[-1]["step"] if run.rows else 0
    recorded = [step for step in diagnostics.steps(run.directory) if step <= last]
    steps = [diagnostics.read(run.directory, step) for step in spaced(recorded, most_steps)]
    shown = _chosen_rollouts(steps, most_tokens)
    return {
        "recorded": len(recorded),
        "steps": [_step(step) for step in steps if step.change is not None],
        "rollouts": shown,
        "sampled": sum(len(step.rollouts) for step in steps),
    }


def _chosen_rollouts(steps: Sequence[Diagnostics], most_tokens: int) -> list[dict[str, Any]]:
    """Whole rollouts while there is room, at least one: first those of the last step, then of the
    first, of the middle one, and so on.
    """
    left = most_tokens
    found: list[dict[str, Any]] = []
    for number in _halving(len(steps)):
        for rollout in steps[number].rollouts:
            if found and len(rollout.text) > left:
                continue
            left -= len(rollout.text)
            found.append({"step": steps[number].step} | conversation(rollout))
    return sorted(found, key=lambda each: int(each["step"]))


def _halving(count: int) -> list[int]:
    """0 .. count - 1, the last first, so that any beginning of the list is spread evenly."""
    order = [count - 1, 0] if count > 1 else [0] * count
    gaps = [(0, count - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def spaced[Item](items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` of the items at even distances, the first and the last among them; of one
    place, the last item.
    """
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def prompt_turns(prompt: str) -> list[tuple[str, str]]:
    """(role, text) of each turn of a prompt; one turn named "prompt" if no template is recognised.

    Nothing is lost: text before the first turn is one more, and an empty turn that only opens the
    response is left out.
    """
    for pattern in _TURNS:
        matches = list(pattern.finditer(prompt))
        if matches and not any(
            prompt[one.end() : other.start()].strip() for one, other in itertools.pairwise(matches)
        ):
            before, after = prompt[: matches[0].start()], prompt[matches[-1].end() :]
            turns = [(match[1].strip() or "prompt", match[2].strip("\n")) for match in matches]
            turns = [("prompt", before), *turns, ("prompt", after)]
            return [(role, text) for role, text in turns if text.strip()]
    return [("prompt", prompt)]


def stretches(loss_mask: list[int]) -> list[tuple[str, int, int]]:
    """(author, first token, end) of each stretch of the response: "policy" for the tokens that may
    be trained on, "environment" for the others (a tool's output, and the template around it).
    """
    found, begin = [], 0
    for own, group in itertools.groupby(loss_mask, key=bool):
        end = begin + sum(1 for _ in group)
        found.append(("policy" if own else "environment", begin, end))
        begin = end
    return found


def conversation(rollout: SampledRollout) -> dict[str, Any]:
    """The rollout as the page reads it; lists have one value per token of the response."""
    found = dict(vars(rollout))
    prompt, loss_mask = found.pop("prompt"), found.pop("loss_mask")
    found["finish"] = found.pop("finish_reason")
    return found | {"turns": prompt_turns(prompt), "stretches": stretches(loss_mask)}


def _step(step: Diagnostics) -> dict[str, Any]:
    """A step without its rollouts, as plain values."""
    found = dataclasses.asdict(dataclasses.replace(step, rollouts=[]))
    del found["rollouts"]
    return found


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
