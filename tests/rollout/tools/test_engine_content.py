"""Text of a model and results of an environment end no other episode: the model sees an error, or
its rollout is masked and counted. A machine at fault ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import MAX_POSITIONS, tool_tokenizer
from megatron_stare.compare.worlds.files import write_checkpoint
from megatron_stare.config import (
    Config,
    EngineError,
    PolicyConfig,
    ScoringConfig,
    ToolsConfig,
    UserError,
)
from megatron_stare.losses import find_objective
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.rollout.sandbox.interpreter import CallLost, SandboxError
from megatron_stare.rollout.tools.builtin import CalculatorEnvironment, evaluate, show
from megatron_stare.rollout.tools.calls import FORMATS, MOST_DEPTH
from megatron_stare.rollout.tools.engine import ToolEngine, ToolMessages
from megatron_stare.scoring.judge import Judge
from tests.rollout.tools.scripted import CALL, PARAMS, Scripted, played

ANSWER = "\\boxed{42}<|end|>"
LONG = SamplingParams(1.0, 1.0, 20_000)
PROMPT = Prompt(0, (5, 6, 7), "42")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tool_tokenizer()


def call_of(arguments: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call><|end|>'


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"expression": "\\ud800"}', "a text holds \\ud800, half of a surrogate pair"),
        ('{"\\udfff": 1}', "a text holds \\udfff, half of a surrogate pair"),
        ('"\\ud800"', "half of a surrogate pair"),
        (f'{{"expression": {"9" * 5000}}}', "a number of 5000 digits is too long"),
        (f'{{"expression": {"[" * 3000}{"]" * 3000}}}', "nested too deep"),
        (f'{{"expression": {"[" * MOST_DEPTH}{"]" * MOST_DEPTH}}}', "nested too deep"),
        ('{"expression": 1e999}', "1e999 is too large a number"),
        ('{"expression": "\\u0000"}', "Error: "),
        (json.dumps({"expression": "2 ** 4000 + " + "(" * 300}), "Error: "),
        (json.dumps({"expression": "1", "x" * 9000: 1}), "there is no argument 'xxxx"),
    ],
)
def test_an_unreadable_call_is_an_error_that_the_model_sees(
    tokenizer: PreTrainedTokenizerBase, arguments: str, words: str
):
    rollout, _ = played(tokenizer, [call_of(arguments), ANSWER], LONG)
    assert words in tokenizer.decode(rollout.response_ids)
    assert (rollout.status, rollout.episode["errors"]) == ("completed", 0)
    assert rollout.episode["tool_errors"] == 1 and any(rollout.loss_mask)


class Odd(CalculatorEnvironment):
    """Does what its prompt's label says."""

    def __init__(self, prompt: Prompt) -> None:
        self.label = prompt.label
        if self.label == "make":
            raise KeyError("no such row")
        if self.label == "settings":
            raise UserError("stateful=true cannot be had")
        if self.label == "tools":
            self.tools = None  # type: ignore[assignment]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        class Unspeakable(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raised: dict[str, BaseException] = {
            "exit": SystemExit(1),
            "cancelled": asyncio.CancelledError(),
            "timeout": TimeoutError("its own"),
            "unspeakable": Unspeakable(),
            "user error": UserError("x"),
            "lost": CallLost("this call only"),
            "machine": SandboxError("no interpreter could be started"),
        }
        if self.label in raised:
            raise raised[self.label]
        return {"surrogate": "a\ud800z", "pair": "\ud83d\ude00"}.get(self.label, 7)  # type: ignore

    async def close(self) -> None:
        if self.label == "close":
            raise OSError("already gone")


