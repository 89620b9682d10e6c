"""KL estimators against their formulas."""

import pytest
import torch

from megatron_stare.losses.kl import ESTIMATORS, kl_penalty
from megatron_stare.records import LossTokens


@pytest.mark.parametrize("kind", list(ESTIMATORS))
def test_kl_estimators_equal_their_formulas(kind):
    """Against plain float64 arithmetic, far enough apart that the clamps bite;
    gradients by autograd of both.
    """
    generator = torch.Generator().manual_seed(11)
    surprisal = (torch.rand(200, generator=generator, dtype=torch.float64) * 60).requires_grad_()
    reference = torch.rand(200, generator=generator, dtype=torch.float64) * 60
    zeros = torch.zeros(200, dtype=torch.float64)
    tokens = LossTokens(surprisal, zeros, zeros, zeros, zeros, reference_surprisal=reference)
    ours = kl_penalty(tokens, kind)
    d = surprisal - reference  # ln pi_ref - ln pi
    k3 = torch.clamp(torch.exp(torch.clamp(d, -20, 20)) - torch.clamp(d, -20, 20) - 1, -10, 10)
    value = {
        "k1": -d,
        "abs": abs(d),
        "k2": d * d / 2,
        "k3": k3,
        "low_var_kl": k3,
        "k1+": -d,
        "k3+": k3,
    }[kind]
    naive = value.detach() + (d * d / 2 - (d * d / 2).detach()) if kind.endswith("+") else value
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    grads = [
        torch.autograd.grad(value.sum(), surprisal, retain_graph=True)[0] for value in (ours, naive)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_kl_refuses_unsupported_arguments():
    zeros = torch.zeros(2)
    with pytest.raises(ValueError, match="reference"):
        kl_penalty(LossTokens(zeros, zeros, zeros, zeros, zeros), "k1")
    with pytest.raises(ValueError, match=r"k4.*unknown"):
        kl_penalty(LossTokens(zeros, zeros, zeros, zeros, zeros, reference_surprisal=zeros), "k4")


@pytest.mark.parametrize("kind", list(ESTIMATORS))
def test_kl_estimators_of_impossible_tokens_have_finite_gradients(kind):
    """exp of the difference is infinite, and 0 times infinity would be no number."""
    surprisal = torch.tensor([2000.0, 0.0], requires_grad=True)
    reference, zeros = torch.tensor([0.0, 2000.0]), torch.zeros(2)
    tokens = LossTokens(surprisal, zeros, zeros, zeros, zeros, reference_surprisal=reference)
    value = kl_penalty(tokens, kind)
    value.sum().backward()
    assert surprisal.grad is not None
    assert value.isfinite().all() and surprisal.grad.isfinite().all()
