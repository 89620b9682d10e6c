"""The advantage of a teacher against its closed form, the gradient of the reverse KL."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_stare.config import LossConfig, UserError
from megatron_stare.losses import compute, find_objective
from megatron_stare.losses.kl import distilled, top_k_divergence
from megatron_stare.records import LossTokens
from tests.losses.batches import batch_of

ALONE = {"distillation_coef": 1.0, "reward_coef": 0.0}


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl(
    name: str, coefficient: float
) -> None:
    """Every token of the vocabulary is a response of one token, weighed by its probability."""
    generator = torch.Generator().manual_seed(0)
    size = 11
    logits, theirs = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    log_V, teacher_V = torch.log_softmax(logits, -1), torch.log_softmax(theirs, -1)
    (log_V.exp() * (log_V - teacher_V)).sum().backward()
    closed, logits.grad = logits.grad, None
    assert closed is not None
    log_V = torch.log_softmax(logits, -1)
    batch = {
        "log_prob": log_V[:, None],
        "ref_log_prob": teacher_V[:, None],
        "advantages": torch.randn(size, 1, generator=generator, dtype=torch.float64),
        "response_mask": torch.ones(size, 1),
        "importance_weights": size * log_V.detach().exp()[:, None],
    }
    settings = ALONE | {"distillation_coef": coefficient}
    compute(name, batch, **settings).backward()
    torch.testing.assert_close(logits.grad, coefficient * closed, rtol=1e-12, atol=1e-14)


def test_both_advantages_are_added() -> None:
    generator = torch.Generator().manual_seed(1)
    own, theirs, advantage = (
        torch.rand(6, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    batch = dataclasses.replace(batch_of(own, advantage), reference_surprisal_T=theirs)
    mixed = distilled(batch, LossConfig(distillation_coef=0.5, reward_coef=2.0))
    torch.testing.assert_close(mixed.advantage_T, (2 * advantage + 0.5 * (own - theirs)).float())
    assert distilled(batch, LossConfig()) is batch


def test_a_batch_without_the_teacher_is_refused() -> None:
    zeros = torch.zeros(1, 2)
    batch = {"log_prob": zeros, "advantages": zeros, "response_mask": torch.ones(1, 2)}
    with pytest.raises(UserError, match=r"distillation_coef needs batch\['ref_log_prob'\]"):
        compute("dapo", batch, **ALONE)


def distributions(size: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Live logits of a policy, and a teacher's log-probs."""
    generator = torch.Generator().manual_seed(2)
    logits, theirs = (
        2 * torch.randn(rows, size, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return logits.requires_grad_(), torch.log_softmax(theirs, -1)


def tokens_of(logits: torch.Tensor, teacher: torch.Tensor, count: int) -> LossTokens:
    zeros = torch.zeros(logits.shape[0], dtype=torch.float64)
    ids = logits.detach().topk(count, -1).indices
    of = dataclasses.replace(LossTokens(zeros, zeros, zeros, zeros, zeros), logits=logits)
    return dataclasses.replace(of, top_ids=ids, teacher_top=teacher.gather(1, ids))


def test_over_the_whole_vocabulary_the_loss_is_the_reverse_kl() -> None:
    logits, teacher = distributions(11)
    log = torch.log_softmax(logits, -1)
    expected = (log.exp() * (log - teacher)).sum(-1)
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    found = top_k_divergence(tokens_of(logits, teacher, 11))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], slope)


@pytest.mark.parametrize("count", [1, 4, 10])
def test_over_some_tokens_the_loss_is_the_kl_of_them_and_the_rest(count: int) -> None:
    """The rest's log-probs are log-sum-exps of the other tokens, of both."""
    logits, teacher = distributions(11)
    log = torch.log_softmax(logits, -1)
    ids = logits.detach().topk(count, -1).indices
    others = torch.ones_like(log, dtype=torch.bool).scatter_(1, ids, False)

    def grouped(each: torch.Tensor) -> torch.Tensor:
        rest = each.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([each.gather(1, ids), rest], dim=-1)

    own, theirs = grouped(log), grouped(teacher)
    expected = (own.exp() * (own - theirs)).sum(-1)
    whole = (log.exp() * (log - teacher)).sum(-1)
    (slope,) = torch.autograd.grad(expected.sum(), logits, retain_graph=True)
    found = top_k_divergence(tokens_of(logits, teacher, count))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], slope)
    assert (found <= whole + 1e-12).all() and (found >= 0).all()


def test_a_rest_from_rounding_has_no_gradient() -> None:
    """In fp32 the rest of a sure token is noise, or below 0."""
    logits = torch.tensor([[40.0, 0.0, 0.0]], requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([[1.0, 0.0, 0.0]]), -1)
    found = top_k_divergence(tokens_of(logits, teacher, 1))
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert torch.isfinite(found).all() and torch.isfinite(slope).all()
    assert slope.abs().max() < 1e-5


def test_the_bound_loss_adds_distillation_and_asks_for_logits() -> None:
    logits, teacher = distributions(11)
    tokens = tokens_of(logits, teacher, 4)
    config = LossConfig(name="dapo", distillation_coef=0.3, distillation_top_k=4)
    bound = find_objective("dapo").bind(config)
    assert bound.logits and not find_objective("dapo").bind(LossConfig(name="dapo")).logits
    torch.testing.assert_close(bound.function(tokens), 0.3 * top_k_divergence(tokens))


def test_only_the_rewards_are_left_as_advantages() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    batch = dataclasses.replace(batch_of(ones, ones), reference_surprisal_T=2 * ones)
    config = LossConfig(distillation_coef=0.5, distillation_top_k=2, reward_coef=0.25)
    torch.testing.assert_close(distilled(batch, config).advantage_T, 0.25 * batch.advantage_T)
    zeros = torch.zeros(1, 2)
    rows = {"log_prob": zeros, "advantages": zeros, "response_mask": torch.ones(1, 2)}
    with pytest.raises(UserError, match="distillation_top_k=2 needs a teacher's distribution"):
        compute("dapo", rows, **ALONE, distillation_top_k=2)
