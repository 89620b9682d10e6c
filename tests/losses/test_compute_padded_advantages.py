"""Advantages of padded batches: those of the estimators, on every token under the mask."""

from __future__ import annotations

import numpy
import pytest
import torch

from megatron_stare.config import UserError
from megatron_stare.losses import advantages
from megatron_stare.numerics.advantages import ESTIMATORS
from tests.losses import reference_advantages

MASK = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 0]])
REWARDS = [1.0, 0.0, 0.5, 0.0]
NAMES = ["a", "b", "a", "b"]


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"remax"}))
def test_each_token_has_its_responses_advantage(name):
    settings = {"quantile": 0.4} if name == "qae" else {}
    wanted = reference_advantages.advantages(name, REWARDS, [0, 1, 0, 1], MASK.sum(1).tolist())
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        rewards = torch.tensor(REWARDS, dtype=dtype)
        for ids in (NAMES, numpy.array(NAMES, dtype=object), torch.tensor([7, -2, 7, -2])):
            found = advantages(name, rewards, ids, MASK, **settings)
            assert found.dtype == dtype and found.shape == MASK.shape
            expected = torch.tensor(wanted)[:, None] * MASK
            torch.testing.assert_close(
                found.double(), expected.double(), rtol=tolerance, atol=max(1e-7, tolerance)
            )


def test_rewards_of_tokens_are_added_up():
    per_token = torch.zeros(4, 5, dtype=torch.float64)
    per_token[torch.arange(4), torch.tensor([3, 0, 4, 3])] = torch.tensor(REWARDS).double()
    whole = torch.tensor(REWARDS, dtype=torch.float64)
    for name in ("grpo", "opo", "gpg", "reinforce_plus_plus"):
        torch.testing.assert_close(
            advantages(name, per_token, NAMES, MASK), advantages(name, whole, NAMES, MASK)
        )


def test_a_return_is_carried_over_a_masked_span():
    """gamma 1/2, mask 1 0 1, reward 1 at the end: returns 1/2 and 1; mean 3/4, var 1/8."""
    found = advantages(
        "reinforce_plus_plus", torch.tensor([1.0]), ["x"], torch.tensor([[1, 0, 1]]), gamma=0.5
    )
    scale = (1 / 8 + 1e-8) ** -0.5
    assert found.tolist() == [[pytest.approx(-0.25 * scale), 0.0, pytest.approx(0.25 * scale)]]


def test_remax_sums_later_rewards():
    """Rewards 1 and 2 at the tokens, baseline 1: 3 - 1, then 2 - 1."""
    one, mask = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1, 1, 1]])
    baselines = torch.tensor([1.0])
    assert advantages("remax", one, [0], mask, baselines=baselines).tolist() == [[2.0, 1.0, 1.0]]
    whole = advantages("remax", torch.tensor([3.0]), [0], mask, baselines=baselines)
    assert whole.tolist() == [[2.0, 2.0, 2.0]]


def test_correctness_may_be_given():
    rewards, right = torch.tensor([0.1, 0.9]), torch.tensor([False, True])
    mask = torch.ones(2, 1)
    assert advantages("w_reinf", rewards, [0, 0], mask).flatten().tolist() == pytest.approx(
        [0.1] * 2
    )
    found = advantages("w_reinf", rewards, [0, 0], mask, correct=right).flatten().tolist()
    assert found == pytest.approx([-1.0, 0.1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "gropo"}, "advantage 'gropo' is unknown; did you mean 'grpo'"),
        ({"rewards": torch.ones(3)}, r"rewards \(3,\) and response_mask \(2, 4\) must be"),
        ({"group_ids": [0]}, "group_ids has 1 entries for 2 responses"),
        ({"name": "remax", "baselines": torch.ones(1)}, "baselines has 1 entries for 2"),
        ({"gamma": 0.9}, "gamma=0.9 is for reinforce_plus_plus"),
        ({"alpha": 2}, "alpha: advantage 'grpo' has no such setting"),
    ],
)
def test_refused(call, message):
    given = {"name": "grpo", "rewards": torch.ones(2), "group_ids": [0, 0]}
    with pytest.raises(UserError, match=message):
        advantages(**(given | {"response_mask": torch.ones(2, 4)} | call))
