"""The reward `judge` on a server over HTTP that answers, fails and hangs by a script."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.collect.judging import build_judge
from megatron_stare.config import Config, JudgeConfig, ScoringConfig, UserError, override
from megatron_stare.records import Group, Prompt, Rollout
from megatron_stare.scoring import judge_client
from megatron_stare.scoring.advantages import has_signal, with_advantages
from megatron_stare.scoring.judge_client import Kept
from megatron_stare.scoring.llm_judge import LLMJudge, opponents
from megatron_stare.scoring.verdict import Sample
from tests.conftest import fill
from tests.scoring.judge_server import JudgeServer


def judged(
    server: JudgeServer, samples: list[Sample], directory: Path | None = None, **settings: Any
):
    settings = {"attempts": 2, "timeout": 60.0} | settings
    judge = LLMJudge(JudgeConfig(**settings), lambda: [server.url], directory)
    try:
        return judge.judge(samples)
    finally:
        judge.close()


def samples(*texts: str) -> list[Sample]:
    return [Sample(text, "42", {"rubric": ["a", "b"]}, "6*7?") for text in texts]


def by_name(question: str, number: int) -> Any:
    """Hangs, fails or answers as the response says."""
    said = question.partition("<response ")[2].partition("</response")[0]
    for name, found in {
        "hangs": None,
        "fails": 500,
        "refuses": 400,
        "prose": "It is quite good.",
        "cut": ('{"score": 5}', "length"),
        "no json": b"<html>",
        "no choices": b'{"choices": []}',
        "no usage": b'{"choices": [{"message": {"content": "a"}}], "usage": [1]}',
    }.items():
        if name in said:
            return found
    return '{"score": 8}'


CASES = ["hangs", "fails", "refuses", "prose", "cut", "no json", "no choices", "no usage"]
REASONS = ["TimeoutError", "500", "400", "quite good", "max_tokens", *["no chat"] * 3]


def test_a_response_without_a_judges_answer_is_unverifiable_with_the_reason(serve: Any):
    verdicts = judged(serve(by_name), samples("good", *CASES), timeout=2.0)
    assert (verdicts[0].value, verdicts[0].verdict) == (0.8, "correct")
    assert verdicts[0].reason == '{"score": 8}', "the judge's text is kept"
    for verdict, reason in zip(verdicts[1:], REASONS, strict=True):
        assert verdict.value is None and verdict.verdict == "unverifiable"
        assert reason in verdict.reason


def test_mean_and_deviation_exclude_unverifiable_responses(serve: Any, tmp_path: Path):
    """In a run's judge: one group, of which two cannot be judged."""
    server = serve(lambda q, n: by_name(q, n) if "fails" in q else f'{{"score": {n_of(q)}}}')
    settings = [f"judge.urls=[{server.url}]", "scoring.reward=judge", "judge.attempts=1"]
    config = override(Config(), [*settings, f"run.dir={tmp_path}"])
    judge = build_judge(config)
    try:
        prompt = Prompt(0, [1], "42", text="6*7?")
        texts = ["n=2", "n=8", "fails", "n=5", "fails too"]
        rollouts = [
            Rollout([1, 2], [-1.0, -1.0], [1, 1], status="completed", weight_version=0, text=text)
            for text in texts
        ]
        found = judge.judge([(prompt, rollout) for rollout in rollouts])
    finally:
        judge.close()
    assert [rollout.reward for rollout in found] == [0.2, 0.8, None, 0.5, None]
    assert [rollout.loss_tokens for rollout in found] == [2, 2, 0, 2, 0]
    assert found[0].episode["judge/calls"] == 1 and found[0].episode["judge/tokens"] == 20
    whole = [rollout for rollout in found if rollout.reward is not None]
    alone, mixed = advantages(whole), advantages(found)
    assert [mixed[0], mixed[1], mixed[3]] == alone and mixed[2] == mixed[4] == 0
    left = Group(prompt, (found[0], found[2], found[4]))
    assert has_signal(Group(prompt, tuple(found))) and not has_signal(left)


def n_of(question: str) -> int:
    return int(question.partition("n=")[2][0])


