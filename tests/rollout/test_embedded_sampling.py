"""Sampling one token: against a naive walk, in frequency, at its limits."""

import pytest
import torch

from megatron_stare.rollout.embedded import ROWS, likeliest, next_tokens, sample
from megatron_stare.rollout.engine import SamplingParams


def naive_sample(logits, uniform, temperature, top_p, top_k=0):
    """One row in plain Python: cut the tail, walk the cumulative distribution in id order."""
    scaled = [value / temperature for value in logits]
    largest = max(scaled)
    total = sum(2.718281828459045 ** (value - largest) for value in scaled)
    probabilities = [2.718281828459045 ** (value - largest) / total for value in scaled]
    kept, mass = set(), 0.0
    for token in sorted(range(len(logits)), key=lambda token: -probabilities[token]):
        if (mass >= top_p and top_p < 1) or len(kept) == (top_k or len(logits)):
            break
        kept.add(token)
        mass += probabilities[token]
    target = uniform * mass
    running = 0.0
    for token in sorted(kept):
        running += probabilities[token]
        if target < running:
            break
    return token, probabilities[token]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.05])
@pytest.mark.parametrize("top_k", [0, 1, 3, 36, 37, 50])
def test_sample_equals_a_naive_walk(temperature, top_p, top_k):
    generator = torch.Generator().manual_seed(11)
    logits_BV = 3 * torch.randn(400, 37, generator=generator)
    uniform_B = torch.rand(400, generator=generator, dtype=torch.float64)
    token_B, logprob_B = sample(logits_BV, uniform_B, temperature, top_p, top_k)
    for row in range(400):
        token, probability = naive_sample(
            logits_BV[row].tolist(), float(uniform_B[row]), temperature, top_p, top_k
        )
        assert int(token_B[row]) == token
        assert float(logprob_B[row].exp()) == pytest.approx(probability, rel=1e-5)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sample_visits_every_token_as_often_as_it_is_likely(top_p):
    logits_V = torch.tensor([2.0, -1.0, 0.0, 1.0, 0.5])
    count = 20_000
    uniform_B = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    token_B, _ = sample(logits_V.expand(count, -1), uniform_B, 1.0, top_p)
    share_V = torch.softmax(logits_V.double(), 0)
    if top_p < 1:  # 0.557 + 0.205 falls short of 0.8, so the third (0.124) is kept as well
        share_V[torch.tensor([1, 2])] = 0
        share_V /= share_V.sum()
    assert torch.allclose(
        torch.bincount(token_B, minlength=5).double() / count, share_V, atol=1.1 / count
    )


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-4, 1.0), (1.0, 1e-6)])
def test_the_greedy_limits_take_the_argmax(temperature, top_p):
    generator = torch.Generator().manual_seed(5)
    logits_BV = torch.randn(200, 50, generator=generator)
    uniform_B = torch.rand(200, generator=generator, dtype=torch.float64)
    token_B, _ = sample(logits_BV, uniform_B, temperature, top_p)
    assert torch.equal(token_B, logits_BV.argmax(-1))


def test_greedy_takes_the_first_of_the_likeliest():
    logits_BV = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, -torch.inf]])
    token_B, logprob_B = likeliest(logits_BV)
    assert token_B.tolist() == [1, 0]
    torch.testing.assert_close(logprob_B, torch.log_softmax(logits_BV, -1)[[0, 1], [1, 0]])


def test_top_k_keeps_the_first_of_equal_tokens():
    uniform_B = (torch.arange(90, dtype=torch.float64) + 0.5) / 90
    token_B, _ = sample(torch.zeros(90, 9), uniform_B, 1.0, 1.0, 3)
    assert torch.bincount(token_B, minlength=9).tolist() == [30, 30, 30, *[0] * 6]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_give_possible_tokens(uniform, top_p):
    logits_BV = torch.full((1, 9), -torch.inf)
    logits_BV[0, 2:6] = torch.tensor([0.0, 1.0, 2.0, 0.5])
    token_B, logprob_B = sample(logits_BV, torch.tensor([uniform], dtype=torch.float64), 1.0, top_p)
    lowest = 2 if top_p == 1 else 3  # token 2 has mass 0.078 and falls to top_p 0.9
    assert int(token_B[0]) == (lowest if uniform == 0 else 5)
    assert torch.isfinite(logprob_B).all()


def test_log_probs_are_of_the_whole_distribution():
    logits_BV = torch.tensor([[1.0, 0.0, -1.0]])
    _, logprob_B = sample(logits_BV, torch.zeros(1, dtype=torch.float64), 2.0, 0.1)
    torch.testing.assert_close(logprob_B, torch.log_softmax(logits_BV / 2, -1)[:, 0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_sequence_samples_the_same_in_any_batch(temperature):
    generator = torch.Generator().manual_seed(4)
    count = 2 * ROWS + 3
    logits_BV = 3 * torch.randn(count, 600, generator=generator)
    uniform_B = torch.rand(count, generator=generator, dtype=torch.float64)
    params = SamplingParams(temperature, 1.0, 1)
    tokens, logprobs = next_tokens(logits_BV, uniform_B, params)
    alone = [
        next_tokens(logits_BV[row, None], uniform_B[row, None], params) for row in range(count)
    ]
    assert len(set(tokens.tolist())) > ROWS
    assert tokens.tolist() == [int(token) for token, _ in alone]
    assert torch.equal(logprobs, torch.cat([logprob for _, logprob in alone]))
