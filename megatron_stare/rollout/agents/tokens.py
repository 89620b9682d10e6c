"""vLLM's dialect of token ids: a prompt that the client has rendered, and the ids of the answer.

    POST /inference/v1/generate  {"token_ids": [...], "sampling_params": {"max_tokens": n}}
    ->  {"choices": [{"token_ids", "logprobs": {"content": [{"token": "token_id:7", "logprob"}]}}]}

A prompt that begins with an earlier call's prompt and answer continues it. `tokenize` of the
endpoint renders messages for clients of chat/completions/tokens, which is chat with `tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_stare.rollout.agents.chat import (
    HEARTBEAT,
    ModelAnswer,
    ModelCall,
    count_of,
    delivery_of,
    error_event,
    ids_of,
    ignored_of,
    refuse_several,
)
from megatron_stare.rollout.agents.messages import BadCall

__all__ = ["HEARTBEAT", "body_of", "error_event", "events_of", "read"]
IGNORED = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")


def read(body: Mapping[str, Any]) -> ModelCall:
    params = body.get("sampling_params") or {}
    ids = ids_of(body, "token_ids")
    if ids is None or not isinstance(params, dict):
        raise BadCall("token_ids must be a list of token ids, and sampling_params an object")
    refuse_several(params)
    return ModelCall(
        [],
        max_tokens=count_of(params, "max_tokens"),
        ignored=ignored_of(params, IGNORED),
        prompt_ids=ids,
        **delivery_of(body),
    )


def body_of(call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
    pairs = zip(answer.ids, answer.values, strict=True)
    content = [{"token": f"token_id:{one}", "logprob": value} for one, value in pairs]
    reason = "length" if answer.finish_reason == "length" else "stop"
    choice = {
        "index": 0,
        "token_ids": answer.ids,
        "logprobs": {"content": content},
        "finish_reason": reason,
    }
    return {"request_id": answer.id, "choices": [choice]}


def events_of(call: ModelCall, answer: ModelAnswer) -> Iterator[str]:
    """The whole answer as one event."""
    yield f"data: {json.dumps(body_of(call, answer))}\n\n"
    yield "data: [DONE]\n\n"
