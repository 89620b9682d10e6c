"""A real server in its deterministic mode, of a model with experts: its choice of experts, and the
same tokens for the same seeds in any batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from megatron_stare.config import UserError
from megatron_stare.policy.build import read_hf_config
from megatron_stare.policy.experts import routing_shape
from megatron_stare.records import Rollout, RoutingShape
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.rollout.sglang.pool import SGLangPool
from megatron_stare.rollout.sglang.process import ServerProcess
from megatron_stare.rollout.sglang.server import check_modes
from tests.policy.reference_experts import ForcedExperts
from tests.rollout.sglang.idle import sample_all
from tests.rollout.sglang.world import (
    NEWER,
    TOLERANCE,
    attached,
    make_model,
    requests,
    start_server,
    wait_for,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not NEWER, reason="this SGLang returns no experts"),
]
FLAGS = ("--enable-return-routed-experts", "--enable-deterministic-inference")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in every layer: SGLang does not read mlp_only_layers."""
    directory = tmp_path_factory.mktemp("routed") / "model"
    return make_model(directory, "qwen3_moe", mlp_only_layers=[])


@pytest.fixture(scope="module")
def shape(checkpoint: Path) -> RoutingShape:
    found = routing_shape(read_hf_config(str(checkpoint)))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def pool(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangPool]:
    directory = tmp_path_factory.mktemp("servers")
    server: ServerProcess = start_server(checkpoint, directory / "server.txt", 0, *FLAGS)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        wait_for([server], checkpoint)
        yield stack.enter_context(attached([server.url], checkpoint, directory, deterministic=True))


@pytest.fixture(scope="module")
def params(shape: RoutingShape) -> SamplingParams:
    return SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=24, routing=shape)


@pytest.fixture(scope="module")
def sampled(pool: SGLangPool, params: SamplingParams) -> list[Rollout]:
    """All at once."""
    return sample_all(pool, requests(12), params).result(timeout=300)


def test_the_servers_experts_are_those_of_the_model(
    sampled: list[Rollout], shape: RoutingShape, checkpoint: Path
):
    twin, alike, count = ForcedExperts(checkpoint), 0, 0
    for request, rollout in zip(requests(12), sampled, strict=True):
        ids = [*request.prompt_ids.tolist(), *rollout.response_ids.tolist()]
        choices = shape.decoded(rollout.routing)
        assert len(choices) == len(ids) - 1
        forced = twin.logprobs(ids, choices)[len(request.prompt_ids) - 1 :]
        assert numpy.abs(forced.detach().numpy() - rollout.logprobs).max() < TOLERANCE
        twin.logprobs(ids)
        own = numpy.stack([layer.numpy() for layer in twin.chosen], 1)
        same = (numpy.sort(own, -1) == numpy.sort(choices, -1)).all(-1)
        alike, count = alike + int(same.sum()), count + same.size
    assert count > 500 and alike > 0.99 * count


def test_seeds_alone_decide(pool: SGLangPool, params: SamplingParams, sampled: list[Rollout]):
    """Bit for bit, though each is alone on the server now; another seed has another response."""
    for request, before in zip(requests(12)[::3], sampled[::3], strict=True):
        (again,) = sample_all(pool, [request], params).result(timeout=300)
        assert again == before
    group = [Request(requests(1)[0].prompt_ids, (5, number)) for number in range(8)]
    rollouts = sample_all(pool, group, params).result(timeout=300)
    assert len({rollout.response_ids.tobytes() for rollout in rollouts}) == 8


def test_a_continued_response_equals_a_whole_one(
    pool: SGLangPool, params: SamplingParams, sampled: list[Rollout], shape: RoutingShape
):
    """From a part with its experts, and from one without them."""
    place = max(range(12), key=lambda number: sampled[number].length)
    whole, asked = sampled[place], requests(12)[place]
    cut = whole.length // 2
    rows = len(asked.prompt_ids) + cut - 1
    for kept in (rows, 0):
        part = Rollout(
            whole.response_ids[:cut],
            whole.logprobs[:cut],
            whole.loss_mask[:cut],
            status="aborted",
            weight_version=0,
            routing=whole.routing[: kept * shape.width],
        )
        request = dataclasses.replace(asked, part=part)
        (found,) = sample_all(pool, [request], params).result(timeout=300)
        assert found.response_ids.tolist() == whole.response_ids.tolist()
        assert found.logprobs.tolist() == pytest.approx(whole.logprobs.tolist(), abs=1e-5)
        assert found.routing_bytes == whole.routing_bytes
        assert (found.routing == whole.routing).mean() > 0.99
    assert pool.counts()["engine_answers_without_routing"] == 0


def test_a_server_in_other_modes_is_refused(pool: SGLangPool):
    info = pool.servers[0].info
    assert info is not None and info.deterministic and info.routed_experts
    plain = dataclasses.replace(info, deterministic=False, routed_experts=False)
    model = dataclasses.replace(pool.model, routed_experts=True)
    for wanted, settings, words in (
        (model, pool.settings, "--enable-return-routed-experts"),
        (pool.model, pool.settings, "--enable-deterministic-inference"),
    ):
        with pytest.raises(UserError, match=words):
            check_modes("http://one", plain, wanted, settings)
