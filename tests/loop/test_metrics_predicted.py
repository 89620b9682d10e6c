"""The predicted change of entropy against a step that is really taken, on free logits."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_stare.config import LossConfig
from megatron_stare.loop.diagnostics import merged
from megatron_stare.loop.metrics import (
    QUADRANTS,
    View,
    change_metrics,
    clip_metrics,
    quadrants,
    view_of,
)
from megatron_stare.losses import objective_of
from megatron_stare.policy.actor import Actor, _loss_tokens
from megatron_stare.records import MicroBatch, TokenBatch
from tests.losses.batches import ALONE, batch_of
from tests.reference import token_statistics

TOKENS, VOCABULARY, STEP = 300, 11, 1e-6
# The actor's own derivative; it asks nothing of the model of a loss over single tokens.
ACTOR: Any = SimpleNamespace(
    token_gradient=functools.partial(Actor.token_gradient, None),
    topology=SimpleNamespace(across=ALONE),
)


def scored(seed: int = 0) -> tuple[TokenBatch, Tensor, Tensor]:
    """A batch whose tokens' distributions are softmaxes of their own logits [T, V], and those."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 2 * torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
    target_T = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    found = token_statistics(logits_TV, torch.eye(VOCABULARY), target_T)
    advantage_T = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    advantage_T[::9] = 0.0
    batch = batch_of(found["surprisal"], advantage_T, found["entropy"])
    old_T = found["surprisal"] + 0.4 * torch.randn(TOKENS, generator=generator)
    rows, of_sequences = torch.arange(TOKENS), [torch.tensor([TOKENS]), torch.tensor([0])]
    micro = MicroBatch(
        *[torch.zeros(1, 1)] * 2, rows, target_T, target_T, 1, slice(0, TOKENS), *of_sequences
    )
    return (
        dataclasses.replace(
            batch,
            microbatches=(micro,),
            advantage_T=advantage_T,
            surprisal_T=found["surprisal"],
            entropy_T=found["entropy"],
            sensitivity_T=found["sensitivity"],
            old_surprisal_T=old_T,
        ),
        logits_TV,
        target_T,
    )


def viewed(name: str, **settings: Any) -> tuple[View, Tensor, Tensor, Any]:
    batch, logits_TV, target_T = scored()
    config = LossConfig(name=name, **settings)
    objective = objective_of(config)
    plan = objective.plan(batch, config, ALONE, {})
    loss = objective.bind(config)
    return view_of([], batch, plan, ACTOR, loss), logits_TV, target_T, loss


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("stare", {"variant": "C2", "target_entropy": 9.0}),
        ("stare", {"aggregation": "seq-mean-token-mean"}),
        ("dapo", {"eps_clip": 0.1, "eps_clip_high": 0.2}),
        ("opefo", {}),
    ],
)
def test_a_small_step_changes_every_tokens_entropy_as_predicted(name, settings):
    view, logits_TV, target_T, loss = viewed(name, **settings)
    batch, plan = view.batch, view.plan
    live_TV = logits_TV.clone().requires_grad_()
    surprisal_T = token_statistics(live_TV, torch.eye(VOCABULARY), target_T)["surprisal"]
    tokens = _loss_tokens(surprisal_T, batch.entropy_T, batch, plan, slice(0, TOKENS))
    total = (plan.coefficient_T * loss.function(tokens)).sum()
    moved_TV = logits_TV - STEP * torch.autograd.grad(total, live_TV)[0]
    after = token_statistics(moved_TV, torch.eye(VOCABULARY), target_T)["entropy"]
    change_T = (after - batch.entropy_T) / STEP
    torch.testing.assert_close(view.change_T, change_T, rtol=1e-3, atol=1e-8)
    assert view.change_T.abs().max() > 1e-4 and view.predicts == "objective"


def test_the_four_quadrants_have_the_signs_of_the_theory():
    view, *_ = viewed("stare", variant="C2")
    metrics = change_metrics(view, ALONE)
    signs = [metrics[f"entropy_change/{name}"] > 0 for name in QUADRANTS]
    assert signs == [True, False, False, True]
    parts = sum(metrics[f"entropy_change/{name}"] for name in QUADRANTS)
    assert metrics["entropy_change/predicted"] == pytest.approx(parts, rel=1e-12)
    assert view.plan.metrics == {} or metrics["entropy_change/predicted"] == pytest.approx(
        float(view.change_T.sum())
    )


def test_clipped_tokens_are_those_beyond_the_bounds():
    view, *_, loss = viewed("dapo", eps_clip=0.1, eps_clip_high=0.2, eps_clip_c=10.0)
    batch = view.batch
    by_T = ACTOR.token_gradient(batch, loss, view.plan)[:, 0]
    found = clip_metrics(by_T, batch, view.plan, ALONE)
    ratio = torch.exp(batch.old_surprisal_T - batch.surprisal_T)
    over, under = (batch.advantage_T > 0), (batch.advantage_T < 0)
    high, low = over & (ratio > 1.2), under & (ratio < 0.9)
    assert found["clip_fraction_positive"] == pytest.approx(int(high.sum()) / int(over.sum()))
    assert found["clip_fraction_negative"] == pytest.approx(int(low.sum()) / int(under.sum()))
    both = int((over | under).sum())
    assert found["clip_fraction"] == pytest.approx(int((high | low).sum()) / both)
    assert 0.1 < found["clip_fraction"] < 0.9


def test_the_changes_of_several_mini_batches_are_those_of_their_mean():
    view, *_ = viewed("stare")
    values = merged([view, view])
    assert float(values["change"].sum()) == pytest.approx(float(view.change_T.sum()))
    assert values["part"].tolist() == [0] * TOKENS + [1] * TOKENS
    masks = quadrants(values["advantage"], values["sensitivity"])
    assert sum(int(mask.sum()) for mask in masks) == int((values["advantage"] != 0).sum())
