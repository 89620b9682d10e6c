"""GSPO against two float64 twins, values derived by hand, and its limits."""

import dataclasses
import math

import pytest
import torch

from megatron_stare.config import Config, LossConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.losses.planning import coefficients
from megatron_stare.records import LossTokens
from tests.losses import reference_losses
from tests.losses.batches import ALONE, batch_of, in_sequences, random_tokens, run

PUBLISHED = LossConfig(name="gspo", eps_clip=3e-4, eps_clip_high=4e-4)
WIDE = LossConfig(name="gspo", eps_clip=0.5, eps_clip_high=2.0)


def tokens_of(gaps, advantages, sequence, old=1.0):
    """`gaps` are ln(pi / pi_old) of each token."""
    gap = torch.tensor(gaps, dtype=torch.float64)
    one = torch.ones_like(gap)
    advantage = torch.tensor(advantages, dtype=torch.float64)
    surprisal = (old - gap).requires_grad_()
    return in_sequences(LossTokens(surprisal, one, old * one, advantage, one), sequence)


def random_sequences(scale, seed=0, count=600, dtype=torch.float64):
    """Tokens of 60 sequences of all lengths in mixed order, one advantage to a sequence."""
    dice = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, 61, dtype=torch.float64)
    drawn = torch.multinomial(weights, count - 60, replacement=True, generator=dice)
    order = torch.randperm(count, generator=dice)
    sequence = torch.cat([torch.arange(60), drawn])[order]
    shift = scale * torch.randn(60, generator=dice, dtype=torch.float64)
    noise = 0.1 * scale * torch.randn(count, generator=dice, dtype=torch.float64)
    advantage = torch.randn(60, generator=dice, dtype=torch.float64)
    advantage[::7] = 0.0
    tokens = random_tokens(count, seed)
    surprisal = tokens.old_surprisal - shift[sequence] - noise
    tokens = dataclasses.replace(
        tokens,
        surprisal=surprisal.detach().to(dtype).requires_grad_(),
        old_surprisal=tokens.old_surprisal.to(dtype),
        advantage=advantage[sequence].to(dtype),
    )
    return in_sequences(tokens, sequence)


def columns(tokens):
    found = (tokens.surprisal, tokens.old_surprisal, tokens.advantage, tokens.sequence)
    return [column.detach().tolist() for column in found]


@pytest.mark.parametrize(("config", "scale"), [(PUBLISHED, 1e-3), (WIDE, 1.0), (WIDE, 8.0)])
def test_values_and_gradients_equal_the_twin(config, scale):
    tokens = random_sequences(scale)
    values, gradients = reference_losses.gspo(*columns(tokens), config)
    assert any(gradients) and gradients.count(0.0) > 60 + 600 // 20, "some are clipped, some not"
    for found, expected in zip(run("gspo", tokens, config), (values, gradients), strict=True):
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12
        )


def test_the_published_sum_is_the_sequence_form():
    tokens = random_sequences(1e-3)
    batch = batch_of(tokens.surprisal.detach(), tokens.advantage, sequence=tokens.sequence)
    coefficient = coefficients(batch, "seq-mean-token-mean", ALONE).double()
    loss = (coefficient * find_objective("gspo").loss(tokens, PUBLISHED)).sum()
    (gradient,) = torch.autograd.grad(loss, tokens.surprisal)
    value, gradients = reference_losses.gspo_of_sequences(*columns(tokens), PUBLISHED)
    # the coefficients are fp32
    assert float(loss.detach()) == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(
        gradient, torch.tensor(gradients, dtype=torch.float64), rtol=1e-6, atol=1e-12
    )


def test_fp32_stays_within_a_thousandth_of_the_published_clip():
    tokens = random_sequences(1e-3, dtype=torch.float32)
    values, gradients = reference_losses.gspo(*columns(tokens), PUBLISHED)
    found = run("gspo", tokens, PUBLISHED)
    torch.testing.assert_close(found[0].double(), torch.tensor(values).double(), rtol=0, atol=1e-6)
    assert (found[1] == 0).tolist() == [gradient == 0 for gradient in gradients]


def test_by_hand():
    """Gaps ln 2 and ln 8 make s = 4; -ln 4 and 0 make s = 1/2; both outlive the same clip at
    (0.5, 3) or not by their advantage's sign.
    """
    gaps = [math.log(2), math.log(8), -math.log(4), 0.0]
    config = LossConfig(eps_clip=0.25, eps_clip_high=2.0)
    for advantages, losses, slopes in (
        ([2.0, 2.0, 2.0, 2.0], [-6.0, -6.0, -1.0, -1.0], [0.0, 0.0, 1.0, 1.0]),
        ([-2.0, -2.0, -2.0, -2.0], [8.0, 8.0, 1.5, 1.5], [-8.0, -8.0, 0.0, 0.0]),
    ):
        loss, slope = run("gspo", tokens_of(gaps, advantages, [0, 0, 1, 1]), config)
        torch.testing.assert_close(loss, torch.tensor(losses, dtype=torch.float64))
        torch.testing.assert_close(slope, torch.tensor(slopes, dtype=torch.float64))


def test_a_sequence_of_one_token_is_grpo():
    gaps = [-0.4, -0.1, 0.0, 0.1, 0.4] * 2
    tokens = tokens_of(gaps, [1.5] * 5 + [-1.5] * 5, range(10))
    config = LossConfig(eps_clip=0.2, eps_clip_high=0.2)
    for ours, theirs in zip(run("gspo", tokens, config), run("grpo", tokens, config), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=0)


def test_a_batch_with_every_ratio_clipped_has_no_gradient():
    tokens = tokens_of([0.5, 0.7, -0.5, -0.7], [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1])
    loss, gradient = run("gspo", tokens, PUBLISHED)
    expected = torch.tensor([-1.0004, -1.0004, 0.9997, 0.9997], dtype=torch.float64)
    torch.testing.assert_close(loss, expected)
    assert not gradient.any()


def test_zero_advantages_give_zero_loss():
    loss, gradient = run("gspo", tokens_of([3.0, -2.0, 40.0], [0.0] * 3, [0, 0, 1]), PUBLISHED)
    assert not loss.any() and not gradient.any()


def test_on_policy_the_gradient_is_minus_the_advantage():
    tokens = random_sequences(1.0)
    tokens = dataclasses.replace(tokens, old_surprisal=tokens.surprisal.detach())
    loss, gradient = run("gspo", tokens, PUBLISHED)
    assert torch.equal(loss, -tokens.advantage)
    torch.testing.assert_close(gradient, tokens.advantage)


def test_a_far_ratio_stays_finite():
    loss, gradient = run(
        "gspo", tokens_of([500.0, 500.0, -500.0], [-1.0, -1.0, -1.0], [0, 0, 1]), WIDE
    )
    torch.testing.assert_close(
        loss, torch.tensor([math.exp(10), math.exp(10), 0.5], dtype=torch.float64)
    )
    assert not gradient.any()


def test_an_empty_batch_has_no_losses():
    loss, gradient = run("gspo", tokens_of([], [], torch.zeros(0, dtype=torch.long)), PUBLISHED)
    assert loss.shape == gradient.shape == (0,)


def test_the_published_settings_are_accepted():
    config = override(
        Config(),
        [
            "loss.name=gspo",
            "loss.eps_clip=3e-4",
            "loss.eps_clip_high=4e-4",
            "loss.aggregation=seq-mean-token-mean",
        ],
    )
    assert (config.loss.eps_clip, config.loss.eps_clip_high) == (3e-4, 4e-4)
