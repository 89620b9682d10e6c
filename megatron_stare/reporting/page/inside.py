"""The contents of steps: bins, densities, token tables and rollouts from diagnostics/.

A page has room for a limited number of them; a rollout is shown as a conversation.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

from megatron_stare.reporting import diagnostics
from megatron_stare.reporting.diagnostics import Diagnostics, SampledRollout
from megatron_stare.reporting.page.runs import Run

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
    recorded = diagnostics.steps(run.directory)
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
    return {
        "prompt_index": rollout.prompt_index,
        "sample": rollout.sample,
        "reward": rollout.reward,
        "verdict": rollout.verdict,
        "finish": rollout.finish_reason,
        "versions": rollout.versions,
        "label": rollout.label,
        "advantage": rollout.advantage,
        "turns": prompt_turns(rollout.prompt),
        "stretches": stretches(rollout.loss_mask),
        "text": rollout.text,
        "surprisal": rollout.surprisal,
        "entropy": rollout.entropy,
        "sensitivity": rollout.sensitivity,
        "weight": rollout.weight,
        "change": rollout.change,
        "chosen": rollout.chosen,
    }


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