def episode(
    tokenizer: PreTrainedTokenizerBase, label: str, turns: list[str], **changes: Any
) -> list[Future[Rollout]]:
    """An odd episode between two others, all done."""
    inner = Scripted(tokenizer, turns)
    settings = ToolsConfig(environment="calculator", **changes)
    engine = ToolEngine(inner, Odd, tokenizer, settings)  # type: ignore[arg-type]
    ids = tuple(tokenizer.encode("<user>6*7=<|end|><assistant>"))
    try:
        labels = ["fine", label, "fine"]
        asked = [
            Request(ids, (0, number), prompt=Prompt(number, ids, name))
            for number, name in enumerate(labels)
        ]
        futures = engine.submit(asked, LONG)
        for future in futures:
            future.exception(timeout=20)
        return futures
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("exit", "calculator failed (SystemExit: 1)"),
        ("cancelled", "calculator failed (CancelledError: )"),
        ("timeout", "calculator failed (TimeoutError: its own)"),
        ("unspeakable", "calculator failed (Unspeakable: its message cannot be shown)"),
        ("user error", "calculator failed (UserError: x)"),
        ("lost", "calculator failed (CallLost: this call only)"),
        ("number", "calculator failed (TypeError: it gave int, no text)"),
        ("surrogate", "<tool>a\ufffdz<|end|>"),
        ("pair", "<tool>\U0001f600<|end|>"),
        ("close", "it gave int"),
    ],
)
def test_every_result_of_a_tool_becomes_an_answer(
    tokenizer: PreTrainedTokenizerBase, label: str, words: str
):
    for future in episode(tokenizer, label, [CALL, ANSWER]):
        assert future.result().episode["errors"] == 0
    odd = episode(tokenizer, label, [CALL, ANSWER])[1].result()
    assert words in tokenizer.decode(odd.response_ids)
    assert odd.status == "completed" and odd.text.endswith(ANSWER.removesuffix("<|end|>"))


@pytest.mark.parametrize(("label", "kind"), [("make", "KeyError"), ("tools", "TypeError")])
def test_an_unavailable_environment_costs_only_its_episode(
    tokenizer: PreTrainedTokenizerBase, label: str, kind: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        before, odd, after = (future.result() for future in episode(tokenizer, label, [ANSWER]))
    assert before.episode["errors"] == after.episode["errors"] == 0
    assert (odd.episode["errors"], len(odd.response_ids), odd.status) == (1, 0, "truncated")
    assert f"this is the first {kind}" in caplog.text


def test_an_endless_pattern_costs_only_its_episode(tokenizer: PreTrainedTokenizerBase):
    turn = "a" * 40 + "b<|end|>"
    rollout, _ = played(tokenizer, [turn], answer_pattern=r"(a|aa)+$")
    assert rollout.episode["errors"] == 1 and rollout.status == "truncated"
    assert len(rollout.response_ids) == 42 and not any(rollout.loss_mask)
    assert rollout.text == turn.removesuffix("<|end|>")


def test_an_invalid_pattern_is_refused_at_once(tokenizer: PreTrainedTokenizerBase):
    with pytest.raises(UserError, match=r"tools.answer_pattern='\(' is not a regular expression"):
        played(tokenizer, [ANSWER], answer_pattern="(")


class Failing(Scripted):
    def submit(self, requests: Any, params: SamplingParams) -> list[Future[Rollout]]:
        futures: list[Future[Rollout]] = [Future() for _ in requests]
        for future in futures:
            future.set_exception(EngineError("every server is dead"))
        return futures


def test_a_fault_of_the_machine_ends_the_run(tokenizer: PreTrainedTokenizerBase):
    with pytest.raises(SandboxError, match="no interpreter could be started"):
        episode(tokenizer, "machine", [CALL, ANSWER])[1].result()
    with pytest.raises(UserError, match="stateful=true"):
        episode(tokenizer, "settings", [ANSWER])[1].result()
    engine = ToolEngine(
        Failing(tokenizer, []),  # type: ignore[arg-type]
        CalculatorEnvironment,
        tokenizer,
        ToolsConfig(environment="calculator"),
    )
    with contextlib.closing(engine), pytest.raises(EngineError, match="every server is dead"):
        engine.submit([Request((5,), (0, 0), prompt=PROMPT)], PARAMS)[0].result(timeout=20)


def test_the_calls_of_a_turn_are_bounded(tokenizer: PreTrainedTokenizerBase):
    turn = CALL.removesuffix("<|end|>") * 1000 + "<|end|>"
    rollout, _ = played(tokenizer, [turn, ANSWER], LONG, max_calls=3)
    assert rollout.episode["tool_calls"] == 4
    assert "all 3 tool calls are used" in tokenizer.decode(rollout.response_ids)


def test_a_template_that_takes_one_result_gets_all_in_one(tokenizer: PreTrainedTokenizerBase):
    strict = tool_tokenizer()
    strict.chat_template = (
        "{% set ns = namespace(last='') %}{% for m in messages %}"
        "{% if m['role'] == 'tool' and ns.last == 'tool' %}{{ raise_exception('one') }}{% endif %}"
        "{% set ns.last = m['role'] %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
        "<assistant>"
    )
    both = CALL.removesuffix("<|end|>") * 2 + "<|end|>"
    rollout, _ = played(strict, [both, ANSWER])
    assert "<tool>42\n\n42<|end|><assistant>" in strict.decode(rollout.response_ids)
    assert rollout.episode["errors"] == 0


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("code", "<code>```python\n" + " " * 400_000 + "x</code>"),
        ("code", "<code>" + "\n" * 400_000 + "</code>"),
        ("code", ("```python\n" + " " * 1000) * 400),
        ("code", "<code>```\n" + "``` " * 100_000 + "x</code>"),
        (
            "qwen3_coder",
            f"<tool_call><function=f>{'<parameter=a>1</parameter> ' * 20_000}"
            "</function></tool_call>",
        ),
        ("qwen3_coder", "<tool_call><function=f>" + "<parameter=a>" * 40_000),
        ("hermes", "<tool_call>" * 40_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 400_000),
        ("hermes", "<think>" * 50_000 + "</think>" * 50_000),
    ],
    ids=range(9),
)
def test_reading_takes_time_in_proportion_to_the_text(form: str, text: str):
    """The bound is on processor time: a quadratic search would need hours of it."""
    began = time.process_time()
    FORMATS[form].read(text, ())
    assert time.process_time() - began < 60


