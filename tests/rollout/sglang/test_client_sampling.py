"""Sampling settings in the request to a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_stare.records import Rollout, RoutingShape
from megatron_stare.rollout.engine import Limits, Request, SamplingParams, seed_number
from megatron_stare.rollout.sglang.answers import Received
from megatron_stare.rollout.sglang.client import SGLangClient

LIMITS = Limits(vocab_size=50, context_length=20, prompt_length=14)
ANSWER = {
    "output_ids": [3],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.5, 3, None]],
    },
}


def sent(params: SamplingParams, request: Request | None = None) -> dict[str, Any]:
    """The sampling parameters of the request's body."""
    return body_of(params, request or Request((1, 2), (0,)))["sampling_params"]


def body_of(params: SamplingParams, request: Request, key: str = "") -> dict[str, Any]:
    client, bodies = object.__new__(SGLangClient), []

    async def call(method: str, path: str, body: dict[str, Any], *_: Any) -> dict[str, Any]:
        bodies.append(body)
        return ANSWER

    client.url, client.call, client.stream_interval = "http://nowhere", call, 0
    received = Received({3}, (), LIMITS, params.max_new_tokens)
    asyncio.run(client.generate(request, params, frozenset({3}), received, "rid", "", key))
    return bodies[0]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(0.7, 0.9, 4), {"temperature": 0.7, "top_p": 0.9, "top_k": -1}),
        (SamplingParams(0.7, 1.0, 4, top_k=20), {"temperature": 0.7, "top_p": 1.0, "top_k": 20}),
        (SamplingParams(0.0, 1.0, 4), {"temperature": 0.0, "top_p": 1.0, "top_k": 1}),
        # A server's log-probs at top_k 1 hang on what else is in its batch; greedy ones do not.
        (SamplingParams(1.3, 1.0, 4, top_k=1), {"temperature": 0.0, "top_p": 1.0, "top_k": 1}),
    ],
)
def test_temperature_top_p_and_top_k(params: SamplingParams, expected: dict[str, float]):
    assert {key: sent(params)[key] for key in expected} == expected


def test_a_cache_key_keeps_prefixes_of_other_weights_apart():
    body = body_of(SamplingParams(1.0, 1.0, 4), Request((1, 2), (0,)), "run-7")
    assert body["extra_key"] == "run-7"
    assert "extra_key" not in body_of(SamplingParams(1.0, 1.0, 4), Request((1, 2), (0,)))


def test_the_seed_is_that_of_the_response_and_stays_so():
    """The state of the response does not matter: a retry, a further turn, the rest of an
    interrupted part. The place of a token gives it other random numbers than those of the part.
    """
    plain, part = (
        SamplingParams(1.0, 1.0, 6),
        Rollout((5, 6), (-1.0, -1.0), (1, 0), status="aborted", weight_version=0),
    )
    seed = (3, 0, 17, 1)
    for whole in (None, part, part.continued(part)):
        request = Request((1, 2), seed, whole)
        assert sent(plain, request)["sampling_seed"] == seed_number(seed)
    assert sent(plain, Request((1, 2), (3, 0, 17, 2)))["sampling_seed"] != seed_number(seed)


def test_experts_are_asked_for_from_where_they_are_not_known():
    shape = RoutingShape(layers=(1, 3), top_k=2, experts=8)
    params, plain = SamplingParams(1.0, 1.0, 6, routing=shape), SamplingParams(1.0, 1.0, 6)
    part = Rollout(
        (5, 6), (-1.0, -1.0), (1, 1), status="aborted", weight_version=0, routing=[0, 1, 2, 3] * 3
    )
    for request, start in ((Request((1, 2), (0,)), 0), (Request((1, 2), (0,), part), 3)):
        body = body_of(params, request)
        assert body["return_routed_experts"] and body["routed_experts_start_len"] == start
        assert "return_routed_experts" not in body_of(plain, request)
