"""The trainer's own environments as agents: the token ids are those of the trainer's own loop."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_stare.compare.worlds.calculator import tool_tokenizer
from megatron_stare.config import AgentsConfig, SandboxConfig
from megatron_stare.records import Rollout
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from megatron_stare.rollout.engine import SamplingParams
from megatron_stare.rollout.sandbox.fusion import open_sandbox
from megatron_stare.rollout.tools.builtin import CalculatorEnvironment, python_environments
from tests.rollout.agents.scripted import Scripted, request
from tests.rollout.tools.scripted import CALL, PARAMS, played

PYTHON = '<tool_call>{"name": "python", "arguments": {"code": "%s"}}</tool_call>'
END, ANSWER = "<|end|>", "\\boxed{42}<|end|>"


@pytest.mark.parametrize(
    ("environment", "turns"),
    [
        ("calculator", [CALL, ANSWER]),
        ("calculator", [CALL.replace("6*7", "6*"), CALL, ANSWER]),
        ("python", [PYTHON % "print(6*7)" + PYTHON % "6*7" + END, ANSWER]),
        ("python", [PYTHON % "1/0" + END, PYTHON % "42" + END, ANSWER]),
    ],
)
def test_the_endpoints_sequence_equals_that_of_the_trainers_loop(
    environment: str, turns: list[str]
):
    tokenizer = tool_tokenizer()
    own = loop_of_the_trainer(environment, tokenizer, turns)
    rollout = loop_of_the_agent(environment, tokenizer, turns)
    prompt = tokenizer.encode("<user>6*7=<|end|><assistant>")
    assert rollout.response_ids.tolist() == prompt + own.response_ids.tolist()
    assert rollout.loss_mask.tolist() == [0] * len(prompt) + own.loss_mask.tolist()
    assert rollout.outcome is None and rollout.text == "\\boxed{42}", "a verifier judges it"


@pytest.mark.parametrize("arguments", ["[1]", '"6*7"'])
def test_arguments_that_are_no_object_are_an_error_that_the_model_reads(arguments: str):
    turn = f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>{END}'
    tokenizer = tool_tokenizer()
    rollout = loop_of_the_agent("calculator", tokenizer, [turn, ANSWER])
    assert "errors" not in rollout.episode and rollout.text == "\\boxed{42}"
    assert "<tool>Error: the arguments are no JSON" in tokenizer.decode(rollout.response_ids)


def loop_of_the_agent(environment: str, tokenizer: Any, turns: list[str]) -> Rollout:
    inner = Scripted(tokenizer, lambda text, number: turns[number])
    function = f"examples.agents.tool_environment.{environment}"
    engine = AgentEngine(inner, tokenizer, AgentsConfig(hosts=1, function=function), 4096)  # type: ignore[arg-type]
    try:
        (future,) = engine.submit([request(tokenizer)], PARAMS)
        return future.result(timeout=120)
    finally:
        engine.close()


def loop_of_the_trainer(environment: str, tokenizer: Any, turns: list[str]) -> Rollout:
    params = SamplingParams(1.0, 1.0, 2000)
    if environment == "calculator":
        return played(tokenizer, turns, params, make=CalculatorEnvironment)[0]
    sandbox = open_sandbox(SandboxConfig(max_concurrency=2, warm_workers=1))
    try:
        return played(tokenizer, turns, params, make=python_environments(sandbox))[0]
    finally:
        sandbox.close()
