"""From groups to the estimators and back; which groups carry signal."""

import dataclasses

import pytest

from megatron_stare.config import ScoringConfig, UserError
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.scoring.advantages import (
    checked_estimator,
    has_gradient,
    has_signal,
    is_kept,
    with_advantages,
)


def group(rewards, tokens=1, index=5, verdicts=()):
    judged = zip(rewards, verdicts or [""] * len(rewards), strict=True)
    rollouts = tuple(
        Rollout(
            *((1,) * tokens, (0.0,) * tokens, (1,) * tokens),
            status="completed",
            weight_version=0,
            reward=reward,
            verdict=verdict,
        )
        for reward, verdict in judged
    )
    return Group(Prompt(index, (1,), ""), rollouts)


def advantages(*groups, **scoring):
    """The advantage of every rollout of every group."""
    judged = with_advantages(groups, ScoringConfig(**scoring))
    return [[rollout.advantage for rollout in one.rollouts] for one in judged]


def test_known_advantages():
    first, *others = [0.75 / 0.500001, *[-0.25 / 0.500001] * 3]
    assert advantages(group([1, 0, 0, 0]))[0] == pytest.approx([first, *others], rel=1e-12)
    for setting in ({"normalize_by_std": False}, {"advantage": "dr_grpo"}):
        assert advantages(group([1, 0, 0, 0]), **setting) == [[0.75, -0.25, -0.25, -0.25]]
        assert advantages(group([1]), **setting) == [[1.0]]
    assert advantages(group([1])) == [[pytest.approx(1 / 1.000001)]]
    assert advantages(group([1, 1, 1])) == [[0, 0, 0]]


def test_a_users_estimator_sees_the_verified_rollouts_of_the_batch():
    path = "tests.numerics.test_advantages.above_mean"
    mixed = group([1, None, 0], verdicts=("correct", "unverifiable", "wrong"))
    found = advantages(mixed, group([0, 0.5]), advantage=path, advantage_settings={"scale": 2.0})
    assert found == [[2.0, 0.0, 0.0], [0.0, 2.0]]
    with pytest.raises(UserError, match=r"scoring.advantage=.*above_mean: .*no such setting"):
        advantages(mixed, advantage=path, advantage_settings={"scales": 2.0})


def test_the_whole_batch_is_whitened_together():
    """1 over 3 tokens and 0 over 1: mean 3/4, var (3 x 1/16 + 9/16) / 3 = 1/4."""
    found = advantages(group([1], 3), group([0], 1), advantage="reinforce_plus_plus")
    scale = (0.25 + 1e-8) ** -0.5
    assert found == [[pytest.approx(0.25 * scale)], [pytest.approx(-0.75 * scale)]]


def test_unverifiable_rollouts_are_in_no_statistic():
    """A single verified rollout has no other to compare with; without a comparison it counts."""
    mixed = group([1, None, 0], verdicts=("correct", "unverifiable", "wrong"))
    lonely = group([1, None], verdicts=("correct", "unverifiable"))
    unjudged = group([None, None], verdicts=("unverifiable",) * 2)
    found = advantages(mixed, lonely, unjudged, advantage="rloo")
    assert found == [[1.0, 0.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    found = advantages(mixed, lonely, unjudged, advantage="w_reinf")
    assert found == [[0.1, 0.0, -1.0], [0.1, 0.0], [0.0, 0.0]]


def with_baseline(judged, baseline):
    rollouts = tuple(dataclasses.replace(each, baseline=baseline) for each in judged.rollouts)
    return dataclasses.replace(judged, rollouts=rollouts)


def test_a_greedy_baseline_is_taken_from_its_groups_rewards():
    """A group with an unverifiable baseline learns nothing."""
    easy, hard = with_baseline(group([1, 0]), 1.0), with_baseline(group([1]), 0.0)
    unread = with_baseline(group([1, 0]), None)
    found = advantages(easy, hard, unread, advantage="remax")
    assert found == [[0.0, -1.0], [1.0], [0.0, 0.0]]


def test_correctness_comes_from_the_verdict():
    """A format bonus makes no wrong answer right; without a verdict the reward's sign decides."""
    bonus = group([0.1, 0.9], verdicts=("wrong", "correct"))
    assert advantages(bonus, advantage="w_reinf") == [[-1.0, 0.1]]
    assert advantages(group([0.1, 0.0]), advantage="w_reinf") == [[0.1, -1.0]]


def test_rollouts_excluded_by_the_estimator_have_no_loss_token():
    (judged,) = with_advantages([group([1, 0, 1], 2)], ScoringConfig(advantage="nsr"))
    assert [rollout.loss_tokens for rollout in judged.rollouts] == [0, 2, 0]
    assert [rollout.advantage for rollout in judged.rollouts] == [0.0, -1.0, 0.0]
    assert has_gradient(judged)
    (judged,) = with_advantages([group([1, 1], 2)], ScoringConfig(advantage="nsr"))
    assert not has_gradient(judged)


def test_settings_reach_the_estimator():
    settings = {"advantage": "w_reinf", "advantage_settings": {"positive": 0.5}}
    assert advantages(group([1, 0]), **settings) == [[0.5, -1.0]]


@pytest.mark.parametrize(
    ("scoring", "message"),
    [
        ({"advantage": "grop"}, "scoring.advantage=grop: .* is unknown; did you mean 'grpo'"),
        ({"advantage": "qae"}, "needs scoring.advantage_settings.quantile"),
        (
            {"advantage": "gpg", "advantage_settings": {"norm": 2.0}},
            "scoring.advantage_settings.norm: advantage 'gpg' has no such setting; did you mean",
        ),
        (
            {"advantage_settings": {"normalize_by_std": 0.0}},
            "advantage_settings.normalize_by_std is scoring.normalize_by_std",
        ),
    ],
)
def test_refused(scoring, message):
    with pytest.raises(UserError, match=message):
        checked_estimator(ScoringConfig(**scoring))


def test_a_missing_reward_is_an_error_that_names_the_prompt():
    with pytest.raises(ValueError, match="prompt 5"):
        advantages(group([1, None]))


def test_signal():
    assert has_signal(group([0, 1]))
    assert not has_signal(group([1, 1, 1]))
    assert not has_signal(group([1]))
    assert has_signal(with_baseline(group([1, 1]), 0.0))
    assert not has_signal(with_baseline(group([1, 1]), 1.0))


def verdicts(*pairs):
    rollouts = [
        Rollout(
            (1,),
            (-1.0,),
            (1,),
            status="completed",
            weight_version=0,
            reward=reward,
            verdict=verdict,
        )
        for reward, verdict in pairs
    ]
    return Group(Prompt(0, (1,), ""), tuple(rollouts))


def test_dynamic_sampling_filters_on_the_verdict():
    """All right, one penalised for its length: an advantage of -2.47, and nothing to learn."""
    penalised = verdicts(*[(1.0, "correct")] * 7, (0.5, "correct"))
    assert advantages(penalised)[0][-1] == pytest.approx(-0.4375 / (0.5 / 8**0.5), rel=1e-4)
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
