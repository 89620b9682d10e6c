"""Rewards of +1 and -1, with ReTool's credit for rounds with a tool."""

from __future__ import annotations

import pytest

from megatron_stare.records import Rollout
from megatron_stare.scoring.judge import shaped_reward


def episode(turns: float | None) -> Rollout:
    counts = {} if turns is None else {"turns": turns}
    return Rollout((1,), (0.0,), (1,), status="completed", weight_version=0, episode=counts)


@pytest.mark.parametrize(
    ("turns", "reward"),
    [(None, -1.0), (1, -1.0), (2, -0.9), (4, -0.7), (5, -0.6), (8, -0.6)],
)
def test_retool(turns: float | None, reward: float) -> None:
    """verl counts 2 n messages of n turns: n = 4 gives min(-0.6, -1 + 0.1 (8 - 2) / 2) = -0.7."""
    assert shaped_reward("retool", False, episode(turns)) == pytest.approx(reward)
    assert shaped_reward("retool", True, episode(turns)) == 1.0


def test_signed() -> None:
    assert [shaped_reward("signed", right, episode(3)) for right in (True, False)] == [1.0, -1.0]
    with pytest.raises(ValueError, match="shaping='none' is unknown; use signed or retool"):
        shaped_reward("none", True, episode(3))
