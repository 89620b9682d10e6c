"""The form of calls that all dialects of the endpoint share, and two dialects: OpenAI's chat
completions, and vLLM's of token ids, in which the client has rendered the prompt:

    POST /inference/v1/generate  {"token_ids": [...], "sampling_params": {"max_tokens": n}}
    ->  {"choices": [{"token_ids", "logprobs": {"content": [{"token": "token_id:7", "logprob"}]}}]}

A prompt that begins with an earlier call's prompt and answer continues it. `tokenize` of the
endpoint renders messages for clients of chat/completions/tokens, which is chat with `tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from megatron_stare.rollout.agents.messages import BadCall, Message, checked
from megatron_stare.rollout.tools.calls import Tool

# Training owns these; a client's values are counted and have no effect.
IGNORED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "response_format",
    "chat_template_kwargs",
    "reasoning_effort",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
)


@dataclass(frozen=True)
class ModelCall:
    """A call of an agent in the form that all dialects share."""

    messages: list[Message]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    model: str = ""
    ignored: tuple[str, ...] = ()
    logprobs: bool = False
    previous: str = ""  # the answer that these messages continue (Responses)
    instructed: bool = False  # the first message is the call's own: it is not carried over
    prompt_ids: tuple[int, ...] | None = None  # rendered by the client
    return_ids: bool = False
    stream_usage: bool = False  # a stream ends with a chunk that has no choice but the usage


@dataclass(frozen=True)
class ModelAnswer:
    """The parts of an answered call that every dialect serves."""

    id: str
    model: str
    message: Message
    finish_reason: str  # stop, length or tool_calls
    # Arrays: a session keeps its answers, for clients that ask again.
    prompt_ids: numpy.ndarray
    ids: numpy.ndarray  # sampled
    values: numpy.ndarray  # their log-probs
    texts: list[str]  # theirs, if the call asks for log-probs


@dataclass(frozen=True)
class Dialect:
    """How one kind of clients asks and is answered."""

    # The call of a request's body. BadCall: it asks for what cannot be had.
    read: Callable[[Mapping[str, Any]], ModelCall]
    body_of: Callable[[ModelCall, ModelAnswer], dict[str, Any]]  # the JSON of an answer
    # An answer's stream; its pieces put together are the JSON of `body_of`.
    events_of: Callable[[ModelCall, ModelAnswer], Iterator[str]]
    error_event: Callable[[Mapping[str, Any]], str]  # an error after the stream has begun
    heartbeat: str = ": waiting\n\n"  # in a stream, while the answer is not there


def read(body: Mapping[str, Any]) -> ModelCall:
    _refuse_several(body)
    tools = body.get("tools") or ()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadCall("tools must be a list of {type: function, function: {name, ...}}")
    choice = body.get("tool_choice")
    return ModelCall(
        checked(body.get("messages")),
        () if choice == "none" else tuple(tools),
        count_of(body, "max_completion_tokens", "max_tokens"),
        stop_texts(body.get("stop")),
        ignored=ignored_of(body, IGNORED, choice),
        logprobs=bool(body.get("logprobs")),
        prompt_ids=_ids_of(body, "tokens"),
        return_ids=bool(body.get("return_token_ids")),
        stream_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        **delivery_of(body),
    )


def delivery_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelCall that have one name in all dialects."""
    return {"stream": bool(body.get("stream")), "model": str(body.get("model") or "")}


def ignored_of(
    body: Mapping[str, Any], names: Sequence[str], choice: object = None
) -> tuple[str, ...]:
    """Those of these settings that a client gives; `choice`: of its tools."""
    given = [name for name in names if body.get(name) not in (None, "disabled")]
    return (*given, *(["tool_choice"] if choice not in (None, "auto", "none") else []))


def _refuse_several(settings: Mapping[str, Any]) -> None:
    """BadCall: more than one answer is asked for."""
    if settings.get("n") not in (None, 1):
        raise BadCall(f"n={settings['n']!r}: one answer per call; ask again for another")