_CALL = ("<tool_call>", '{"name":', '"calculator",', '"arguments":', '{"expression":', '"', '"}}')
_ODD = ("[", "]", "{", "}", "\\ud800", "\\u0000", "9**9**9", "1/0", "6*7", "NaN", "1e999", "\x00")
_MORE = ("</tool_call>", "<think>", "</think>", "<|end|>", "<tool>", "9" * 5000, "[" * 2000, " ")
WORDS = (CALL, "\\boxed{42}", "\u2028", *_CALL, *_ODD, *_MORE)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map("".join), min_size=1, max_size=3))
def test_random_turns_never_raise(turns: list[str]):
    rollout, _ = played(tool_tokenizer(), [*(turn + "<|end|>" for turn in turns), ANSWER], LONG)
    assert rollout.episode["errors"] == 0


def test_results_with_invalid_unicode_become_tokens(tokenizer: PreTrainedTokenizerBase):
    messages = ToolMessages(tokenizer, "<out>{output}</out>")
    shown = tokenizer.decode(messages.ids(["\udc80 \ud800", "\x00"], 5))
    assert shown == "<out>\ufffd \ufffd</out><out>\x00</out>"


def test_numbers_beyond_floats_are_shown_as_fractions():
    assert show(evaluate("2 ** 2000 + 1/3")).endswith("/3")
    assert "=" not in show(evaluate("2 ** 2000 + 1/3"))


def test_a_rollout_of_an_error_has_no_reward_and_no_loss_token_and_can_be_trained_on(
    tmp_path: Any, topology: Topology
):
    error = {"turns": 0.0, "errors": 1.0}
    nothing = Rollout((), (), (), status="truncated", weight_version=0, episode=error)
    masked = Rollout(
        (9, 8),
        (-0.1, -0.1),
        (0, 0),
        status="truncated",
        weight_version=0,
        text="\\boxed{42}",
        episode=error,
    )
    good = Rollout(
        (9, 8), (-0.1, -0.1), (1, 1), status="completed", weight_version=0, text="\\boxed{42}"
    )
    wrong = Rollout(
        (9, 7), (-0.1, -0.1), (1, 1), status="completed", weight_version=0, text="\\boxed{1}"
    )
    with contextlib.closing(Judge(ScoringConfig(), 10)) as judge:
        found = judge.judge([(PROMPT, one) for one in (nothing, masked, good, wrong)])
    assert [one.verdict for one in found] == [*["unverifiable"] * 2, "correct", "wrong"]
    assert [one.reward for one in found] == [None, None, 1.0, 0.0]
    write_checkpoint(tmp_path / "model", tool_tokenizer(), 0, MAX_POSITIONS)
    policy = PolicyConfig(hf_checkpoint=str(tmp_path / "model"), max_tokens_per_gpu=512)
    config = Config(policy=policy)
    actor = Actor(config, topology, 10)
    batch = actor.pack([Group(PROMPT, tuple(found))], 0)
    assert batch.advantage_T.numel() == 4
    objective = find_objective("dapo")
    signals = objective.plan(batch, config.loss, actor.topology.across, {})
    actor.update(batch, objective.bind(config.loss), signals)
