"""Every estimator against its naive twin, by hand, at its limits, and in any order of responses."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config import UserError
from megatron_stare.numerics.advantages import ESTIMATORS, Outcomes, estimator, find_estimator
from tests.losses import reference_advantages

SETTINGS = {"qae": {"quantile": 0.4}}
TWINNED = sorted(ESTIMATORS.keys() - {"remax"})


def above_mean(outcomes, *, scale=1.0):
    """An estimator of a user's."""
    return scale * (outcomes.centred() > 0).double()


def wrong(outcomes):
    return outcomes.reward_B[:1]


def unsound(outcomes):
    return outcomes.reward_B * float("nan")


def outcomes(rewards, groups, lengths, baselines=None):
    reward_B = torch.tensor(rewards, dtype=torch.float64)
    return Outcomes(
        reward_B=reward_B,
        group_B=torch.tensor(groups, dtype=torch.int64),
        tokens_B=torch.tensor(lengths, dtype=torch.float64),
        correct_B=reward_B > 0,
        baseline_B=None if baselines is None else torch.tensor(baselines, dtype=torch.float64),
    )


def found(name, rewards, groups, lengths):
    return find_estimator(name)(outcomes(rewards, groups, lengths), **SETTINGS.get(name, {}))


BATCH = (
    [1.0, 0.0, 0.0, 1.0, 0.5, -1.0, 0.25, 0.25, 0.0, 0.0, 2.0] + [0.0] * 30 + [1.0],
    [0, 1, 0, 0, 1, 1, 2, 2, 1, 0, 3] + [4] * 31,
    [3, 2, 5, 1, 4, 4, 2, 9, 0, 7, 6] + [5] * 30 + [2],
)


@pytest.mark.parametrize("name", TWINNED)
def test_every_estimator_equals_its_twin(name):
    """Groups of 4, 4, 2 and 31 and one of one; a response without tokens; HAPO's fallback."""
    rewards, groups, lengths = BATCH
    if name == "grpo_passk":  # refuses a group of one
        keep = [place for place, group in enumerate(groups) if group != 3]
        rewards, groups, lengths = ([column[place] for place in keep] for column in BATCH)
        groups = [group - (group > 3) for group in groups]
    wanted = reference_advantages.advantages(name, rewards, groups, lengths)
    assert found(name, rewards, groups, lengths).tolist() == pytest.approx(wanted, abs=1e-12)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = [[column[place] for place in order] for column in (rewards, groups, lengths)]
    expected = [wanted[place] for place in order]
    assert found(name, *shuffled).tolist() == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 9)), min_size=2, max_size=9))
def test_one_group_equals_the_twin(pairs):
    rewards, lengths = ([pair[place] for pair in pairs] for place in (0, 1))
    for name in ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "grpo_passk"):
        groups = [0] * len(rewards)
        wanted = reference_advantages.advantages(name, rewards, groups, lengths)
        got = found(name, rewards, groups, lengths).tolist()
        assert got == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_by_hand():
    """One group, rewards 1 0 0 0, lengths 1 2 3 4: mean 1/4, std 1/2 (divisor 3).

    opo: baseline 1/10. hapo: m = 1/10, s = sqrt(1/10 9/10) = 0.3; 0.9/0.3 = 3. whitened: mean 1/10,
    var = 10/9 x 0.09 = 0.1. gpg: B / #{R != 0} = 4. passk: the lead is 1.
    """
    one = ([1.0, 0.0, 0.0, 0.0], [0] * 4, [1, 2, 3, 4])
    first_and_last = {
        "grpo": (0.75 / 0.500001, -0.25 / 0.500001),
        "dr_grpo": (0.75, -0.25),
        "rloo": (1.0, -1 / 3),
        "opo": (0.9, -0.1),
        "hapo": (0.9 / 0.300001, -0.1 / 0.300001),
        "dcpo": (1.5, -0.5),
        "reinforce_plus_plus": (0.9 / 0.10000001**0.5, -0.1 / 0.10000001**0.5),
        "reinforce_plus_plus_baseline": (0.9 / 0.10000001**0.5, -0.1 / 0.10000001**0.5),
        "gpg": (3.0, -1.0),
        "grpo_passk": (1 / 0.500001, 0.0),
        "w_reinf": (0.1, -1.0),
        "psr": (1.0, 0.0),
        "nsr": (0.0, -1.0),
        "qae": (1 / 0.500001, 0.0),
    }
    assert sorted(first_and_last) == TWINNED
    for name, (first, last) in first_and_last.items():
        got = found(name, *one).tolist()
        assert (got[0], got[-1]) == pytest.approx((first, last), rel=1e-12), name
    remax = outcomes([1.0, 0.5], [0, 1], [1, 1], baselines=[0.25, 1.0])
    assert find_estimator("remax")(remax).tolist() == [0.75, -0.5]


