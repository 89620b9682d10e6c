"""Small runs of one rank, and whether two runs are the same."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_stare.losses import find_objective
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.records import Group, Prompt, Rollout
from tests.loop.test_trainer_layouts import (
    COMPARED,
    DELTA,
    EXPERTS,
    LATENT,
    PACKED,
    SENSITIVITY,
    STARE,
    train_steps,
)
from tests.small_run import small_config

ADAPTERS = "adapters.rank=2"
STEPS = 2  # the device is slow
LATENT_ADAPTERS = (ADAPTERS, "adapters.targets=q,k,v,o")
SHARED_ADAPTERS = (ADAPTERS, "adapters.experts=shared")
KINDS = (
    *("latent adapters", "shared adapters", "experts adapters"),
    *(EXPERTS, LATENT, DELTA, "adapters"),
)


def reference_of(name: str) -> str:
    """The run on the CPU that a case is compared with."""
    return next((kind for kind in KINDS if name.endswith(kind)), "dense")


def groups(count: int, vocabulary: int = 500) -> list[Group]:
    """`count` micro-batches of 128 tokens: two sequences each, of made-up ids."""
    generator = numpy.random.default_rng(0)

    def rollout(advantage: float) -> Rollout:
        return Rollout(
            response_ids=generator.integers(1, vocabulary, 49),
            logprobs=numpy.full(49, -1.0),
            loss_mask=numpy.ones(49, bool),
            status="completed",
            weight_version=0,
            advantage=advantage,
        )

    return [
        Group(
            Prompt(number, generator.integers(1, vocabulary, 16), label=""),
            (rollout(1), rollout(-1)),
        )
        for number in range(count)
    ]


def trained(directory: str, cases: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """The metrics of each case, a layout of tests/loop/test_trainer_layouts.py and further
    overrides, over STEPS steps.
    """
    found = {}
    for name, (layout, *further) in cases.items():
        found[name] = train_steps(directory, layout, 1, *further, steps=STEPS)
        gc.collect()
    return found


def updated_in_bf16(directory: str) -> list[dict[str, float]]:
    """Three updates on the same tokens, because samples would differ if two logits are close."""
    options = (f"policy.hf_checkpoint={directory}/untied", "policy.dtype=bf16", PACKED)
    config = small_config(
        Path(directory), *options, "policy.max_tokens_per_gpu=128", "optimizer.lr=1e-2"
    )
    objective, found = find_objective(config.loss.name), []
    with topologies.session(config.policy) as topology:
        actor = Actor(config, topology, 10)
        for _ in range(3):
            scored = actor.score(actor.pack(groups(4, 257), 0), sensitivity=True)
            signals = objective.plan(scored, config.loss, topology.across, {})
            metrics, _ = actor.update(scored, objective.bind(config.loss), signals)
            statistics = {
                name: getattr(scored, f"{name}_T").double().mean().item()
                for name in ("surprisal", "entropy", "sensitivity")
            }
            found.append(metrics | statistics)
            actor.make_room()
    return found


def assert_same_metrics(
    ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], slack: float = 1
) -> None:
    for row, other in zip(ours, theirs, strict=True):
        for key in (*COMPARED, *STARE, *SENSITIVITY):
            close = 1e-5 * slack
            if key == "critical_weight_excess" and "adapters/merge_error" in row:
                close = 1e-4  # it divides what cancels; adapters cancel more
            assert row[key] == pytest.approx(other[key], rel=close, abs=1e-7), (key, row, other)


def slack_of(name: str) -> float:
    """How much more rounding a case may have: gated delta nets normalise the output of each head,
    which enlarges it.
    """
    return 100 if name.endswith(DELTA) else 1


def assert_trained_alike(
    results: Sequence[dict[str, Any]], expected: dict[str, Any], slack: float = 1
) -> None:
    """Metrics and weights of every rank, and the tokens that the ranks selected together.

    Weights agree to a hundredth of one of Adam's steps: if a gradient is nearly zero, its rounding
    is part of the step.
    """
    for result in results:
        assert_same_metrics(result["metrics"], expected["metrics"], slack)
        assert all(row["logprob_diff_max"] < 1e-4 * slack for row in result["metrics"])
        assert result["weights"].keys() == expected["weights"].keys()
        for name, tensor in result["weights"].items():
            near = {"rtol": 1e-5 * slack, "atol": 3e-5 * slack}
            torch.testing.assert_close(tensor, expected["weights"][name], **near)
    for step, (up, down) in enumerate(expected["chosen"]):
        assert up and down
        assert set().union(*(result["chosen"][step][0] for result in results)) == up
        assert set().union(*(result["chosen"][step][1] for result in results)) == down
