"""How the request to a server says what to sample."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_stare.rollout.engine import Limits, Request, SamplingParams
from megatron_stare.rollout.sglang.client import SGLangClient
from megatron_stare.rollout.sglang.streaming import Received

LIMITS = Limits(vocab_size=50, context_length=20, prompt_length=14)
ANSWER = {
    "output_ids": [3],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-1.5, 3, None]],
    },
}


def sent(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters of the request's body."""
    client, bodies = object.__new__(SGLangClient), []

    async def call(method: str, path: str, body: dict[str, Any], *_: Any) -> dict[str, Any]:
        bodies.append(body)
        return ANSWER

    client.url, client.call, client.stream_interval = "http://nowhere", call, 0
    request = Request((1, 2), (0,))
    received = Received({3}, (), LIMITS, params.max_new_tokens)
    asyncio.run(client.generate(request, params, frozenset({3}), received, "rid", 1.0))
    return bodies[0]["sampling_params"]


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