@pytest.mark.parametrize("value", [0.1, 0.7, -1 / 3])
def test_equal_rewards_are_exactly_zero(value):
    lengths = [301, 17, 4000, 1, 589, 92, 2600]
    for name in sorted(set(TWINNED) - {"w_reinf", "psr", "nsr"}):
        assert found(name, [value] * 7, [0] * 7, lengths).tolist() == [0.0] * 7, name


def test_groups_of_one_keep_their_reward():
    for name in ("dr_grpo", "rloo", "opo", "gpg"):
        assert found(name, [2.0], [0], [5]).tolist() == [2.0]
    for name in ("grpo", "qae"):
        assert found(name, [2.0], [0], [5]).tolist() == pytest.approx([2 / 1.000001])
    assert found("hapo", [2.0], [0], [5]).tolist() == [0.0]
    assert found("dcpo", [2.0], [0], [5]).tolist() == [0.0]
    with pytest.raises(UserError, match="two responses or more in every group; group 1 has one"):
        found("grpo_passk", [2.0, 1.0, 0.0], [0, 1, 0], [5, 5, 5])


def smooth(visits):
    """DCPO's advantages of the last of several visits to one prompt, in lists of numbers."""
    seen, mean, variance = 0, 0.0, 0.0
    for rewards in visits:
        mu, sd = sum(rewards) / len(rewards), statistics.stdev(rewards)
        between = seen / (seen + 1) * (mu - mean) ** 2
        variance = (seen * variance + sd**2 + between) / (seen + 1)
        mean, seen = (seen * mean + mu) / (seen + 1), seen + 1
    mixed = []
    for reward in rewards:
        now = (reward - mu) / sd if sd else 0.0
        ever = (reward - mean) / variance**0.5 if variance else 0.0
        pair = (((seen - 1) * now + ever) / seen, (now + (seen - 1) * ever) / seen)
        mixed.append(min(pair, key=abs))
    return mixed


@pytest.mark.parametrize(
    "visits",
    [
        [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]],
        [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]],
        [[0.0, 0.0], [0.0, 0.0], [0.5, -1.0, 0.25]],
        [[0.0, 0.0], [1.0, 1.0]],
        [[0.3, 0.3], [0.3, 0.3]],
    ],
)
def test_dcpo_remembers_earlier_visits(visits):
    """The same in a batch with a new prompt, and in one without any earlier visit."""
    earlier = torch.zeros(1, 3, dtype=torch.float64)
    for number, rewards in enumerate(visits):
        count = len(rewards)
        both = outcomes([*rewards, 1.0, 0.0], [0] * count + [1, 1], [1] * (count + 2))
        rows = torch.cat([earlier.expand(count, 3), torch.zeros(2, 3).double()])
        both = dataclasses.replace(both, earlier_B3=rows)
        got = find_estimator("dcpo")(both).tolist()
        assert got[:count] == pytest.approx(smooth(visits[: number + 1]), abs=1e-12)
        assert got[count:] == pytest.approx([0.5**0.5, -(0.5**0.5)])
        earlier = both.visits_B3[:1]
    assert earlier[0, 0] == len(visits)


def test_dcpo_is_exactly_zero_if_no_reward_ever_differed():
    earlier = None
    for _ in range(9):
        same = dataclasses.replace(outcomes([0.1] * 3, [0] * 3, [1] * 3), earlier_B3=earlier)
        assert find_estimator("dcpo")(same).tolist() == [0.0] * 3
        earlier = same.visits_B3


def test_hapo_counts_padding_on_request():
    """Rewards 1.0 and 0.9, one token each: s = 0.05, so a padded token has (0 - 0.95) / 0.05."""
    pair = outcomes([1.0, 0.9], [0, 0], [1, 1])
    plain, padded = (find_estimator("hapo")(pair, padding=on).tolist() for on in (False, True))
    assert plain == pytest.approx([0.05 / 0.050001, -0.05 / 0.050001])
    assert padded == pytest.approx(found("grpo", [1.0, 0.9], [0, 0], [1, 1]).tolist())
    mixed = outcomes([1.0, 0.0], [0, 0], [1, 1])
    kept = find_estimator("hapo")(mixed, padding=True).tolist()
    assert kept == pytest.approx([0.5 / 0.500001, -0.5 / 0.500001])
    raw = find_estimator("hapo")(pair, padding=True, normalize_by_std=False).tolist()
    assert raw == pytest.approx([0.05, -0.05]), "without the spread nothing is 5"


