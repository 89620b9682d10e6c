"""EPO: values worked by hand, the history of every turn, its schedule and its parent."""

import math

import pytest
import torch

from megatron_stare import losses
from megatron_stare.config import LossConfig, UserError
from megatron_stare.losses import find_objective
from megatron_stare.losses.families.control import weight_at
from megatron_stare.numerics.selection import Across
from tests.losses.batches import batch_of


def batch_with(entropies, turns=None, mask=None):
    """No advantage: the loss is -1e-3 (mean H - mean P)."""
    entropy = torch.tensor(entropies, dtype=torch.float64).requires_grad_()
    zero = torch.zeros_like(entropy)
    found = {"log_prob": (zero - 1).detach().requires_grad_(), "advantages": zero.detach()}
    found |= {"entropy": entropy, "response_mask": torch.ones_like(zero) if mask is None else mask}
    return found | ({} if turns is None else {"turns": torch.tensor(turns)})


def outside(loss, entropies):
    """The number of entropies out of their band, from the loss."""
    return (float(loss.detach()) / 1e-3 * len(entropies) + sum(entropies)) / 0.1


def test_by_hand():
    """Step 1: h of turn 0 is 1, and all its tokens are inside 0.8 .. 1.2; of turn 1 it is 2, and 3
    and 1 are outside 1.6 .. 2.4: mean H = 8/6, mean P = 0.2/6. Step 2 has turn 0 alone, of entropy
    2: h = (1 + 2) / 2, all outside 1.2 .. 1.8, and without turn 1 P counts for nothing.
    """
    state: dict[str, float] = {}
    first = batch_with([[1.0, 1.0, 3.0], [1.0, 1.0, 1.0]], [[0, 0, 1], [0, 0, 1]])
    loss = losses.compute("epo", first, state=state, first_turn=1)
    assert float(loss.detach()) == pytest.approx(-1e-3 * (8 - 0.2) / 6)
    slope = torch.autograd.grad(loss, first["entropy"])[0]
    torch.testing.assert_close(slope, torch.full_like(slope, -1e-3 / 6))
    remembered = {"entropy/0": 1.0, "steps/0": 1.0, "entropy/1": 2.0, "steps/1": 1.0}
    assert state == remembered | {"step": 1.0}
    second = batch_with([[2.0, 2.0]], [[0, 0]])
    for first_turn, expected in ((1, -2e-3), (0, -1.9e-3)):
        after = dict(state)
        loss = losses.compute("epo", second, state=after, first_turn=first_turn)
        assert float(loss.detach()) == pytest.approx(expected)
        assert after == remembered | {"entropy/0": 3.0, "steps/0": 2.0, "step": 2.0}


def test_a_turn_that_comes_back_is_compared_with_the_steps_that_had_it():
    """Turn 2, which one of five steps had, with 2.6: h = (2.6 + 3) / 2, and 3 is inside."""
    state = {"entropy/0": 5.0, "steps/0": 5.0, "entropy/2": 2.6, "steps/2": 1.0, "step": 5.0}
    loss = losses.compute("epo", batch_with([[1.0, 3.0]], [[0, 2]]), state=state, first_turn=2)
    assert outside(loss, [1.0, 3.0]) == pytest.approx(0.0, abs=1e-9)
    turns = {"entropy/0": 6.0, "steps/0": 6.0, "entropy/2": 5.6, "steps/2": 2.0}
    assert state == turns | {"step": 6.0}


def test_history_is_of_the_old_policy_and_the_band_of_the_current_one():
    batch = batch_with([[1.0, 1.0]], [[0, 0]])
    batch["old_entropy"] = torch.tensor([[2.0, 2.0]], dtype=torch.float64)
    state: dict[str, float] = {}
    loss = losses.compute("epo", batch, state=state, first_turn=0)
    assert state["entropy/0"] == 2.0
    assert outside(loss, [1.0, 1.0]) == pytest.approx(2.0)


