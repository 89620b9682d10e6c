"""A sampled rollout as a conversation: the prompt's turns, then what the policy wrote and what came
back to it.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from megatron_stare.reporting.diagnostics import SampledRollout

# The turns of the two families of chat templates that the models here use.
_TURNS = (
    re.compile(r"<\|im_start\|>([^\n]*)\n(.*?)(?:<\|im_end\|>\s*|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_header_id\|>(.*?)<\|end_header_id\|>\s*(.*?)(?:<\|eot_id\|>\s*|\Z)", re.DOTALL
    ),
)


def prompt_turns(prompt: str) -> list[tuple[str, str]]:
    """(role, text) of each turn of a prompt; one turn called "prompt" where no template shows.

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
    """(who, first token, behind the last) of the response: "policy" wrote the tokens that may be
    trained on, "environment" the others (a tool's output, and the template around it).
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
