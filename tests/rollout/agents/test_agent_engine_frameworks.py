"""Unmodified agents of well-known frameworks: their sequences, and what was tolerated."""

from __future__ import annotations

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


def played(tokenizer: Any, answer: Any, function: str, context_length: int = 100_000):
    inner = Scripted(tokenizer, answer)
    settings = AgentsConfig(hosts=1, function=function, python=PYTHON)
    engine = AgentEngine(inner, tokenizer, settings, context_length)  # type: ignore[arg-type]
    try:
        (future,) = engine.submit([request(tokenizer)], SamplingParams(1.0, 1.0, 1000))
        return future.result(timeout=120), inner
    finally:
        engine.close()


def thinks(text: str, number: int) -> str:
    if "<tool>" in text:
        return "<think>good</think>\n\n\\boxed{42}<|end|>"
    return "<think>hm</think>\n\n" + CALL.format("calculator", "expression", "6*7")


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
    rollout, inner = played(tokenizer, thinks, f"tests.rollout.agents.frameworks.{framework}")
    assert rollout.outcome == 1.0 and len(inner.log) == 2
    assert len(rollout.lengths) == 1
    check_against_log(rollout, inner)
    found = {name.partition("/")[2] for name in rollout.episode if name.startswith("tolerated/")}
    assert kinds <= found <= kinds | {"null", "keys", "reasoning"}


def test_an_agent_that_rewrites_every_turn_has_a_sequence_for_each(
    tokenizer: PreTrainedTokenizerBase,
):
    def acts(text: str, number: int) -> str:
        if number == 1:
            return CALL.format("final_answer", "answer", "42")
        return CALL.format("calculator", "expression", "6*7")

    rollout, inner = played(tokenizer, acts, "tests.rollout.agents.frameworks.smolagents")
    assert rollout.outcome == 1.0 and len(inner.log) == 2 == len(rollout.lengths)
    check_against_log(rollout, inner)


def test_the_examples_agent_uses_its_tool(tokenizer: PreTrainedTokenizerBase):
    rollout, inner = played(tokenizer, thinks, "examples.openai_agent.run")
    assert rollout.outcome == 1.0 and len(rollout.lengths) == 1
    assert rollout.episode["agent/turns"] == 2 and not rollout.episode.get("malformed_calls")
    check_against_log(rollout, inner)


def test_the_official_clients_answers_are_the_engines(tokenizer: PreTrainedTokenizerBase):
    def twice(text: str, number: int) -> str:
        call = CALL.format("calculator", "expression", "6*7").removesuffix("<|end|>")
        return f"so: {call}{call}<|end|>"

    function = "tests.rollout.agents.frameworks.openai_clients"
    rollout, inner = played(tokenizer, twice, function)
    assert rollout.outcome == 1.0 and len(inner.log) == 4 == len(rollout.lengths)
    check_against_log(rollout, inner)
