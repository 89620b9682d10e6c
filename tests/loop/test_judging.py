"""Programs as rewards: what a row's tests make of a response, through the judge and the sandbox."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from megatron_stare.config import Config, override
from megatron_stare.loop.judging import build_judge
from megatron_stare.records import Prompt, Rollout
from megatron_stare.scoring.judge import Judge

TESTS = [{"input": "3\n", "output": "9\n"}, {"input": "4\n", "output": "16\n"}]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    settings = ["scoring.reward=code", "sandbox.warm_workers=1", "sandbox.max_concurrency=2"]
    with contextlib.closing(build_judge(override(Config(), settings))) as found:
        yield found


def response(program: str) -> Rollout:
    return Rollout((1,), (-0.1,), (1,), "completed", 0, text=f"So:\n```python\n{program}\n```\n")


@pytest.mark.parametrize(
    ("program", "reward", "verdict"),
    [
        ("print(int(input()) ** 2)", 1.0, "correct"),
        ("print(9)", 0.5, "wrong"),
        ("import sys; sys.exit(3)", 0.0, "wrong"),
    ],
)
def test_a_program_gets_the_share_of_tests_that_it_passes(judge: Judge, program: str, reward: float, verdict: str):
    prompt = Prompt(0, (1,), "", metadata={"tests": TESTS})
    (found,) = judge.judge([(prompt, response(program))])
    assert (found.reward, found.verdict) == (reward, verdict)


def test_tests_may_be_the_label_and_what_cannot_be_read_is_unverifiable(judge: Judge):
    good, bad = Prompt(0, (1,), json.dumps(TESTS)), Prompt(1, (1,), '{"inputs": ["1"]}')
    program = response("print(int(input()) ** 2)")
    right, unknown = judge.judge([(good, program), (bad, program)])
    assert (right.reward, right.verdict) == (1.0, "correct")
    assert (unknown.reward, unknown.verdict, unknown.loss_mask) == (None, "unverifiable", (0,))
