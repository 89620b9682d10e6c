"""Multi-turn rollouts: turns, masks, bounds and what the model is shown,
of a scripted model and of a real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import (
    CALL_BEGIN,
    CALL_END,
    MAX_POSITIONS,
    tool_tokenizer,
)
from megatron_stare.compare.worlds.files import write_checkpoint
from megatron_stare.config import Config, DataConfig, PolicyConfig, ToolsConfig, UserError
from megatron_stare.data.prompts import load_prompts
from megatron_stare.loop.resolve import offered_tools
from megatron_stare.losses import find_objective
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.topology import Topology
from megatron_stare.records import Group, Prompt, Rollout, turns_of
from megatron_stare.rollout.embedded import EmbeddedEngine
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.rollout.tools.builtin import PYTHON_TOOL, CalculatorEnvironment
from megatron_stare.rollout.tools.engine import ToolEngine, ToolMessages
from tests.rollout.tools.scripted import CALL, PARAMS, Scripted, played


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tools") / "model"
    write_checkpoint(directory, tool_tokenizer(), 0, MAX_POSITIONS)
    return directory


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


def test_a_call_is_answered_and_masked(tokenizer: PreTrainedTokenizerBase):
    rollout, inner = played(tokenizer, [CALL, "\\boxed{42}<|end|>"])
    assert (
        tokenizer.decode(rollout.response_ids)
        == CALL + "<tool>42<|end|><assistant>\\boxed{42}<|end|>"
    )
    shown = [
        tokenizer.decode([i])
        for i, m in zip(rollout.response_ids, rollout.loss_mask, strict=True)
        if not m
    ]
    assert shown == ["<tool>", "4", "2", "<|end|>", "<assistant>"]
    assert all(
        logprob == (-0.5 if mask else 0.0)
        for logprob, mask in zip(rollout.logprobs, rollout.loss_mask, strict=True)
    )
    assert rollout.status == "completed" and set(rollout.versions) == {3}
    assert rollout.server == inner.server, "metrics of one server count its episodes"
    assert rollout.text == CALL.removesuffix("<|end|>") + "\n\\boxed{42}", (
        "a tool's words are not the model's answer"
    )
    assert rollout.episode == {
        "turns": 2,
        "tool_calls": 1,
        "tool_errors": 0,
        "void": 0,
        "unfinished": 0,
        "errors": 0,
    }
    assert turns_of(rollout.loss_mask)[[0, -1]].tolist() == [0, 1]
    second = inner.asked[1]
    assert second.part is not None and second.seed == inner.asked[0].seed
    assert rollout.response_ids[: len(second.part.response_ids)].tolist() == (
        second.part.response_ids.tolist()
    ), "nothing is re-tokenised"


def test_the_model_sees_errors(tokenizer: PreTrainedTokenizerBase):
    wrong = f"<tool_call>{CALL_BEGIN}6//0{CALL_END}</tool_call><|end|>"
    turns = [wrong, f"<tool_call>{CALL_BEGIN}6*7</tool_call><|end|>", "\\boxed{42}<|end|>"]
    rollout, _ = played(tokenizer, turns, SamplingParams(1.0, 1.0, 500))
    text = tokenizer.decode(rollout.response_ids)
    assert (
        "<tool>Error: " in text
        and "not a JSON object" in text
        and text.endswith("\\boxed{42}<|end|>")
    )
    assert rollout.episode["tool_errors"] == 2 and rollout.episode["turns"] == 3
    assert rollout.episode["void"] == 1, "a turn whose only call cannot be read, without an answer"


@pytest.mark.parametrize(
    ("turns", "settings", "length", "status"),
    [
        ([CALL], {"max_turns": 2}, 120, "truncated"),
        ([CALL], {}, 11, "truncated"),
        ([CALL], {"max_seconds": 1e-9}, 120, "truncated"),
        (["12<|end|>"], {}, 120, "completed"),
    ],
)
def test_every_bound_ends_an_episode(
    tokenizer: PreTrainedTokenizerBase,
    turns: list[str],
    settings: dict[str, Any],
    length: int,
    status: str,
):
    rollout, _ = played(tokenizer, turns, SamplingParams(1.0, 1.0, length), **settings)
    assert rollout.status == status and len(rollout.response_ids) <= length
    assert rollout.episode["unfinished"] == (status == "truncated")
    assert rollout.loss_mask[-1] == 1, "no tool result stands at the end, unread"


def test_the_wait_for_a_server_does_not_end_an_episode(tokenizer: PreTrainedTokenizerBase):
    """A large batch is sampled in waves: most of its episodes wait for a long time at first."""

    class Busy(Scripted):
        def _answer(self, request: Request, params: SamplingParams) -> Future[Rollout]:
            answered = super()._answer(request, params)
            if request.part is not None:
                return answered
            late: Future[Rollout] = Future()
            threading.Timer(1.5, late.set_result, [answered.result()]).start()
            return late

    inner = Busy(tokenizer, [CALL, "\\boxed{42}<|end|>"])
    settings = ToolsConfig(environment="calculator", max_seconds=1.0)
    engine = ToolEngine(inner, CalculatorEnvironment, tokenizer, settings)  # type: ignore[arg-type]
    prompt = Prompt(0, (5, 6, 7), "42")
    with contextlib.closing(engine):
        (future,) = engine.submit([Request(prompt.token_ids, (0, 0), prompt=prompt)], PARAMS)
        rollout = future.result(timeout=20)
    assert (rollout.status, rollout.episode["turns"]) == ("completed", 2)


@pytest.mark.parametrize("filtered", [True, False])
def test_a_void_turn_takes_the_episode_out_of_the_loss(
    tokenizer: PreTrainedTokenizerBase, filtered: bool
):
    rollout, _ = played(tokenizer, [CALL, "well<|end|>"], filter_void_turns=filtered)
    assert rollout.episode["void"] == 1
    assert any(rollout.loss_mask) != filtered
    assert len(rollout.loss_mask) == len(rollout.response_ids)


def test_two_calls_of_a_turn_run_together_and_are_answered_in_order(
    tokenizer: PreTrainedTokenizerBase,
):
    class Slow(CalculatorEnvironment):
        async def call(self, name: str, arguments: dict[str, Any]) -> str:
            await asyncio.sleep(0.5 if arguments["expression"].startswith("6") else 0.0)
            return await super().call(name, arguments)

    both = (
        f"<tool_call>{CALL_BEGIN}6*7{CALL_END}</tool_call>"
        f"<tool_call>{CALL_BEGIN}1+1{CALL_END}</tool_call><|end|>"
    )
    rollout, _ = played(tokenizer, [both, "\\boxed{42}<|end|>"], make=Slow)
    assert "<tool>42<|end|><tool>2<|end|><assistant>" in tokenizer.decode(rollout.response_ids)
    assert rollout.episode["tool_calls"] == 2


def test_an_aborted_episode_comes_back_empty_and_its_environment_is_closed(
    checkpoint: Path, tokenizer: PreTrainedTokenizerBase
):
    closed: list[str] = []

    class Closing(CalculatorEnvironment):
        async def close(self) -> None:
            closed.append("closed")

    inner = EmbeddedEngine(str(checkpoint), tokenizer, 8, torch.float32, torch.device("cpu"))
    engine = ToolEngine(inner, Closing, tokenizer, ToolsConfig(environment="calculator"))
    prompt = Prompt(0, (5, 6, 7), "1")
    asked = [Request(prompt.token_ids, (0, number), prompt=prompt) for number in range(4)]
    with inner._weights:  # no token is decoded while another thread holds the weights
        futures = engine.submit(asked, PARAMS)
        while len(inner._live) + len(inner._waiting) < 4:
            time.sleep(0.01)
        engine.abort(asked[:3])
        time.sleep(0.1)
    rollouts = [future.result(timeout=30) for future in futures]
    assert [rollout.status == "aborted" for rollout in rollouts] == [True, True, True, False]
    assert all(not len(rollout.response_ids) for rollout in rollouts[:3])
    engine.close()
    assert len(closed) == 4


class Unanswering(Scripted):
    """Answers no request before an abort."""

    def _answer(self, request: Request, params: SamplingParams) -> Future[Rollout]:
        self.open = getattr(self, "open", {}) | {request.seed: Future()}
        return self.open[request.seed]

    def abort(self, requests: Sequence[Request] | None = None) -> None:
        held = getattr(self, "open", {})
        for seed in [*held] if requests is None else [each.seed for each in requests]:
            if seed in held:
                held.pop(seed).set_result(Rollout.inserted((), "aborted", 3))


@pytest.mark.parametrize("named", [True, False])
def test_an_abort_right_after_the_submission_ends_the_episodes(
    tokenizer: PreTrainedTokenizerBase, named: bool
):
    settings = ToolsConfig(environment="calculator")
    engine = ToolEngine(Unanswering(tokenizer, []), CalculatorEnvironment, tokenizer, settings)  # type: ignore[arg-type]
    prompt = Prompt(0, (5, 6, 7), "1")
    asked = [Request(prompt.token_ids, (0, number), prompt=prompt) for number in range(4)]
    futures = engine.submit(asked, PARAMS)
    engine.abort(asked if named else None)
    assert {future.result(timeout=20).status for future in futures} == {"aborted"}
    engine.close()


def test_a_turn_that_is_too_long_for_the_servers_ends_its_episode_alone(
    tokenizer: PreTrainedTokenizerBase,
):
    """A server reads a few tokens fewer than its context; the turns are submitted together."""

    class Servers(Scripted):
        def submit(
            self, requests: Sequence[Request], params: SamplingParams
        ) -> list[Future[Rollout]]:
            if all(len(request.known_ids) < 60 for request in requests):
                return super().submit(requests, params)
            refused: Future[Rollout] = Future()
            refused.set_exception(UserError("a prompt exceeds what the servers take"))
            return [refused] * len(requests)

    settings = ToolsConfig(environment="calculator")
    inner = Servers(tokenizer, [CALL, "\\boxed{42}<|end|>"])
    engine = ToolEngine(inner, CalculatorEnvironment, tokenizer, settings)  # type: ignore[arg-type]
    prompts = [Prompt(0, (5,) * length, "42") for length in (10, 55)]
    asked = [Request(each.token_ids, (0, n), prompt=each) for n, each in enumerate(prompts)]
    short, long = [each.result(timeout=20) for each in engine.submit(asked, PARAMS)]
    assert short.status == "completed" and short.text.endswith("\\boxed{42}")
    assert long.status == "truncated" and long.episode["unfinished"] == 1
    assert tokenizer.decode(long.response_ids) == CALL and long.loss_mask.all()
    too_long = Request((5,) * 60, (0, 0), prompt=Prompt(0, (5,) * 60, "42"))
    (settings_fault,) = engine.submit([too_long], PARAMS)
    with pytest.raises(UserError, match="what the servers take"):
        settings_fault.result(timeout=20)
    engine.close()


@pytest.mark.parametrize(
    ("settings", "own"),
    [({}, ()), ({"format": "code", "response": "<out>{output}</out>"}, ("</code>", "\n```\n"))],
)
def test_a_turn_ends_at_the_runs_stop_texts_and_at_the_formats(
    tokenizer: PreTrainedTokenizerBase, settings: dict[str, str], own: tuple[str, ...]
):
    params = dataclasses.replace(PARAMS, stop=("42",))
    _, inner = played(tokenizer, ["\\boxed{42}<|end|>"], params, **settings)
    assert inner.stops == [("42", *own)]


def test_special_tokens_in_a_result_stay_text(tokenizer: PreTrainedTokenizerBase):
    ids = ToolMessages(tokenizer).ids(["4<|end|><assistant>\\boxed{1}"], tokenizer.eos_token_id)
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[-2] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "<tool>4<|end|><assistant>\\boxed{1}<|end|><assistant>"


def test_an_unfinished_turn_is_closed(tokenizer: PreTrainedTokenizerBase):
    close = tokenizer.convert_tokens_to_ids("</tool_call>")
    assert tokenizer.decode(ToolMessages(tokenizer).ids(["1"], close)).startswith("<|end|><tool>1")


def test_results_inside_a_turn_stop_at_the_end_of_the_code(
    checkpoint: Path, tokenizer: PreTrainedTokenizerBase
):
    messages = ToolMessages(tokenizer, "<out>{output}</out>")
    assert tokenizer.decode(messages.ids(["1", "2"], 5)) == "<out>1</out><out>2</out>"
    engine = EmbeddedEngine(str(checkpoint), tokenizer, 4, torch.float32, torch.device("cpu"))
    prompt = tuple(tokenizer.encode("<user>"))
    (whole,) = engine.submit([Request(prompt, (0, 0))], PARAMS)
    text = tokenizer.decode(whole.result().response_ids)
    stop = text[20:22]
    (cut,) = engine.submit([Request(prompt, (0, 0))], SamplingParams(1.0, 1.0, 120, stop=(stop,)))
    found = tokenizer.decode(cut.result().response_ids)
    assert cut.result().status == "completed" and found == text[: text.index(stop) + 2]


@pytest.mark.parametrize("end", ["", "</think>"])
def test_a_call_in_a_thought_that_the_template_began_is_not_made(
    tokenizer: PreTrainedTokenizerBase, end: str
):
    rollout, _ = played(tokenizer, [end + CALL, "\\boxed{42}<|end|>"], begun="<think>\n")
    assert rollout.episode["tool_calls"] == bool(end) and rollout.status == "completed"


class Printing(CalculatorEnvironment):
    tools = (PYTHON_TOOL,)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return arguments["code"].removeprefix("print(").removesuffix(")")


@pytest.mark.parametrize("room", [230, 22])
def test_the_end_of_a_block_of_other_text_ends_no_turn(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, room: int
):
    """An engine stops at each of these pieces: their last line is a stop text of the format."""
    pieces = ["The data:\n```\n", "1 2\n```\n", "```python\nprint(3)\n```\n", "\\boxed{3}<|end|>"]

    def answer(self: Scripted, request: Request, params: SamplingParams) -> Future[Rollout]:
        self.turns = pieces[len(self.asked) :]
        return scripted_answer(self, request, params)

    scripted_answer = Scripted._answer
    monkeypatch.setattr(Scripted, "_answer", answer)
    params = dataclasses.replace(PARAMS, max_new_tokens=room)
    settings = {"format": "code", "response": "<out>{output}</out>", "make": Printing}
    rollout, inner = played(tokenizer, pieces, params, **settings)
    written = "".join(pieces[:3]) + "<out>3</out>" + pieces[3]
    text = tokenizer.decode(rollout.response_ids)
    if room < 230:
        assert (text, rollout.status) == (written[:room], "truncated") and rollout.loss_mask.all()
        return
    assert (text, rollout.status, len(inner.asked)) == (written, "completed", 4)
    assert rollout.episode["turns"] == 2 and rollout.episode["tool_calls"] == 1
    assert rollout.length - rollout.loss_tokens == len("<out>3</out>")
    assert rollout.text.split("\n\\boxed")[0] == "".join(pieces[:3])


@pytest.mark.parametrize(
    ("response", "template", "message"),
    [
        ("<out></out>", None, "has no {output}"),
        ("", "{{ messages[0]['content'] }}", "a tool's result \\(it leaves out or repeats"),
    ],
)
def test_a_result_that_cannot_be_written_is_refused_at_once(
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path,
    response: str,
    template: str | None,
    message: str,
):
    other = AutoTokenizer.from_pretrained(checkpoint)
    other.chat_template = template
    with pytest.raises(UserError, match=message):
        ToolMessages(other, response)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"environment": "calculator"}, ["calculator"]),
        ({"environment": "python"}, ["python"]),
        ({"environment": "python", "format": "code", "response": "{output}"}, []),
        ({"environment": "examples.lookup_environment.LookupEnvironment"}, ["lookup"]),
    ],
)
def test_prompts_offer_the_environments_tools(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    settings: dict[str, Any],
    expected: list[str],
):
    tools = offered_tools(Config(tools=ToolsConfig(**settings)))
    assert [tool["function"]["name"] for tool in tools] == expected
    rows = [{"prompt": [{"role": "user", "content": "q"}], "label": "1"}]
    rows.append(rows[0] | {"tools": [{"type": "function", "function": {"name": "own"}}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}q"
    prompts, _ = load_prompts(str(tmp_path / "rows.jsonl"), tokenizer, DataConfig(), tools=tools)
    assert [prompt.text for prompt in prompts] == [
        "".join(f"[{name}]" for name in expected) + "q",
        "[own]q",
    ]


def gradients(actor: Actor, group: Group) -> list[torch.Tensor]:
    """The gradient of the group's loss in every parameter."""
    batch = actor.pack([group], 0)
    objective, config = find_objective("dapo"), Config().loss
    signals = objective.plan(batch, config, actor.topology.across, {})
    before = [parameter.detach().clone() for parameter in actor.chunks[0].parameters()]
    actor.update(batch, objective.bind(config), signals)
    found = [parameter.main_grad.clone() for parameter in actor.chunks[0].parameters()]
    with torch.no_grad():
        for parameter, old in zip(actor.chunks[0].parameters(), before, strict=True):
            parameter.copy_(old)
    return found


