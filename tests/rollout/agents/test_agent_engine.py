"""Episodes of agents in host processes over the real endpoint, on a scripted model."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megatron_stare.compare.worlds.calculator import CALL_BEGIN, CALL_END, tool_tokenizer
from megatron_stare.config import AgentsConfig, Config, ScoringConfig, UserError, override
from megatron_stare.records import Prompt, Rollout
from megatron_stare.rollout.agents import agent_engine
from megatron_stare.rollout.agents.agent_engine import AgentEngine
from megatron_stare.rollout.engine import Request, SamplingParams
from megatron_stare.rollout.sglang.admission import prefix_of
from megatron_stare.scoring.judge import Judge
from tests.docs.metric_keys import unexplained
from tests.rollout.agents.scripted import PARAMS, Scripted, agents, request

CALL = f"<tool_call>{CALL_BEGIN}6*7{CALL_END}</tool_call><|end|>"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tool_tokenizer()


def calls_then_answers(text: str, number: int) -> str:
    return "\\boxed{42}<|end|>" if "<tool>" in text else CALL


def played(
    tokenizer: Any,
    answer: Any,
    metadata: dict[str, Any] | None = None,
    engine: type[Scripted] = Scripted,
    **settings: Any,
):
    """One episode's rollout, and the engine below. docs/metrics.md explains all that is counted."""
    inner = engine(tokenizer, answer)
    upper = agents(inner, tokenizer, **settings)
    try:
        (future,) = upper.submit([request(tokenizer, **(metadata or {}))], PARAMS)
        rollout = future.result(timeout=60)
        counted = (*upper.counts(), *(f"episode/{name}" for name in rollout.episode))
        assert not unexplained(counted)
        return rollout, inner
    finally:
        upper.close()


def judged(rollout: Rollout, reward: str = "episode") -> Rollout:
    judge = Judge(ScoringConfig(reward=reward))
    try:
        return judge.judge([(Prompt(0, [1], "42"), rollout)])[0]
    finally:
        judge.close()


def check_against_log(rollout: Rollout, inner: Scripted) -> None:
    """Every sequence is what the engine was asked with what it gave; loss tokens are what it gave,
    each once.
    """
    logged = [prompt + given for prompt, given in inner.log]
    for begin, end in rollout.stretches:
        assert rollout.response_ids[begin:end].tolist() in logged
    assert rollout.loss_tokens == sum(len(given) for _, given in inner.log)


def test_an_agents_turns_with_a_tool_are_one_sequence(tokenizer: PreTrainedTokenizerBase):
    rollout, inner = played(tokenizer, calls_then_answers, function="calculator")
    assert tokenizer.decode(rollout.response_ids) == (
        f"<user>6*7=<|end|><assistant>{CALL}<tool>42<|end|><assistant>\\boxed{{42}}<|end|>"
    )
    assert rollout.status == "completed" and rollout.lengths == (rollout.length,)
    check_against_log(rollout, inner)
    prefixes = {prefix_of(each) for each in inner.requests}
    assert len(prefixes) == 1, "the second call finds the first one's cache on its server"
    assert rollout.server == 2, "metrics of one server count its episodes"
    assert rollout.outcome == 1.0 and rollout.text == "\\boxed{42}"
    assert rollout.episode["calls"] == 2 and rollout.episode["agent/messages"] == 4
    assert set(rollout.logprobs[rollout.loss_mask].tolist()) == {-1.5, -2.5}
    for reward in ("episode", "math"):
        found = judged(rollout, reward)
        assert (found.reward, found.verdict) == (1.0, "correct") and found.loss_tokens


def test_a_compacted_history_is_a_second_sequence(tokenizer: PreTrainedTokenizerBase):
    rollout, inner = played(tokenizer, lambda *_: "12<|end|>", function="compacting")
    assert len(rollout.lengths) == 2 == rollout.episode["sequences"]
    assert tokenizer.decode(rollout.response_ids[rollout.lengths[0] :]) == (
        "<user>so far: 12<|end|><assistant>12<|end|>"
    )
    check_against_log(rollout, inner)