def advantages(rollouts: list[Rollout]) -> list[float]:
    (group,) = with_advantages([Group(Prompt(0, [1], "42"), tuple(rollouts))], ScoringConfig())
    return [float(rollout.advantage or 0.0) for rollout in group.rollouts]


def test_a_second_try_has_another_seed_and_a_network_fault_another_attempt(serve: Any):
    server = serve(lambda q, n: ["prose", '{"score": 1}'][n])
    (verdict,) = judged(server, samples("a"))
    assert verdict.value == 0.1 and verdict.counts["judge/calls"] == 2
    assert [body["seed"] for body in server.bodies] == [0, 1]
    assert [body["temperature"] for body in server.bodies] == [0.0, 0.7]
    server = serve(lambda q, n: [503, 429, '{"score": 2}'][n])
    (verdict,) = judged(server, samples("a"), attempts=3)
    assert verdict.value == 0.2 and verdict.counts["judge/calls"] == 1
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]


def test_a_key_is_sent_and_the_number_of_requests_is_bounded(serve: Any, monkeypatch: Any):
    monkeypatch.setenv("MY_KEY", "secret")
    server = serve(lambda q, n: '{"score": 1}')
    texts = [str(n) for n in range(20)]
    found = judged(server, samples(*texts), concurrency=3, key_variable="MY_KEY", timeout=20)
    assert all(verdict.value == 0.1 for verdict in found)
    assert server.most == 3 and set(server.keys) == {"Bearer secret"}


def test_answers_are_kept_for_the_next_process(serve: Any, tmp_path: Path):
    server = serve(lambda q, n: "prose" if "bad" in q else f'{{"score": {n_of(q)}}}')
    asked = samples("n=3", "n=4", "bad", "n=3")
    first = judged(server, asked, tmp_path)
    assert len(server.bodies) == 4, "equal questions once, an unreadable answer twice"
    assert [verdict.value for verdict in first] == [0.3, 0.4, None, 0.3]
    (file,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["answer"] for row in rows} == {'{"score": 3}', '{"score": 4}', "prose"}
    assert {row["prompt"] for row in rows} == {"6*7?"}
    file.write_text(file.read_text() + '{"key": "torn')
    again = judged(server, asked, tmp_path)
    assert [v.value for v in again] == [v.value for v in first] and len(server.bodies) == 4
    assert again[0].counts["judge/calls"] == 0 and again[2].reason == first[2].reason


def test_a_group_has_a_deadline(serve: Any):
    begun = time.monotonic()
    found = judged(serve(by_name), samples("good", "hangs"), timeout=60, group_timeout=4)
    assert time.monotonic() - begun < 30
    assert found[0].value == 0.8 and "group_timeout" in found[1].reason


def test_the_start_of_servers_is_no_part_of_a_groups_time(serve: Any):
    """A large judge loads for longer than any group may take."""
    server = serve(by_name)

    def urls() -> list[str]:
        time.sleep(1.5)
        return [server.url]

    judge = LLMJudge(JudgeConfig(timeout=60.0, group_timeout=1.0), urls)
    try:
        assert [found.value for found in judge.judge(samples("good", "better"))] == [0.8, 0.8]
    finally:
        judge.close()


def test_a_full_disk_costs_no_answer(serve: Any, small_disk: Path, capfd: Any):
    server, directory = serve(by_name), small_disk / "judge"
    judge = LLMJudge(JudgeConfig(timeout=60.0), lambda: [server.url], directory)
    try:
        judge.judge(samples("first"))
        filler = fill(small_disk, leave=0)
        found = judge.judge(samples(*(f"response {number}" for number in range(40))))
        assert [one.value for one in found] == [0.8] * 40
        assert capfd.readouterr().err.count("No space left") == 1
        filler.unlink()
        judge.judge(samples("fourth"))
    finally:
        judge.close()
    assert {"first", "fourth"} <= {
        json.loads(line)["response"]
        for file in directory.glob("*.jsonl")
        for line in file.read_text().splitlines()
        if line.endswith("}")
    }


