"""Rewards of +1 and -1, and ReTool's credit for trying a tool.

    signed    1 where the verdict is correct, else -1
    retool    1 where it is correct, else min(-0.6, -1 + 0.1 (m - 2) / 2)           arXiv 2504.11536

m counts the messages of an episode as verl does: the prompt, the model's turns, and the tool's
answers between them. With n turns of the model m = 2 n, so each round with a tool adds 0.1 to a
wrong answer, four at most.
"""

from __future__ import annotations

from megatron_stare.records import Rollout

SHAPINGS = ("none", "signed", "retool")
_HIGHEST_WRONG, _PER_ROUND = -0.6, 0.1


def shaped_reward(shaping: str, correct: bool, rollout: Rollout) -> float:
    """The decisive reward of a judged rollout. A rollout without tools has one turn.
    ValueError: an unknown shaping.
    """
    if shaping not in SHAPINGS[1:]:
        raise ValueError(f"shaping={shaping!r} is unknown; use {' or '.join(SHAPINGS[1:])}")
    if correct:
        return 1.0
    if shaping == "signed":
        return -1.0
    messages = 2 * rollout.episode.get("turns", 1.0)
    return min(_HIGHEST_WRONG, -1.0 + _PER_ROUND * (messages - 2) / 2)