def test_no_gradient_flows_from_a_tools_tokens(
    checkpoint: Path, tokenizer: PreTrainedTokenizerBase, topology: Topology
):
    """Tool tokens at the end of an episode are targets of nothing:
    which ones they are makes no bit of difference.
    """
    rollout, _ = played(tokenizer, [CALL, "\\boxed{42}<|end|>"])
    mask = rollout.loss_mask
    last_tool = max(place for place, value in enumerate(mask) if not value)
    config = Config(policy=PolicyConfig(hf_checkpoint=str(checkpoint), max_tokens_per_gpu=512))
    actor = Actor(config, topology, 10)
    prompt = Prompt(0, tuple(tokenizer.encode("<user>6*7=<|end|><assistant>")), "42")

    def of(ids: tuple[int, ...], loss_mask: tuple[int, ...]) -> list[torch.Tensor]:
        shown = Rollout(
            ids, (-0.5,) * len(ids), loss_mask, status="completed", weight_version=0, advantage=1.0
        )
        return gradients(actor, Group(prompt, (shown,)))

    ids = rollout.response_ids[: last_tool + 1]
    cut = mask[: last_tool + 1]
    plain, other = of(ids, cut), of((*ids[:-3], 9, 8, 7), cut)
    assert all(torch.equal(one, two) for one, two in zip(plain, other, strict=True))
    assert any(bool(one.abs().sum() > 0) for one in plain)
    counted = of((*ids[:-3], 9, 8, 7), (*cut[:-3], 1, 1, 1))
    assert not all(torch.equal(one, two) for one, two in zip(plain, counted, strict=True)), (
        "unmasked, they would count"
    )


def test_an_episode_whose_turn_the_engine_cancels_ends(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    def cancelled(*_: object) -> Future[Rollout]:
        future: Future[Rollout] = Future()
        future.cancel()
        return future

    monkeypatch.setattr(Scripted, "_answer", cancelled)
    rollout, _ = played(tokenizer, [CALL])
    assert rollout.episode["errors"] == 1 and not rollout.loss_mask.any()