@pytest.mark.parametrize(
    ("function", "metadata", "cause"),
    [
        ("raises", {}, "LookupError"),
        ("no_call", {}, "no_call"),
        ("dies", {"always": True}, "host"),
        ("returns", {"returns": "text"}, "reward"),
        ("returns", {"returns": "nan"}, "reward"),
        ("returns", {"returns": 10**400}, "reward"),
        ("returns", {"returns": "object"}, "TypeError"),
    ],
)
def test_a_failure_is_unverifiable_with_its_cause(
    tokenizer: PreTrainedTokenizerBase, function: str, metadata: dict[str, Any], cause: str
):
    rollout, _ = played(tokenizer, lambda *_: "12<|end|>", metadata, function=function)
    assert rollout.episode[f"failed/{cause}"] == 1 and rollout.loss_tokens == 0
    for reward in ("episode", "math"):
        found = judged(rollout, reward)
        assert found.reward is None and found.verdict == "unverifiable"


def test_tokens_that_no_server_sampled_are_not_trained(tokenizer: PreTrainedTokenizerBase):
    class Unsound(Scripted):
        """The second answer is the pool's substitute for one with log-probs that are not finite."""

        def _one(self, request: Request, params: SamplingParams) -> Future[Rollout]:
            future = super()._one(request, params)
            if len(self.log) == 2:
                future = Future()
                end = Rollout.inserted([tokenizer.eos_token_id], "truncated", self.version)
                future.set_result(end.without_loss(verdict="unverifiable"))
            return future

    rollout, _ = played(tokenizer, calls_then_answers, engine=Unsound, function="calculator")
    assert rollout.episode["failed/invalid_answer"] == 1 == rollout.episode["calls"]
    assert rollout.loss_tokens == 0 and judged(rollout).verdict == "unverifiable"


def test_metrics_that_are_no_finite_numbers_are_left_out(tokenizer: PreTrainedTokenizerBase):
    metrics = {"turns": 2, "value": 10**400, "rate": math.inf, "name": "text"}
    returned = {"returns": {"reward": 1.0, "metrics": metrics}}
    rollout, _ = played(tokenizer, lambda *_: "12<|end|>", returned, function="returns")
    kept = {name: n for name, n in rollout.episode.items() if name.startswith("agent/")}
    assert kept == {"agent/turns": 2.0} and rollout.outcome == 1.0


def test_a_prompt_that_the_servers_cannot_take_ends_its_episode_alone(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
):
    def answer(text: str, number: int) -> str:
        if len(text) > 80:
            raise UserError("a prompt of 81 tokens exceeds the 80 that the servers take")
        return "12<|end|>"

    rollout, inner = played(tokenizer, answer, function="endless")
    assert rollout.status == "truncated" and rollout.episode["ended/context"] == 1
    check_against_log(rollout, inner)
    assert "exceeds the 80 that the servers take" in caplog.text


def test_an_agent_reaches_the_endpoint_without_the_clusters_proxy(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "elsewhere")
    monkeypatch.delenv("no_proxy", raising=False)
    rollout, _ = played(tokenizer, calls_then_answers, function="calculator")
    assert rollout.outcome == 1.0


def test_an_agent_that_returns_nothing_is_judged_by_verifiers_or_not_at_all(
    tokenizer: PreTrainedTokenizerBase,
):
    rollout, _ = played(
        tokenizer, lambda *_: "\\boxed{42}<|end|>", {"returns": None}, function="returns"
    )
    assert judged(rollout, "episode").reward is None
    assert judged(rollout, "math").reward == 1.0


def test_an_agent_may_be_an_object_whose_call_is_async(tokenizer: PreTrainedTokenizerBase):
    rollout, _ = played(tokenizer, lambda *_: "12<|end|>", {"returns": 0.5}, function="called")
    assert rollout.outcome == 0.5


def test_an_episode_whose_host_dies_starts_once_more(tokenizer: PreTrainedTokenizerBase):
    rollout, inner = played(tokenizer, lambda *_: "12<|end|>", function="dies")
    assert rollout.outcome == 1.0 and len(inner.log) == 2
    assert inner.requests[0].seed == inner.requests[1].seed, "the second try samples the same"


@pytest.mark.parametrize(
    ("limit", "settings", "calls"),
    [
        ("max_calls", {"max_calls": 2}, 2),
        ("max_tokens", {"max_tokens": 5}, 2),
        ("context", {}, 19),
    ],
)
def test_a_limit_refuses_further_calls_and_the_episode_is_truncated(
    tokenizer: PreTrainedTokenizerBase, limit: str, settings: dict[str, Any], calls: int
):
    rollout, inner = played(
        tokenizer, lambda *_: "\\boxed{42}<|end|>", function="endless", **settings
    )
    assert rollout.status == "truncated" and rollout.episode[f"ended/{limit}"] == 1
    assert rollout.episode["calls"] == len(inner.log) and len(rollout.lengths) == 1
    check_against_log(rollout, inner)
    assert judged(rollout, "episode").reward is None, "a missing reward is not 0"
    assert judged(rollout, "math").reward == 1.0


