"""What is inside steps: bins, densities, token tables and rollouts of diagnostics/, as many as a
page has room for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_stare.reporting import diagnostics
from megatron_stare.reporting.diagnostics import Diagnostics
from megatron_stare.reporting.page.conversations import conversation
from megatron_stare.reporting.page.runs import Run
from megatron_stare.reporting.page.sampling import spaced

# What one page holds, over all of its runs: steps to look into, and tokens of rollouts.
MOST_STEPS, MOST_TOKENS = 48, 60_000


def inside_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each run: {"recorded": how many steps have diagnostics, "steps": those shown, "rollouts":
    those shown, "sampled": how many these steps have}.
    """
    room = max(1, MOST_STEPS // max(1, len(runs)))
    tokens = MOST_TOKENS // max(1, len(runs))
    return [_run_inside(run, room, tokens) for run in runs]


def _run_inside(run: Run, most_steps: int, most_tokens: int) -> dict[str, Any]:
    recorded = diagnostics.steps(run.directory)
    steps = [diagnostics.read(run.directory, step) for step in spaced(recorded, most_steps)]
    shown = _chosen_rollouts(steps, most_tokens)
    return {
        "recorded": len(recorded),
        "steps": [_step(step) for step in steps],
        "rollouts": shown,
        "sampled": sum(len(step.rollouts) for step in steps),
    }


def _chosen_rollouts(steps: Sequence[Diagnostics], most_tokens: int) -> list[dict[str, Any]]:
    """Whole rollouts, from the last step, the first, the one between them and so on, while there is
    room; at least one.
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


def _step(step: Diagnostics) -> dict[str, Any]:
    """A step without its rollouts, as plain values."""
    kept = {
        each.name: getattr(step, each.name)
        for each in dataclasses.fields(step)
        if each.name != "rollouts"
    }
    return {name: _plain(value) for name, value in kept.items()}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
