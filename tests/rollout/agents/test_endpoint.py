"""The endpoint as clients see it: keys, errors, streams, retries and heartbeats."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import CALL_BEGIN, CALL_END, tool_tokenizer
from megatron_stare.config import AgentsConfig
from megatron_stare.rollout.agents.endpoint import Endpoint
from megatron_stare.rollout.agents.messages import Renderer
from megatron_stare.rollout.agents.session import AgentSession
from megatron_stare.rollout.engine import Limits
from megatron_stare.rollout.tools.calls import FORMATS
from tests.rollout.agents.scripted import PARAMS, Scripted, request

CALL = f"<tool_call>{CALL_BEGIN}6*7{CALL_END}</tool_call><|end|>"
ASKED = {"messages": [{"role": "user", "content": "6*7="}]}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tool_tokenizer()


class Client:
    """An endpoint with one session on a scripted model, and a client of it."""

    def __init__(self, tokenizer: Any, answer: Any, **settings: Any) -> None:
        self.inner = Scripted(tokenizer, answer)
        self.tokenizer, self.settings = tokenizer, AgentsConfig(**settings)

    async def __aenter__(self) -> Client:
        self.endpoint = Endpoint(0.05, 256)
        await self.endpoint.start("127.0.0.1", 0)
        self.session = self.another()
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        await self.endpoint.close()

    def another(self, context: int = 256) -> AgentSession:
        renderer = Renderer(self.tokenizer, FORMATS["hermes"])
        own = request(self.tokenizer)
        session = AgentSession(self.inner, renderer, self.settings, own, PARAMS, context)  # type: ignore[arg-type]
        self.endpoint.open(session)
        return session

    def asked(self, body: Any) -> Any:
        """A request of the session, whose answer is still to be read."""
        url = f"{self.endpoint.url}/v1/chat/completions"
        return self.http.post(
            url, json=body, headers={"Authorization": f"Bearer {self.session.key}"}
        )

    async def post(
        self, body: Any, key: str | None = None, path: str = "/v1", **headers: str
    ) -> tuple[int, Any]:
        key = self.session.key if key is None else key
        headers = {"Authorization": f"Bearer {key}"} | headers
        url = f"{self.endpoint.url}{path}/chat/completions"
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        async with self.http.post(url, data=data, headers=headers) as answer:
            text = await answer.text()
            assert answer.status != 429
            if answer.status >= 400:
                assert answer.headers["x-should-retry"] == "false"
            return answer.status, text if body_streams(body) else json.loads(text)


def body_streams(body: Any) -> bool:
    return isinstance(body, dict) and bool(body.get("stream"))


def events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def joined(text: str) -> dict[str, Any]:
    """The message of a stream, as clients put it together."""
    message: dict[str, Any] = {"content": ""}
    for event in events(text):
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] = message.get("reasoning_content", "") + (
                delta.get("reasoning_content") or ""
            )
            message.setdefault("tool_calls", []).extend(delta.get("tool_calls") or ())
    return message


@pytest.mark.parametrize("turn", [CALL, "<think>hm</think>\n\n12<|end|>", "12<|end|>"])
def test_chunks_joined_are_the_json_answer(tokenizer: PreTrainedTokenizerBase, turn: str):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: turn) as client:
            body = {**ASKED, "tools": [TOOL]}
            _, whole = await client.post(body)
            _, text = await client.post({**body, "stream": True})
            message, stream = whole["choices"][0]["message"], joined(text)
            assert stream["content"] == (message["content"] or "")
            assert stream["reasoning_content"] == message.get("reasoning_content", "")
            made = [call["function"] for call in stream["tool_calls"]]
            assert made == [call["function"] for call in message.get("tool_calls", [])]
            assert text.endswith("data: [DONE]\n\n")
            assert all(event["choices"] for event in events(text)), "clients read choices[0]"
            options = {"stream": True, "stream_options": {"include_usage": True}}
            _, text = await client.post({**body, **options})
            last = list(events(text))[-1]
            assert (last["choices"], last["usage"]) == ([], whole["usage"])
            more = {"logprobs": True, "return_token_ids": True}
            _, text = await client.post({**body, **more, "stream": True})
            first, *_, ended = events(text)
            node, (choice,) = client.session.tree.nodes[-1], ended["choices"]
            assert first["prompt_token_ids"] == node.prompt_ids.tolist()
            assert choice["token_ids"] == node.sampled.response_ids.tolist()
            found = [one["logprob"] for one in choice["logprobs"]["content"]]
            assert found == node.sampled.logprobs.tolist()
            assert len(client.session.tree.nodes) == 4, "other bodies are other calls"

    asyncio.run(play())


def test_requests_need_the_key_of_a_running_session(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "12<|end|>") as client:
            other = client.another()
            for key in ("", "sk-unknown", client.session.key[:-1]):
                assert (await client.post(ASKED, key))[0] == 401
            client.session.end()
            client.endpoint.forget(client.session)
            status, body = await client.post(ASKED)
            assert status == 409 and body["error"]["code"] == "session_ended"
            assert not client.inner.log, "nothing is sampled"
            for way in (
                {"key": other.key},
                {"key": "any", "x-api-key": other.key},
                {"key": "any", "path": f"/s/{other.key}/v1"},
            ):
                assert (await client.post(ASKED, **way))[0] == 200  # type: ignore[arg-type]
            assert len(other.tree.nodes) == 3 and not client.session.tree.nodes
            assert client.endpoint.counts == {"unknown_keys": 3, "late_calls": 1}

    asyncio.run(play())


def test_ten_thousand_unknown_keys_sample_nothing(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "12<|end|>") as client:
            for first in range(0, 10_000, 100):
                keys = (f"sk-{first + number}" for number in range(100))
                found = await asyncio.gather(*(client.post(ASKED, key) for key in keys))
                assert {status for status, _ in found} == {401}
            assert client.endpoint.counts == {"unknown_keys": 10_000} and not client.inner.log
            assert (await client.post(ASKED))[0] == 200

    asyncio.run(play())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("no json", "not JSON"),
        (b'{"messages": "\xff"}', "not UTF-8"),
        (json.dumps(ASKED).encode("utf-16"), "not UTF-8"),
        ("[1]", "JSON object"),
        ({}, "messages"),
        ({**ASKED, "n": 2}, "n=2"),
        ({**ASKED, "max_tokens": 0}, "max_tokens=0"),
        ({**ASKED, "stop": [1]}, "stop"),
        ({**ASKED, "tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "1" * 300}]}, "maximum context length is 256"),
    ],
)
def test_unanswerable_requests_are_refused_in_words(
    tokenizer: PreTrainedTokenizerBase, body: Any, said: str
):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "12<|end|>") as client:
            status, answer = await client.post(body)
            assert status == 400 and said in answer["error"]["message"]
            assert not client.inner.log

    asyncio.run(play())


def test_a_clients_sampling_has_no_effect_and_its_limits_have(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "12345<|end|>") as client:
            template = {"chat_template_kwargs": {"enable_thinking": False}}
            _, cut = await client.post({**ASKED, **template, "max_tokens": 2, "temperature": 0.1})
            assert cut["choices"][0]["finish_reason"] == "length"
            assert cut["choices"][0]["message"]["content"] == "12"
            _, stopped = await client.post({**ASKED, "stop": "34", "logprobs": True})
            assert stopped["choices"][0]["message"]["content"] == "12"
            values = [one["logprob"] for one in stopped["choices"][0]["logprobs"]["content"]]
            assert values == [-2.5] * 6, "the tokens of a stop text stay in the sequence"
            for name in ("temperature", "chat_template_kwargs"):
                assert client.session.counts[f"ignored/{name}"] == 1
            client.session.params = dataclasses.replace(PARAMS, stop=("2",))  # rollout.stop
            _, ended = await client.post({**ASKED, "stop": "34", "user": "another"})
            assert ended["choices"][0]["message"]["content"] == "1"

    asyncio.run(play())


def test_a_retry_gets_the_same_answer_and_equal_requests_two(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda text, number: f"{number}<|end|>") as client:
            _, first = await client.post(ASKED)
            _, again = await client.post(ASKED, **{"x-stainless-retry-count": "1"})
            assert again == first and len(client.inner.log) == 1
            _, other = await client.post(ASKED)
            assert other != first, "best of two"
            assert len({one.seed for one in client.inner.requests}) == 2
            assert client.session.counts["replayed"] == 1

    asyncio.run(play())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_and_asks_again_gets_the_answer_once(
    tokenizer: PreTrainedTokenizerBase, stream: bool
):
    """Without a retry count: an agent's own code asks again after a connection was lost."""

    async def play() -> None:
        async with Client(tokenizer, lambda text, number: f"{number}<|end|>") as client:
            client.inner.held = True
            body = {**ASKED, "stream": stream}
            gone = asyncio.create_task(client.post(body))
            while not client.inner.waiting:
                await asyncio.sleep(0.01)
            (delivery,) = client.session._deliveries[json_key(body)]
            gone.cancel()
            await asyncio.wait({gone})
            while delivery.alive():
                await asyncio.sleep(0.01)
            again = asyncio.create_task(client.post(body))
            while not client.session.counts["replayed"]:
                await asyncio.sleep(0.01)
            client.inner.held = False
            client.inner.release()
            status, _ = await again
            assert status == 200 and len(client.inner.log) == 1
            rollout = client.session.rollout({}, status="completed")
            assert rollout.loss_tokens == 2 and rollout.episode["undelivered_tokens"] == 0

    asyncio.run(play())


