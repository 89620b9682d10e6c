"""The operations of a gated delta net against their definitions, token by token in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from megatron_stare.policy.cpu_layers import delta_rule

LENGTHS = {"short": [3, 1, 5], "a whole chunk": [64], "several chunks": [130, 7, 64, 65, 1]}


def naive_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """o [S, H, V] of one sequence, [S, H, ...]."""
    state_HKV = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
    found = []
    for q_HK, k_HK, v_HV, g_H, beta_H in zip(q, k, v, g, beta, strict=True):
        state_HKV = state_HKV * g_H.exp()[:, None, None]
        wrong_HV = v_HV - torch.einsum("hk,hkv->hv", k_HK, state_HKV)
        state_HKV = state_HKV + beta_H[:, None, None] * k_HK[:, :, None] * wrong_HV[:, None]
        found.append(torch.einsum("hk,hkv->hv", q_HK, state_HKV) * q.shape[2] ** -0.5)
    return torch.stack(found)


def naive_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """y [S, channels] of one sequence."""
    taps = weight.shape[1]
    rows = []
    for place in range(len(x)):
        parts = [weight[:, -1 - back] * x[place - back] for back in range(min(taps, place + 1))]
        rows.append(silu(sum(parts, torch.zeros_like(x[0]))))
    return torch.stack(rows)


def inputs(total: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, g, beta of one row."""
    generator = torch.Generator().manual_seed(total)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, total, 3, *shape, generator=generator, dtype=torch.float64)

    q, k = (delta_rule.normalised(drawn(6)) for _ in range(2))
    found = [q, k, drawn(4), -2 * drawn().exp(), drawn().sigmoid()]
    return [x.to(dtype).requires_grad_() for x in found]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_sequences_follow_the_recurrence(lengths: list[int]) -> None:
    """Values and gradients; a strong decay does not overflow."""
    given = inputs(sum(lengths))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    found, state = delta_rule.gated_delta_rule(*given, cu_seqlens=ends)
    parts = zip(*(x[0].split(lengths) for x in given), strict=True)
    expected = torch.cat([naive_rule(*part) for part in parts])[None]
    assert state is None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weight = torch.randn(found.shape, dtype=found.dtype)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), given) for x in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_rows_are_sequences_of_their_own() -> None:
    """A later token changes no earlier one, and a row no other."""
    rows = [inputs(70), inputs(71)]
    both = [torch.cat([a, b[:, :70]]).detach() for a, b in zip(*rows, strict=True)]
    found, _ = delta_rule.gated_delta_rule(*both)
    for row in range(2):
        expected = naive_rule(*(x[row] for x in both))
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-12)
    changed = [x.clone() for x in both]
    changed[2][0, 50:] += 1
    again, _ = delta_rule.gated_delta_rule(*changed)
    assert torch.equal(again[0, :50], found[0, :50]) and torch.equal(again[1], found[1])
    assert not torch.equal(again[0, 50:], found[0, 50:])


def test_half_precision_is_computed_in_fp32() -> None:
    given = [x.detach() for x in inputs(100, torch.bfloat16)]
    found, _ = delta_rule.gated_delta_rule(*given)
    exact, _ = delta_rule.gated_delta_rule(*(x.double() for x in given))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
    unit = delta_rule.normalised(given[2])
    assert unit.dtype == torch.bfloat16
    ones = torch.ones(1, 100, 3, dtype=torch.float64)
    torch.testing.assert_close(unit.double().norm(dim=-1), ones, rtol=0, atol=0.01)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_convolution_starts_again_with_every_sequence(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, sum(lengths), 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    found, state = delta_rule.causal_conv1d(x, weight, activation="silu", cu_seqlens=ends)
    expected = torch.cat([naive_convolution(part, weight) for part in x[0].split(lengths)])[None]
    assert state is None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    alone, _ = delta_rule.causal_conv1d(x, weight, activation="silu")
    torch.testing.assert_close(alone, naive_convolution(x[0], weight)[None], rtol=0, atol=1e-12)
    biased, _ = delta_rule.causal_conv1d(x, weight, torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(silu(biased - 1), alone, rtol=0, atol=1e-12)
