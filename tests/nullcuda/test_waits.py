"""How often the host waits for the device, by who makes it wait."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from megatron_stare.config import Config, LossConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.records import Group, Prompt, Rollout
from tests.tiny_models import tiny_config, write_checkpoint

pytestmark = pytest.mark.nullcuda

FEW, MANY = 2, 6
HEADS = ("fused", "recompute", "logits")


def groups(count: int) -> list[Group]:
    """`count` micro-batches of 128 tokens: two sequences each."""
    generator = numpy.random.default_rng(0)

    def rollout(advantage: float) -> Rollout:
        return Rollout(
            response_ids=generator.integers(1, 500, 49),
            logprobs=numpy.full(49, -1.0),
            loss_mask=numpy.ones(49, bool),
            status="completed",
            weight_version=0,
            advantage=advantage,
        )

    return [
        Group(Prompt(number, generator.integers(1, 500, 16), label=""), (rollout(1), rollout(-1)))
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "qwen2"
    write_checkpoint(place, tiny_config("qwen2", vocab_size=512))
    return place


@pytest.fixture(params=HEADS)
def actor(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Actor]:
    config = override(
        Config(),
        [
            f"policy.hf_checkpoint={checkpoint}",
            *("policy.dtype=bf16", "policy.max_tokens_per_gpu=128"),
            f"policy.head={request.param}",
        ],
    )
    with topologies.session(config.policy) as topology:
        yield Actor(config, topology, 10)


def test_the_host_waits_once_a_micro_batch(actor: Actor) -> None:
    """Whatever it waits for once a step falls out of the difference of two batches."""
    from tools.nullcuda.counters import counting

    objective, settings = find_objective("stare"), LossConfig()
    seen: dict[tuple[str, int], collections.Counter] = {}
    for count in (FEW, FEW, MANY):  # the first one compiles kernels
        batch = actor.pack(groups(count), 0)
        assert len(batch.microbatches) == count
        with counting(sites=True) as scoring:
            scored = actor.score(batch, sensitivity=True)
        signals = objective.plan(scored, settings, actor.topology.across, {})
        with counting(sites=True) as updating:
            actor.update(scored, objective.bind(settings), signals)
        seen["score", count], seen["update", count] = scoring.sites, updating.sites
    for phase in ("score", "update"):
        more = seen[phase, MANY] - seen[phase, FEW]
        assert sum(more.values()) <= MANY - FEW, more
        assert all("vocab_shard" in place for _, place in more), more