def test_two_equal_best_rewards_have_no_lead():
    assert found("grpo_passk", [1.0, 1.0, 0.0], [0, 0, 0], [1, 1, 1]).tolist() == [0.0, 0.0, 0.0]


def test_whitening_is_defined_for_few_tokens():
    assert found("reinforce_plus_plus", [3.0], [0], [1]).tolist() == [0.0], "one token"
    assert found("reinforce_plus_plus", [], [], []).tolist() == []
    spread = found("reinforce_plus_plus", [1.0, 0.0, 5.0], [0, 1, 2], [4, 4, 0]).tolist()
    assert spread[0] == pytest.approx(-spread[1]) and spread[2] > 8 * spread[0], "5 has no token"


def test_estimators_exclude_rollouts_from_the_loss():
    three = outcomes([1.0, 0.0, 1.0], [0, 0, 0], [1, 1, 1])
    assert find_estimator("psr").left_out(three).tolist() == [False, True, False]
    assert find_estimator("nsr").left_out(three).tolist() == [True, False, True]
    assert find_estimator("grpo").left_out(three).tolist() == [False] * 3


def test_refused():
    two = outcomes([1.0, 0.0], [0, 0], [1, 1])
    with pytest.raises(UserError, match=r"advantage 'rlo' is unknown; did you mean 'rloo'\?"):
        find_estimator("rlo")
    with pytest.raises(UserError, match="fnorm: advantage 'gpg' has no such setting; did you mean"):
        find_estimator("gpg")(two, fnorm=2.0)
    with pytest.raises(UserError, match="'qae' needs quantile, for which no value is published"):
        find_estimator("qae")(two)
    with pytest.raises(UserError, match=r"quantile=1.0 of advantage 'qae' must lie inside"):
        find_estimator("qae")(two, quantile=1.0)
    with pytest.raises(UserError, match="needs the reward of a greedy response"):
        find_estimator("remax")(two)


def test_settings():
    assert found("gpg", [1.0, 0.0], [0, 0], [1, 1]).tolist() == [1.0, -1.0]
    two = outcomes([1.0, 0.0], [0, 0], [1, 1])
    assert find_estimator("gpg")(two, f_norm=4.0).tolist() == [0.25, -0.25]
    assert find_estimator("w_reinf")(two, positive=0.5).tolist() == [0.5, -1.0]
    plain = find_estimator("grpo")(two, normalize_by_std=False)
    assert torch.equal(plain, find_estimator("dr_grpo")(two))


def test_a_users_function_is_an_estimator():
    one = find_estimator(f"{__name__}.above_mean")
    batch = outcomes([1.0, 0.0, 3.0, 3.0], [0, 0, 1, 1], [1, 1, 1, 1])
    assert one(batch).tolist() == [1, 0, 0, 0] and one(batch, scale=2.0).tolist() == [2, 0, 0, 0]
    assert one.relative and not one.greedy
    with pytest.raises(UserError, match=r"above_mean' has no such setting; did you mean 'scale'"):
        one(batch, scales=2.0)
    for name in ("wrong", "unsound"):
        with pytest.raises(UserError, match=rf"{name}' must return a tensor of 4 finite numbers"):
            find_estimator(f"{__name__}.{name}")(batch)
    with pytest.raises(UserError, match="has no 'above_men'; did you mean"):
        find_estimator(f"{__name__}.above_men")


def test_an_estimator_under_the_decorator_keeps_its_traits_and_takes_no_name_twice():
    taken = {"rloo": ESTIMATORS["rloo"]}
    with pytest.raises(UserError, match="advantage 'rloo' exists already"):

        @estimator()
        def rloo(outcomes): ...

    assert ESTIMATORS["rloo"] is taken["rloo"]
    try:
        estimator(relative=False, leaves_out="wrong")(above_mean)
        found = find_estimator(f"{__name__}.above_mean")
        assert (found.relative, found.leaves_out) == (False, "wrong")
    finally:
        del ESTIMATORS["above_mean"]
