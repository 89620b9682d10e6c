"""Responses and token ids over HTTP, and the ways to a session that agents without a key have."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import CALL_BEGIN, CALL_END, tool_tokenizer
from tests.rollout.agents.test_endpoint import ASKED, Client

CALL = f"<tool_call>{CALL_BEGIN}6*7{CALL_END}</tool_call><|end|>"
TOOL = {"type": "function", "name": "calculator", "parameters": {"type": "object"}}
ITEM = {"role": "user", "content": "6*7="}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tool_tokenizer()


async def post(client: Client, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    headers = headers or {"Authorization": f"Bearer {client.session.key}"}
    url = f"{client.endpoint.url}/{path}"
    async with client.http.post(url, data=json.dumps(body), headers=headers) as answer:
        text = await answer.text()
        return answer.status, text if body.get("stream") else json.loads(text)


def calls_then_answers(text: str, number: int) -> str:
    return "<think>ok</think>\n\n42<|end|>" if "<tool>" in text else CALL


@pytest.mark.parametrize("stored", [True, False])
def test_items_continue_the_calls_tokens(tokenizer: PreTrainedTokenizerBase, stored: bool):
    async def play() -> None:
        async with Client(tokenizer, calls_then_answers) as client:
            body = {"input": [ITEM], "tools": [TOOL], "instructions": "brief"}
            _, first = await post(client, "v1/responses", body)
            (call,) = first["output"]
            assert call["type"] == "function_call" and first["status"] == "completed"
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
            if stored:
                items = {"input": [result], "previous_response_id": first["id"]}
            else:
                items = {"input": [ITEM, call, result]}
            _, second = await post(client, "v1/responses", {**body, **items})
            assert [item["type"] for item in second["output"]] == ["reasoning", "message"]
            _, text = await post(client, "v1/responses", {**body, **items, "stream": True})
            events = [json.loads(e[6:]) for e in text.splitlines() if e.startswith("data: ")]
            assert [e["sequence_number"] for e in events] == list(range(len(events)))
            streamed = events[-1]["response"]["output"]
            assert [i["content"] for i in streamed] == [i["content"] for i in second["output"]]
            deltas = "".join(e["delta"] for e in events if e["type"].endswith("text.delta"))
            assert deltas == "ok42"
            rollout = client.session.rollout({}, status="completed")
            asked = [prompt for prompt, _ in client.inner.log]
            assert asked[1] == asked[2] and asked[1][: len(asked[0])] == asked[0]
            assert len(rollout.lengths) == 2, "one for each sampled end"
            assert "<system>brief" in tokenizer.decode(asked[0])

    asyncio.run(play())


def test_instructions_are_not_carried_over(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "1<|end|>") as client:
            _, first = await post(client, "v1/responses", {"input": "a", "instructions": "x"})
            again = {"input": "b", "previous_response_id": first["id"]}
            await post(client, "v1/responses", again)
            await post(client, "v1/responses", {**again, "instructions": "x"})
            texts = [tokenizer.decode(prompt) for prompt, _ in client.inner.log]
            end = "<user>a<|end|><assistant>1<|end|><user>b<|end|><assistant>"
            assert texts[1] == end and texts[2] == "<system>x<|end|>" + end
            bad = {"input": "b", "previous_response_id": "resp_0"}
            status, error = await post(client, "v1/responses", bad)
            assert status == 400 and "resp_0" in error["error"]["message"]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("v1/responses", {"input": []}, "input"),
        ("v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "web_search"),
        ("v1/responses", {"input": [{"type": "item_reference", "id": "a"}]}, "item_reference"),
        ("v1/responses", {"input": [{"type": "message", "role": "elf"}]}, "role"),
        ("inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("inference/v1/generate", {"token_ids": [True]}, "token_ids"),
        ("inference/v1/generate", {"token_ids": [10**6]}, "vocabulary"),
        ("inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 2}}, "n=2"),
        ("tokenize", {}, "messages"),
    ],
)
def test_unanswerable_requests_are_refused_in_words(
    tokenizer: PreTrainedTokenizerBase, path: str, body: Any, said: str
):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "1<|end|>") as client:
            status, error = await post(client, path, body)
            assert status == 400 and said in error["error"]["message"] and not client.inner.log

    asyncio.run(play())


def test_a_client_with_its_own_rendering_gets_token_ids(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "12<|end|>") as client:
            _, found = await post(client, "tokenize", ASKED)
            _, counted = await post(client, "v1/messages/count_tokens", {**ASKED, "max_tokens": 1})
            ids = found["tokens"]
            assert tokenizer.decode(ids) == "<user>6*7=<|end|><assistant>"
            assert found["count"] == len(ids) == counted["input_tokens"]
            closed = {**ASKED, "add_generation_prompt": False}
            _, closed = await post(client, "tokenize", closed)
            assert tokenizer.decode(closed["tokens"]) == "<user>6*7=<|end|>"
            params = {"max_tokens": 9, "temperature": 0.5, "stop": ["34"], "stop_token_ids": [3]}
            asked = {"token_ids": ids, "sampling_params": params}
            _, first = await post(client, "inference/v1/generate", asked)
            choice = first["choices"][0]
            assert tokenizer.decode(choice["token_ids"]) == "12<|end|>"
            pairs = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
            assert pairs == [(f"token_id:{one}", -1.5) for one in choice["token_ids"]]
            longer = ids + choice["token_ids"] + ids
            both = {**ASKED, "tokens": longer, "return_token_ids": True}
            _, second = await post(client, "v1/chat/completions/tokens", both)
            assert second["prompt_token_ids"] == longer
            rollout = client.session.rollout({}, status="completed")
            assert rollout.response_ids.tolist() == longer + second["choices"][0]["token_ids"]
            assert rollout.loss_tokens == 6 and len(rollout.lengths) == 1
            assert client.inner.params[0].stop == ("34",)
            for name in ("temperature", "stop_token_ids"):
                assert client.session.counts[f"ignored/{name}"] == 1

    asyncio.run(play())


def test_a_header_or_metadata_may_name_the_session(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "1<|end|>") as client:
            other, path = client.another(), "v1/chat/completions"
            header = {"Authorization": "Bearer none", "X-Session-ID": other.key}
            assert (await post(client, path, ASKED, **header))[0] == 200
            inside = {**ASKED, "metadata": {"session": other.key}}
            assert (await post(client, path, inside, Authorization="none"))[0] == 200
            # a registered key wins over a harness's own session header
            own = {"Authorization": f"Bearer {client.session.key}", "X-Session-ID": "trace-1"}
            assert (await post(client, path, ASKED, **own))[0] == 200
            for wrong in ({"session": "x"}, {"session": None}, 3):
                body = {**ASKED, "metadata": wrong}
                assert (await post(client, path, body, Authorization="none"))[0] == 401
            assert len(other.tree.nodes) == 2 and len(client.session.tree.nodes) == 1

    asyncio.run(play())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/messages", {"messages": [ITEM], "tool_choice": "auto"}),
        ("v1/messages", {"messages": [ITEM], "tools": 1}),
        ("v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_use"}, 3]}]}),
        ("v1/messages/count_tokens", {"messages": [ITEM], "tool_choice": "auto"}),
        ("v1/chat/completions", {**ASKED, "tools": 1}),
        ("v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": 1}]}),
        ("v1/responses", {"input": [{"type": "reasoning", "content": ["text"]}]}),
        ("inference/v1/generate", {"token_ids": [1], "sampling_params": ["n"]}),
    ],
)
def test_a_body_of_another_form_is_refused(
    tokenizer: PreTrainedTokenizerBase, path: str, body: Any
):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "1<|end|>") as client:
            status, error = await post(client, path, body)
            assert status == 400 and error["error"]["type"] == "invalid_request_error"

    asyncio.run(play())