def json_key(body: dict[str, Any]) -> str:
    from megatron_stare.system import digest

    return digest(json.dumps(body))


def test_an_answer_that_never_arrived_is_not_trained(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda text, number: f"{number}<|end|>") as client:
            await client.post(ASKED)
            client.inner.held = True
            gone = asyncio.create_task(client.post({**ASKED, "max_tokens": 9}))
            while not client.inner.waiting:
                await asyncio.sleep(0.01)
            gone.cancel()
            await asyncio.wait({gone})
            (delivery,) = client.session._deliveries[json_key({**ASKED, "max_tokens": 9})]
            while delivery.alive():
                await asyncio.sleep(0.01)
            client.inner.release()
            while len(client.session.tree.nodes) < 2:
                await asyncio.sleep(0.01)
            rollout = client.session.rollout({}, status="completed")
            assert rollout.loss_tokens == 2 and len(rollout.lengths) == 1
            assert rollout.episode["undelivered_tokens"] == 2

    asyncio.run(play())


@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_answer_sends_heartbeats(tokenizer: PreTrainedTokenizerBase, stream: bool):
    """A client whose read time-out is shorter than the answer takes waits for it."""

    async def play() -> None:
        async with Client(tokenizer, lambda *_: "12<|end|>") as client:
            client.inner.held = True
            async with client.asked({**ASKED, "stream": stream}) as answer:
                beat = await answer.content.readany()
                beat += await answer.content.readany()
                assert beat.strip(b" ") == b"" if not stream else beat.startswith(b": waiting\n\n")
                client.inner.release()
                rest = (await answer.read()).decode()
            content = joined(rest) if stream else json.loads(rest)["choices"][0]["message"]
            assert content["content"] == "12" and len(client.session.tree.nodes) == 1

    asyncio.run(play())


