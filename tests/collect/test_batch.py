"""Why a batch could not be filled: the message names what was sampled and what is left out."""

from __future__ import annotations

import pytest

from megatron_stare.collect.batch import too_few
from megatron_stare.config import Config, override
from megatron_stare.records import Group, Prompt, Rollout

FILTER = "scoring.overlong_filter=true"
REWARD = "rollout.dynamic_sampling_metric=reward"


def group(*rewards: float | None, tokens: bool = True) -> Group:
    """Rollouts of these rewards: from 1 on they are right, None could not be verified."""
    return Group(
        Prompt(0, (1,), ""),
        tuple(
            Rollout(
                (5,),
                (-0.1,),
                (tokens,),
                status="truncated",
                weight_version=0,
                reward=reward,
                verdict="unverifiable" if reward is None else "correct" if reward >= 1 else "wrong",
            )
            for reward in rewards
        ),
    )


@pytest.mark.parametrize(
    ("sampled", "options", "seen"),
    [
        (
            [group(0, 0), group(1, 0)],
            (),
            "had differing verdicts after 1 generation rounds (rewards seen: 0 x 3, 1 x 1); choose",
        ),
        ([group(0, None), group(None, None)], (), "(rewards seen: 0 x 1, unverifiable x 3);"),
        (
            [group(1, 1.5), group(0, 0)],
            (),
            f"1.5 x 1; 1 groups differ in their rewards alone, which {REWARD} would keep); choose",
        ),
        ([group(0, 0)], (REWARD,), "had differing rewards after"),
        (
            [group(0, 1, tokens=False), group(0, 0, tokens=False), group(1, 0)],
            (),
            "1 x 2; 1 groups differ and have no token in the loss); choose",
        ),
        (
            [group(0, 1, tokens=False), group(1, 0, tokens=False), group(0, 0)],
            (FILTER, "rollout.rollout_max_response_len=9"),
            f"; 2 groups differ and have no token in the loss: {FILTER} leaves truncated "
            "responses out, raise rollout.rollout_max_response_len=9); choose",
        ),
    ],
)
def test_the_message_says_why_groups_were_dropped(
    sampled: list[Group], options: tuple[str, ...], seen: str
) -> None:
    config = override(Config(), ["rollout.rollout_batch_size=4", *options])
    message = str(too_few(config, 1, sampled, "1 generation rounds", by_rollout=False))
    assert message.startswith("only 1 of rollout.rollout_batch_size=4 groups had differing ")
    assert seen in message


def test_the_message_stays_short_where_every_reward_is_another() -> None:
    """As of a reward model, whose scores are all positive."""
    sampled = [group(*(1 + (8 * place + n) / 1e4 for n in range(8))) for place in range(512)]
    sampled.append(group(0.5, 0.5, None))
    message = str(too_few(Config(), 1, sampled, "1 generation rounds", by_rollout=False))
    assert "(rewards seen: 0.5 x 2, 1 x 1, " in message and len(message) < 800
    assert ", 4085 other values from 1.0011 to 1.4095, unverifiable x 1;" in message