@pytest.mark.parametrize("function", ["hangs", "deaf"])
def test_an_agent_that_hangs_is_stopped(tokenizer: PreTrainedTokenizerBase, function: str):
    rollout, _ = played(tokenizer, lambda *_: "12<|end|>", function=function, max_seconds=4.0)
    assert rollout.status == "truncated" and rollout.episode["ended/max_seconds"] == 1
    assert rollout.loss_tokens == 3


def test_an_agent_at_work_is_no_hang_and_a_call_without_an_answer_is(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    class Waiting(Scripted):
        def wait(self, futures: Any) -> None:
            for future in futures:
                future.result()

    monkeypatch.setattr(agent_engine, "WORK_SECONDS", 0.01)
    inner, moves = Waiting(tokenizer, lambda *_: "12<|end|>"), []
    inner.held = True
    engine = agents(inner, tokenizer, function="hangs", max_seconds=600.0)
    engine.moved = lambda: moves.append(1)
    try:
        (future,) = engine.submit([request(tokenizer)], PARAMS)
        while not inner.waiting:
            time.sleep(0.01)
        waiting = threading.Thread(target=engine.wait, args=([future],))
        waiting.start()
        time.sleep(0.3)
        assert not moves, "the call waits for the engine"
        inner.release()
        while not moves:
            time.sleep(0.01)
        engine.abort()
        waiting.join()
        time.sleep(0.05)  # a look that has begun
        moves.clear()
        (future,) = engine.submit([request(tokenizer)], PARAMS)
        time.sleep(0.3)
        assert not moves, "no caller waits"
    finally:
        engine.close()


def test_an_abort_right_after_the_submission_ends_the_episodes(
    tokenizer: PreTrainedTokenizerBase,
):
    inner = Scripted(tokenizer, lambda *_: "12<|end|>")
    inner.held = True
    engine = agents(inner, tokenizer, function="compacting")
    try:
        own = [request(tokenizer, number) for number in range(3)]
        futures = engine.submit(own, PARAMS)
        engine.abort(own)
        assert {future.result(timeout=60).status for future in futures} == {"aborted"}
    finally:
        engine.close()


def test_an_aborted_episode_comes_back_without_tokens(tokenizer: PreTrainedTokenizerBase):
    inner = Scripted(tokenizer, lambda *_: "12<|end|>")
    inner.held = True
    engine = agents(inner, tokenizer, function="compacting")
    try:
        own = request(tokenizer)
        (future,) = engine.submit([own], PARAMS)
        while not inner.waiting:
            pass
        engine.abort([own])
        rollout = future.result(timeout=60)
        assert rollout.status == "aborted" and not rollout.length
        inner.held = False
        (future,) = engine.submit([own], PARAMS)
        assert future.result(timeout=60).outcome == 1.0
    finally:
        engine.close()


def test_a_failing_engine_fails_the_episode(tokenizer: PreTrainedTokenizerBase):
    def fails(*_: Any) -> str:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        played(tokenizer, fails, function="calculator")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "tests.rollout.agents.programs.missing"}, "missing"),
        ({"function": "plain"}, "dotted path"),
        ({"function": "a.b", "python": "/no/python"}, "agents.python"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_refused(
    tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], message: str
):
    inner = Scripted(tokenizer, lambda *_: "")
    with pytest.raises(UserError, match=message):
        AgentEngine(inner, tokenizer, AgentsConfig(hosts=1, **settings), 256)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"agents.function": "a.b", "agents.command": "[c]"}, "set agents.function="),
        ({"agents.function": "a.b", "tools.environment": "python"}, "tools.environment"),
        ({"scoring.reward": "episode"}, "scoring.reward=episode"),
        ({"agents.function": "a.b", "policy.routing_replay": "rollout"}, "routing_replay"),
    ],
)
def test_contradicting_settings_are_refused(overrides: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        override(Config(), [f"{key}={value}" for key, value in overrides.items()])
