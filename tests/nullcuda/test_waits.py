"""The number of times that the host waits for the device, by the cause of the wait."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_stare.config import Config, LossConfig, override
from megatron_stare.losses import find_objective
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from tests.nullcuda.runs import groups
from tests.tiny_models import tiny_config, write_checkpoint

pytestmark = pytest.mark.nullcuda

FEW, MANY = 2, 6
HEADS = ("fused", "recompute", "logits")


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
    """Waits that happen once per step cancel in the difference of two batches."""
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
