"""Unmodified agents of well-known frameworks: their sequences, and what was tolerated."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import tool_tokenizer
from megatron_stare.config import AgentsConfig
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from megatron_stare.rollout.engine import SamplingParams
from tests.paths import ROOT
from tests.rollout.agents.scripted import Scripted, request
from tests.rollout.agents.test_agent_engine import check_against_log

pytestmark = pytest.mark.agents
PYTHON = str(ROOT / ".venv-agents" / "bin" / "python")
# Odd spacing, which a client that serialises again does not keep.
CALL = '<tool_call>{{"name":  "{}", "arguments": {{ "{}" :"{}"}}}}</tool_call><|end|>'


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tool_tokenizer()


PARAMS = SamplingParams(1.0, 1.0, 1000)


@contextmanager
def engine_of(inner: Scripted, function: str, **settings: Any) -> Iterator[AgentEngine]:
    """An engine of the agent tests.rollout.agents.frameworks.<function>, or of a dotted path."""
    path = function if "." in function else f"tests.rollout.agents.frameworks.{function}"
    config = AgentsConfig(hosts=1, function=path, python=PYTHON, **settings)
    engine = AgentEngine(inner, inner.tokenizer, config, 100_000)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def played(tokenizer: Any, answer: Any, function: str):
    inner = Scripted(tokenizer, answer)
    with engine_of(inner, function) as engine:
        (future,) = engine.submit([request(tokenizer)], PARAMS)
        return future.result(timeout=120), inner


def thinks(text: str, number: int) -> str:
    if "<tool>" in text:
        return "<think>good</think>\n\n\\boxed{42}<|end|>"
    return "<think>hm</think>\n\n" + CALL.format("calculator", "expression", "6*7")


def acts(text: str, number: int) -> str:
    if number == 1:
        return CALL.format("final_answer", "answer", "42")
    return CALL.format("calculator", "expression", "6*7")


def codes(text: str, number: int) -> str:
    code = "final_answer(42)" if number else "print(6 * 7)"
    return f"Thought: compute.\n<code>\n{code}\n</code><|end|>"


@pytest.mark.parametrize(
    ("framework", "kinds"),
    [
        ("openai_agents", {"reasoning"}),
        ("openai_agents_streamed", {"reasoning"}),
        ("openai_agents_responses", set()),
        ("openai_agents_responses_streamed", set()),
        ("responses_client", set()),
        ("responses_client_stored", set()),
        ("pydantic_ai", {"arguments"}),
        ("langgraph", {"reasoning"}),
        ("anthropic_client", set()),
        ("anthropic_client_streamed", set()),
    ],
)
def test_two_turns_with_a_tool_are_one_sequence(
    tokenizer: PreTrainedTokenizerBase, framework: str, kinds: set[str]
):
    rollout, inner = played(tokenizer, thinks, framework)
    assert rollout.outcome == 1.0 and len(inner.log) == 2
    assert len(rollout.lengths) == 1
    check_against_log(rollout, inner)
    found = {name.partition("/")[2] for name in rollout.episode if name.startswith("tolerated/")}
    assert kinds <= found <= kinds | {"null", "keys", "reasoning"}


def test_an_agent_that_rewrites_every_turn_has_a_sequence_for_each(
    tokenizer: PreTrainedTokenizerBase,
):
    rollout, inner = played(tokenizer, acts, "smolagents")
    assert rollout.outcome == 1.0 and len(inner.log) == 2 == len(rollout.lengths)
    check_against_log(rollout, inner)


def test_an_agent_that_writes_code_has_a_sequence_for_each_turn(
    tokenizer: PreTrainedTokenizerBase,
):
    rollout, inner = played(tokenizer, codes, "smolagents_code")
    assert rollout.outcome == 1.0 and len(inner.log) == 2 == len(rollout.lengths)
    check_against_log(rollout, inner)  # the text at which its client stops is trained too
    assert tokenizer.decode(inner.log[0][1]) in tokenizer.decode(rollout.response_ids)


def test_parallel_workers_of_langgraph_repeat_whatever_their_order(
    tokenizer: PreTrainedTokenizerBase,
):
    """Twenty episodes at the same time: each worker's call has the same seed in all of them."""
    inner = Scripted(tokenizer, lambda text, _: text[-4:-2] + "<|end|>")
    with engine_of(inner, "langgraph_send") as engine:
        asked = [request(tokenizer, number) for number in range(20)]
        futures = engine.submit(asked, PARAMS)
        rollouts = [future.result(timeout=120) for future in futures]
    for rollout in rollouts:
        assert rollout.outcome == 1.0 and len(rollout.lengths) == 3 and rollout.loss_tokens > 3
    own = len(asked[0].seed)
    seeds: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    orders: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for each in inner.requests:
        prompt = tuple(each.prompt_ids.tolist())
        seeds.setdefault(prompt, set()).add(each.seed[own:])
        orders.setdefault(each.seed[:own], []).append(prompt)
    assert len(seeds) == 3 and all(len(found) == 1 for found in seeds.values())
    assert len({tuple(order) for order in orders.values()}) > 1, "the orders differ"


@pytest.mark.parametrize(("heartbeat", "retries", "replayed"), [(0.5, 0, False), (60.0, 9, True)])
def test_a_client_with_a_short_time_limit_is_answered_once(
    tokenizer: PreTrainedTokenizerBase, heartbeat: float, retries: int, replayed: bool
):
    """The engine stands still for three of the client's time limits. With heartbeats the client
    waits; without them it asks again, and gets the one answer.
    """
    inner = Scripted(tokenizer, lambda *_: "42<|end|>")
    inner.held = True
    with engine_of(inner, "impatient_openai", heartbeat_seconds=heartbeat) as engine:
        (future,) = engine.submit([request(tokenizer, retries=retries)], PARAMS)
        while not inner.waiting:
            time.sleep(0.01)
        time.sleep(6.0)
        inner.release()
        rollout = future.result(timeout=60)
    assert rollout.outcome == 42.0 and len(inner.log) == 1 and rollout.loss_tokens == 3
    assert (rollout.episode.get("replayed", 0) > 0) is replayed


def test_the_examples_agent_uses_its_tool(tokenizer: PreTrainedTokenizerBase):
    rollout, inner = played(tokenizer, thinks, "examples.openai_agent.run")
    assert rollout.outcome == 1.0 and len(rollout.lengths) == 1
    assert rollout.episode["agent/turns"] == 2 and not rollout.episode.get("malformed_calls")
    check_against_log(rollout, inner)


def test_the_official_clients_answers_are_the_engines(tokenizer: PreTrainedTokenizerBase):
    def twice(text: str, number: int) -> str:
        call = CALL.format("calculator", "expression", "6*7").removesuffix("<|end|>")
        return f"so: {call}{call}<|end|>"

    rollout, inner = played(tokenizer, twice, "openai_clients")
    assert rollout.outcome == 1.0 and len(inner.log) == 4 == len(rollout.lengths)
    check_against_log(rollout, inner)