def test_the_newest_answers_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run of a week asks for more than fit into memory; all are on disk."""
    monkeypatch.setattr(judge_client, "MOST_KEPT", 5000)
    (sample,) = samples("x")
    for number in range(3):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        kept = Kept(tmp_path)
        for place in range(8):
            kept.add(f"{number}-{place}", "a" * 600, "stop", sample)
        kept.close()
        os.utime(tmp_path / f"{socket.gethostname()}-{number}.jsonl", (number, number))
    assert [len(file.read_text().splitlines()) for file in tmp_path.glob("*.jsonl")] == [8] * 3
    assert list(kept.found) == [f"2-{place}" for place in range(3, 8)]
    assert list(Kept(tmp_path).found) == [f"2-{place}" for place in range(3, 8)]


@pytest.mark.parametrize("calls", ["one", "each"])
def test_a_missing_criterion_makes_the_response_unverifiable(serve: Any, calls: str):
    def answer(question: str, number: int) -> str:
        wanted = question.count("choices:")
        given = 1 if "lazy" in question else wanted
        if calls == "each" and "lazy" in question and "1. b" in question:
            given = 0
        return json.dumps({"verdicts": ["yes"] * given})

    found = judged(serve(answer), samples("good", "lazy"), kind="rubric", rubric_calls=calls)
    assert found[0].value == 1.0 and found[1].value is None
    (missing,) = judged(serve(answer), [Sample("a", "", {}, "p")], kind="rubric")
    assert "rubric" in missing.reason and missing.value is None


def stronger(question: str, number: int) -> str:
    """The larger number is better; equal ones tie; `stubborn` prefers A always."""
    first = question.partition("<A ")[2].partition("</A")[0]
    second = question.partition("<B ")[2].partition("</B")[0]
    if "silent" in first + second:
        return "no comment"
    if "stubborn" in first + second:
        return '{"better": "A"}'
    a, b = n_of(first), n_of(second)
    return json.dumps({"better": "tie" if a == b else "A" if a > b else "B"})


def test_pairwise_values_are_means_of_wins_in_any_order(serve: Any):
    texts = ["n=1", "n=5", "n=5 too", "n=9", "n=1"]
    expected = {"n=1": 0.125, "n=5": 0.625, "n=5 too": 0.625, "n=9": 1.0}
    server = serve(stronger)
    for order in itertools.islice(itertools.permutations(texts), 0, 120, 17):
        found = judged(server, samples(*order), kind="pairwise")
        assert [v.value for v in found] == [expected[text] for text in order]
        assert [v.verdict for v in found] == [
            "correct" if expected[t] > 0.5 else "wrong" for t in order
        ]


def test_a_contradiction_is_a_tie_and_an_uncompared_response_is_unverifiable(serve: Any):
    server = serve(stronger)
    found = judged(server, samples("n=1", "n=9", "stubborn", "silent"), kind="pairwise")
    assert [v.value for v in found[:3]] == [0.25, 0.75, 0.5]
    assert found[3].value is None and "0 of 3" in found[3].reason
    for few in (samples("n=1"), samples("n=1", "silent")):
        assert all(v.value is None for v in judged(server, few, kind="pairwise"))


def test_groups_of_several_prompts_are_judged_separately(serve: Any):
    group = samples("n=1", "n=2")
    other = [Sample(one.response, "7", {}, "other") for one in samples("n=3", "n=2")]
    found = judged(serve(stronger), [group[0], other[0], group[1], other[1]], kind="pairwise")
    assert [v.value for v in found] == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(("count", "most"), [(9, 4), (12, 5), (16, 8), (3, 8), (9, 8)])
def test_every_response_has_the_same_number_of_opponents(count: int, most: int):
    pairs = opponents(count, most)
    met = [sum(place in pair for pair in pairs) for place in range(count)]
    everyone = count <= 8 or most >= count - 1
    assert set(met) == {count - 1 if everyone else 2 * -(-most // 2)}
    assert all(a != b for a, b in pairs) and len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "judge.urls"),
        (["judge.urls=[http://a/v1]", "judge.checkpoint=model"], "either judge.urls"),
        (["judge.urls=[a:3000]"], "not an address"),
        (
            ["judge.urls=[http://a/v1]", "judge.kind=pairwise", "rollout.n_samples_per_prompt=1"],
            "pairwise",
        ),
    ],
)
def test_impossible_settings_are_refused(overrides: list[str], message: str):
    with pytest.raises(UserError, match=message):
        override(Config(), ["scoring.reward=judge", *overrides])
