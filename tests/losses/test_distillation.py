"""The advantage of a teacher against its closed form, the gradient of the reverse KL."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_stare.config import LossConfig, UserError
from megatron_stare.losses import compute
from megatron_stare.losses.distillation import distilled
from tests.losses.batches import batch_of

ALONE = {"distillation_coef": 1.0, "reward_coef": 0.0}


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
def test_its_expected_gradient_is_that_of_the_reverse_kl(name: str, coefficient: float) -> None:
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
