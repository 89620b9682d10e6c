"""Rewards shaped after judging: +1 and -1, ReTool's credit for tool calls, DAPO's length penalty.

    signed    1 if the verdict is correct, else -1
    retool    1 if it is correct, else min(-0.6, -1 + 0.1 (m - 2) / 2)              arXiv 2504.11536

m counts the messages of an episode as verl does: the prompt, the model's turns, and the tool's
answers between them. With n turns of the model, m = 2 n. Each tool call adds 0.1 to a wrong
answer's reward, up to -0.6.
"""

from __future__ import annotations

from megatron_stare.records import Rollout

SHAPINGS = ("none", "signed", "retool")
_HIGHEST_WRONG = -0.6
_PER_ROUND = 0.1


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


def soft_overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong penalty (arXiv 2503.14476, section 3.4), lengths in tokens:
    min(0, -(length - (max_length - buffer)) / buffer * factor), in [-factor, 0].

    max_length 20480, buffer 4096, factor 1: 16384 -> 0, 18432 -> -0.5, 20480 -> -1.
    ValueError: buffer < 1.
    """
    if buffer < 1:
        raise ValueError(f"buffer={buffer}: the penalty needs at least one token to rise over")
    over = min(length, max_length) - (max_length - buffer)
    return min(0.0, -over / buffer * factor)