def test_an_episode_that_ends_after_its_client_left_is_no_error_of_the_server(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
):
    """The client's process was killed during a heartbeat, and so the episode is over."""

    async def play() -> None:
        async with Client(tokenizer, lambda *_: "12<|end|>") as client:
            client.inner.held = True
            async with client.asked(ASKED) as answer:
                await answer.content.readany()
                ((delivery,),) = client.session._deliveries.values()
                answer.close()
                while delivery.alive():
                    await asyncio.sleep(0)
                client.session.end()
                client.inner.abort()
            await asyncio.wait({delivery.answer})
            await asyncio.sleep(0.2)

    asyncio.run(play())
    assert not caplog.records


def test_clients_that_are_killed_leave_no_error_in_the_log(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
):
    """One while its request arrives, another one while it waits; then the episode ends."""

    async def play() -> None:
        async with Client(tokenizer, lambda *_: "12<|end|>") as client:
            client.inner.held = True
            port = int(client.endpoint.url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            writer.write(head.encode())
            await writer.drain()
            async with client.asked(ASKED) as answer:
                await answer.content.readany()
                answer.close()
            writer.close()
            while client.endpoint.counts["lost_connections"] < 2:
                await asyncio.sleep(0.01)
            client.session.end()
            client.inner.abort()
            await asyncio.sleep(0.2)

    asyncio.run(play())
    gc.collect()
    assert not caplog.records


def test_parallel_calls_do_not_depend_on_the_order_of_their_arrival(
    tokenizer: PreTrainedTokenizerBase,
):
    def bodies() -> list[dict[str, Any]]:
        return [{"messages": [{"role": "user", "content": f"{n}+1="}]} for n in range(4)]

    async def seeds(order: list[int]) -> dict[str, Any]:
        async with Client(tokenizer, lambda *_: "12<|end|>") as client:
            every = bodies()
            await asyncio.gather(*(client.post(every[number]) for number in order))
            return {
                tokenizer.decode(one.prompt_ids.tolist()): one.seed for one in client.inner.requests
            }

    assert asyncio.run(seeds([0, 1, 2, 3])) == asyncio.run(seeds([3, 1, 0, 2]))


def test_a_call_asks_for_no_more_tokens_than_the_servers_hold(tokenizer: PreTrainedTokenizerBase):
    """Fewer than the model's context has, where a server's cache has little memory."""

    async def play() -> None:
        async with Client(tokenizer, lambda *_: "1234567<|end|>") as client:
            await client.post(ASKED)
            prompt = len(client.inner.log[0][0])
            client.inner.limits = Limits(257, prompt + 5, prompt + 5)
            _, answer = await client.post(ASKED)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert len(client.inner.log[1][1]) == 5
            client.inner.limits = Limits(257, prompt, prompt)
            status, refused = await client.post(ASKED)
            assert status == 400 and f"length is {prompt} tokens" in refused["error"]["message"]

    asyncio.run(play())


def test_a_long_episode_holds_its_history_once(tokenizer: PreTrainedTokenizerBase):
    """Its calls come with it; hundreds of episodes run at the same time."""
    turns, letters = 16, 4000

    async def play() -> int:
        async with Client(tokenizer, lambda *_: CALL) as client:
            key = client.another(1 << 20).key
            messages = list(ASKED["messages"])
            gc.collect()
            tracemalloc.start()
            before, _ = tracemalloc.get_traced_memory()
            for turn in range(turns):
                body = {"messages": messages, "tools": [TOOL], "temperature": 1.0}
                _, answer = await client.post(body, key)
                messages.append(answer["choices"][0]["message"])
                text = str(turn % 10) * letters
                client.inner.log.clear()
                client.inner.requests.clear()
                call = messages[-1]["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": call, "content": text})
            del messages, body, answer, text
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            assert len(client.endpoint.sessions[key].tree.nodes) == turns
            return after - before

    try:
        held = asyncio.run(play())
    finally:
        tracemalloc.stop()
    prompts = 4 * sum(letters * turn for turn in range(turns))  # int32; a letter is a token
    assert held < 1.5 * prompts, held


