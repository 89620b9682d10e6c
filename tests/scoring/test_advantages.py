"""Advantages against naive ones; which groups carry signal."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.scoring.advantages import has_signal, is_kept, with_advantages
from tests.losses import reference_losses


def group(rewards):
    rollouts = tuple(
        Rollout((1,), (0.0,), (1,), "completed", 0, reward=reward) for reward in rewards
    )
    return Group(Prompt(5, (1,), ""), rollouts)


def advantages(rewards, normalize_by_std=True):
    return [
        rollout.advantage for rollout in with_advantages(group(rewards), normalize_by_std).rollouts
    ]


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.booleans())
def test_advantages_equal_the_naive_ones(rewards, normalize_by_std):
    expected = reference_losses.advantages_of(rewards, normalize_by_std)
    assert advantages(rewards, normalize_by_std) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_known_advantages():
    assert advantages([1, 0, 0, 0]) == pytest.approx(
        [0.75 / 0.500001, *[-0.25 / 0.500001] * 3], rel=1e-12
    )
    assert advantages([1, 0, 0, 0], False) == [0.75, -0.25, -0.25, -0.25]
    assert advantages([1]) == [1 / 1.000001]
    assert advantages([1], False) == [1.0]
    assert advantages([1, 1, 1]) == [0, 0, 0]


def test_a_missing_reward_is_an_error_that_names_the_prompt():
    with pytest.raises(ValueError, match="prompt 5"):
        with_advantages(group([1, None]))


def test_signal():
    assert has_signal(group([0, 1]))
    assert not has_signal(group([1, 1, 1]))
    assert not has_signal(group([1]))


def verdicts(*pairs):
    rollouts = [
        Rollout((1,), (-1.0,), (1,), "completed", 0, reward=reward, verdict=verdict)
        for reward, verdict in pairs
    ]
    return Group(Prompt(0, (1,), ""), tuple(rollouts))


def test_dynamic_sampling_filters_on_the_verdict():
    """All right, one penalised for its length: an advantage of -2.47, and nothing to learn."""
    penalised = verdicts(*[(1.0, "correct")] * 7, (0.5, "correct"))
    last = with_advantages(penalised).rollouts[-1]
    assert last.advantage == pytest.approx(-0.4375 / (0.5 / 8**0.5), rel=1e-4)
    assert has_signal(penalised) and not is_kept(penalised, "accuracy")
    assert is_kept(penalised, "reward")
    mixed = verdicts((1.0, "correct"), (0.0, "wrong"), (None, "unverifiable"))
    assert is_kept(mixed, "accuracy") and is_kept(mixed, "reward")
    alike = verdicts((0.0, "correct"), (0.0, "wrong"))
    assert not is_kept(alike, "accuracy"), "without a difference in reward nothing is learnt"
    unread = verdicts((1.0, "correct"), (None, "unverifiable"))
    assert not is_kept(unread, "accuracy")
    with pytest.raises(ValueError, match="metric='luck' is unknown"):
        is_kept(mixed, "luck")