def count_of(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of these values that is given. BadCall: it is not a positive integer."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadCall(f"{name}={value!r} must be a positive integer")
        return value
    return None


def _ids_of(body: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """The token ids that a client gives; None: it gives none. BadCall: they are not token ids."""
    found = body.get(name)
    if found is None:
        return None
    whole = isinstance(found, list) and all(type(one) is int and one >= 0 for one in found)
    if not found or not whole:
        raise BadCall(f"{name} must be a list of at least one token id")
    return tuple(found)


def stop_texts(value: Any) -> tuple[str, ...]:
    """The stop texts of a request. BadCall: one of them is not a text."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise BadCall("stop must be a text or a list of texts, none of them empty")
    return tuple(found)


def body_of(call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    if call.logprobs:
        choice["logprobs"] = {
            "content": [
                {"token": token, "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in zip(answer.texts, answer.values.tolist(), strict=True)
            ]
        }
    own: dict[str, Any] = {}
    if call.return_ids:
        choice["token_ids"] = answer.ids.tolist()
        own["prompt_token_ids"] = answer.prompt_ids.tolist()
    return own | {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": 0,
        "model": answer.model,
        "choices": [choice],
        "usage": _usage(answer),
    }


def events_of(call: ModelCall, answer: ModelAnswer) -> Iterator[str]:
    whole = body_of(call, answer)
    (own,) = whole["choices"]
    message = own.pop("message")
    common = {**whole, "object": "chat.completion.chunk"}
    usage = common.pop("usage")

    def chunk(delta: Mapping[str, Any], **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return f"data: {json.dumps({**common, 'choices': [choice]})}\n\n"

    yield chunk({"role": "assistant"})
    common.pop("prompt_token_ids", None)  # in the first chunk alone, as vLLM sends them
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield chunk({name: message[name]})
    for index, call_made in enumerate(message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{"index": index, **call_made}]})
    yield chunk({}, **own)  # with the log-probs and ids of the whole answer
    if call.stream_usage:
        yield f"data: {json.dumps({**common, 'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def error_event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def named_event(kind: str, **fields: Any) -> str:
    """An event of the dialects whose events have names."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def error_of(message: str, code: str) -> dict[str, Any]:
    """The JSON of an error, in all dialects."""
    return {
        "type": "error",
        "error": {"message": message, "type": "invalid_request_error", "code": code},
    }


def _usage(answer: ModelAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": len(answer.prompt_ids),
        "completion_tokens": len(answer.ids),
        "total_tokens": len(answer.prompt_ids) + len(answer.ids),
    }


def _read_ids(body: Mapping[str, Any]) -> ModelCall:
    params = body.get("sampling_params") or {}
    ids = _ids_of(body, "token_ids")
    if ids is None or not isinstance(params, dict):
        raise BadCall("token_ids must be a list of token ids, and sampling_params an object")
    _refuse_several(params)
    return ModelCall(
        [],
        max_tokens=count_of(params, "max_tokens"),
        stop=stop_texts(params.get("stop")),
        ignored=ignored_of(params, IGNORED),
        prompt_ids=ids,
        **delivery_of(body),
    )


def _ids_body(call: ModelCall, answer: ModelAnswer) -> dict[str, Any]:
    ids, values = answer.ids.tolist(), answer.values.tolist()
    pairs = zip(ids, values, strict=True)
    content = [{"token": f"token_id:{one}", "logprob": value} for one, value in pairs]
    reason = "length" if answer.finish_reason == "length" else "stop"
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": {"content": content},
        "finish_reason": reason,
    }
    return {"request_id": answer.id, "choices": [choice]}


def _ids_events(call: ModelCall, answer: ModelAnswer) -> Iterator[str]:
    yield f"data: {json.dumps(_ids_body(call, answer))}\n\n"
    yield "data: [DONE]\n\n"


CHAT = Dialect(read, body_of, events_of, error_event)
TOKEN_IDS = Dialect(_read_ids, _ids_body, _ids_events, error_event)