@pytest.mark.parametrize(("mean", "expected"), [("tokens", 0.0), ("padded", 2.0)])
def test_means_of_turns_by_hand(mean, expected):
    """h = 1. The row of two tokens has the mean 1, inside, or 2/3 of the padded three, outside; the
    full row, one half and three halves within, is inside either way.
    """
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    batch = batch_with([[0.5, 1.0, 1.5], [1.0, 1.0, 9.0]], [[0, 0, 0]] * 2, mask)
    settings = {"mode": "seq", "seq_mean": mean, "first_turn": 0}
    loss = losses.compute("epo", batch, **settings)
    assert outside(loss, [0.5, 1.0, 1.5, 1.0, 1.0]) == pytest.approx(expected, abs=1e-9)


def test_turns_of_a_row_have_means_of_their_own():
    """h is 1 and 3; by their row's mean, 2, both would be outside."""
    batch = batch_with([[0.5, 1.5, 2.0, 4.0]], [[0, 0, 1, 1]])
    settings = {"mode": "seq", "seq_mean": "tokens", "first_turn": 0}
    loss = losses.compute("epo", batch, **settings)
    assert outside(loss, [0.5, 1.5, 2.0, 4.0]) == pytest.approx(0.0, abs=1e-9)


def test_turns_that_are_not_given_are_the_stretches_of_the_mask():
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0, 1.0]])
    state: dict[str, float] = {}
    entropies = [[9.0, 1.0, 2.0, 9.0, 4.0], [3.0, 9.0, 6.0, 9.0, 8.0]]
    losses.compute("epo", batch_with(entropies, mask=mask), state=state)
    found = {turn: state[f"entropy/{turn}"] for turn in range(3)}
    assert found == {0: 2.0, 1: 5.0, 2: 8.0}


def test_the_schedule_follows_its_formula():
    """The first half ends at 1 - 0.2 (1 - e^-2), the second at 0.8 e^-3, and there it stays."""
    middle, end = 1 - 0.2 * (1 - math.exp(-2)), 0.8 * math.exp(-3)
    found = [weight_at(number, 150) for number in (0, 75, 76, 150, 999)]
    assert found == pytest.approx([1.0, middle, 0.8 * math.exp(-3 / 75), end, end])
    assert [weight_at(number, 3) for number in (1, 2)] == pytest.approx(
        [middle, 0.8 * math.exp(-1.5)]
    )
    assert weight_at(0, 1) == 1.0 and weight_at(1, 1) == pytest.approx(end)
    batch = batch_with([[1.0, 3.0]], [[0, 0]])
    settings = {"first_turn": 0, "schedule": "exponential", "total_steps": 4}
    loss = losses.compute("epo", batch, state={"step": 2.0}, **settings)
    assert outside(loss, [1.0, 3.0]) == pytest.approx(2 * middle)


def test_without_its_penalty_it_is_an_entropy_bonus():
    batch = batch_with([[1.0, 1.0, 3.0], [1.0, 0.1, 1.0]], [[0, 0, 1]] * 2)
    batch["advantages"] = torch.tensor([[1.0] * 3, [-1.0] * 3], dtype=torch.float64)
    shift = torch.tensor([[0.1, 0.3, -0.4], [-0.1, -0.3, 1.4]], dtype=torch.float64)
    batch["old_log_prob"] = batch["log_prob"].detach() - shift
    parent = {"eps_clip_high": 0.2, "eps_clip_c": 3.0}
    expected = losses.compute("entro_reg", batch, **parent)
    for settings in ({"penalty": 0.0, "first_turn": 0}, {"first_turn": 2}):
        found = losses.compute("epo", batch, **settings)
        assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for key in ("log_prob", "entropy"):
        slopes = [
            torch.autograd.grad(loss, batch[key], retain_graph=True)[0]
            for loss in (found, expected)
        ]
        torch.testing.assert_close(*slopes)


def test_a_mean_over_padding_needs_its_length():
    config = LossConfig(name="epo", settings={"mode": "seq"})
    batch = batch_of([1.0], [1.0], turn=[0])
    with pytest.raises(UserError, match="padded_length"):
        find_objective("epo").plan(batch, config, Across(), {})