def test_without_tools_a_call_is_text_that_the_agent_reads_itself(
    tokenizer: PreTrainedTokenizerBase,
):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: CALL) as client:
            _, plain = await client.post(ASKED)
            message = plain["choices"][0]["message"]
            assert message == {"role": "assistant", "content": CALL.removesuffix("<|end|>")}
            _, offered = await client.post({**ASKED, "tools": [TOOL]})
            (call,) = offered["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"expression": "6*7"}

    asyncio.run(play())


@pytest.mark.parametrize(("most", "status"), [(1, 400), (2, 200)])
def test_a_rewrite_beyond_the_limit_of_sequences_is_refused(
    tokenizer: PreTrainedTokenizerBase, most: int, status: int
):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "1<|end|>", max_sequences=most) as client:
            await client.post(ASKED)
            other = {"messages": [{"role": "user", "content": "other"}]}
            assert (await client.post(other))[0] == status

    asyncio.run(play())


def test_sequences_that_begin_at_the_same_time_count_too(tokenizer: PreTrainedTokenizerBase):
    async def play() -> None:
        async with Client(tokenizer, lambda *_: "1<|end|>", max_sequences=2) as client:
            client.inner.held = True
            roots = [{"messages": [{"role": "user", "content": text}]} for text in "abc"]
            asked = [asyncio.create_task(client.post(root)) for root in roots]
            await asyncio.wait(asked, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            client.inner.release()
            statuses = sorted([(await one)[0] for one in asked])
            assert statuses == [200, 200, 400]
            assert client.session.ended == "agents.max_sequences"

    asyncio.run(play())
