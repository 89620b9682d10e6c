"""Judging during the sampling; and programs as rewards, through the judge and the sandbox."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_stare.collect.judging import CodeRewards, build_judge
from megatron_stare.config import Config, UserError, override
from megatron_stare.records import Prompt, Rollout
from megatron_stare.rollout.sandbox.interpreter import Interpreter, SandboxError
from megatron_stare.scoring.judge import Judge
from megatron_stare.scoring.verdict import Sample

TESTS = [{"input": "3\n", "output": "9\n"}, {"input": "4\n", "output": "16\n"}]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    # by name: tests may run as root without bubblewrap
    settings = ["scoring.reward=code", "sandbox.isolation=limits", "sandbox.warm_workers=1"]
    settings.append("sandbox.max_concurrency=2")
    with contextlib.closing(build_judge(override(Config(), settings))) as found:
        yield found


def response(program: str) -> Rollout:
    return Rollout(
        (1,),
        (-0.1,),
        (1,),
        status="completed",
        weight_version=0,
        text=f"So:\n```python\n{program}\n```\n",
    )


@pytest.mark.parametrize(
    ("program", "reward", "verdict"),
    [
        ("print(int(input()) ** 2)", 1.0, "correct"),
        ("print(9)", 0.5, "wrong"),
        ("import sys; sys.exit(3)", 0.0, "wrong"),
    ],
)
def test_a_programs_reward_is_the_fraction_of_passed_tests(
    judge: Judge, program: str, reward: float, verdict: str
):
    prompt = Prompt(0, (1,), "", metadata={"tests": TESTS})
    (found,) = judge.judge([(prompt, response(program))])
    assert (found.reward, found.verdict) == (reward, verdict)


def test_tests_may_be_the_label_and_what_cannot_be_read_is_unverifiable(judge: Judge):
    good, bad = Prompt(0, (1,), json.dumps(TESTS)), Prompt(1, (1,), '{"inputs": ["1"]}')
    program = response("print(int(input()) ** 2)")
    right, unknown = judge.judge([(good, program), (bad, program)])
    assert (right.reward, right.verdict) == (1.0, "correct")
    assert (unknown.reward, unknown.verdict, unknown.loss_tokens) == (None, "unverifiable", 0)


def test_no_tests_and_no_response_raise(judge: Judge):
    """Rows and responses may hold anything: each has a verdict."""
    deep = "[" * 100_000
    hostile = [deep, f'{{"fn_name": "f", "inputs": ["{deep}"], "outputs": ["{deep}"]}}', "\ud800"]
    hostile += [
        "assert " + "(" * 500 + "1" + ")" * 500,
        "assert f() == " + "-" * 20_000 + "1",
        "\x00",
    ]
    programs = ["def f(*a): return 1", "\ud800", "(" * 5000, "x=" + "-" * 20_000 + "1", "\x00"]
    samples = [
        Sample(f"```python\n{program}\n```", tests) for program in programs for tests in hostile
    ]
    assert {one.verdict for one in judge.verdicts(samples)} <= {"wrong", "unverifiable"}


def test_output_over_64_kib_is_correct_where_the_test_expects_it(judge: Judge):
    tests = [{"input": "", "output": "x" * 100_000}]
    prompt = Prompt(0, (1,), "", metadata={"tests": tests})
    right, wrong = judge.judge(
        [(prompt, response("print('x' * 100_000)")), (prompt, response("print('x' * 99_999)"))]
    )
    assert (right.verdict, wrong.verdict) == ("correct", "wrong")


def test_more_output_than_can_be_taken_and_a_lost_sandbox_are_unverifiable(monkeypatch):
    settings = [
        *("scoring.reward=code", "sandbox.isolation=limits", "sandbox.warm_workers=1"),
        "sandbox.max_concurrency=1",
        *("scoring.code_output_bytes=1000", "sandbox.output_bytes=1000"),
    ]
    prompt = Prompt(0, (1,), "", metadata={"tests": [{"input": "", "output": "x" * 2000}]})
    with contextlib.closing(build_judge(override(Config(), settings))) as judge:
        (found,) = judge.judge([(prompt, response("print('x' * 2000)"))])
        assert found.verdict == "unverifiable"

        def broken(*_: object, **__: object) -> None:
            raise SandboxError("the sandbox has ended")

        monkeypatch.setattr(Interpreter, "call", broken)
        prompt = Prompt(0, (1,), "", metadata={"tests": TESTS})
        (found,) = judge.judge([(prompt, response("print(int(input()) ** 2)"))])
    assert (found.verdict, found.reward) == ("unverifiable", None)


def test_without_partial_credit_the_first_failure_ends_it():
    settings = [
        *("scoring.reward=code", "sandbox.isolation=limits", "sandbox.warm_workers=1"),
        "sandbox.max_concurrency=1",
        "scoring.code_partial_credit=false",
    ]
    prompt = Prompt(0, (1,), "", metadata={"tests": TESTS})
    with contextlib.closing(build_judge(override(Config(), settings))) as judge:
        half, whole = judge.judge(
            [(prompt, response("print(9)")), (prompt, response("print(int(input()) ** 2)"))]
        )
    assert (half.reward, half.verdict) == (0.0, "wrong")
    assert (whole.reward, whole.verdict) == (1.0, "correct")


def test_a_judge_that_cannot_be_built_leaves_no_sandbox(monkeypatch: pytest.MonkeyPatch):
    """The process, for example a notebook, continues after the error."""
    settings = ["scoring.reward=code", "scoring.rewards={code: 1, maths: 1}"]
    settings += ["sandbox.isolation=limits", "sandbox.warm_workers=1"]
    built, init = list[CodeRewards](), CodeRewards.__init__
    noted = lambda self, *given: (built.append(self), init(self, *given))[1]  # noqa: E731
    monkeypatch.setattr(CodeRewards, "__init__", noted)
    with pytest.raises(UserError, match="'maths' is unknown"):
        build_judge(override(Config(), settings))
    with pytest.raises(RuntimeError, match="shutdown"):
        built[0].runner.run("print(1)")


def test_the_end_of_a_run_waits_for_no_program_that_has_not_started():
    """A fully asynchronous run ends with hundreds of them."""
    settings = ["scoring.reward=code", "sandbox.isolation=limits", "sandbox.warm_workers=1"]
    judge = build_judge(override(Config(), [*settings, "sandbox.max_concurrency=1"]))
    slow = response("import time; time.sleep(0.5); print(int(input()) ** 2)")
    prompt = Prompt(0, (1,), "", metadata={"tests": TESTS * 4})
    judged, ran = judge.start([(prompt, slow)] * 50), list[str]()
    run = judge.backends["code"].runner.run  # type: ignore[attr-defined]
    started = threading.Event()

    def noted(*arguments: Any) -> Any:
        ran.append(arguments[1])
        started.set()
        return run(*arguments)

    judge.backends["code"].runner.run = noted  # type: ignore[attr-defined]
    assert started.wait(60)
    before = len(ran)
    judge.close()
    assert len(ran) <= before + 1 and judged.done()


CASES = "tests.scoring.verifier_cases"


def said(text: str, status: str = "completed") -> Rollout:
    return Rollout((1,), (-0.1,), (1,), status=status, weight_version=0, text=text)  # type: ignore[arg-type]


def test_a_function_of_the_user_is_never_called_twice_at_a_time():
    with contextlib.closing(
        build_judge(
            override(Config(), [f"scoring.reward={CASES}.alone", "scoring.function_timeout=0"])
        )
    ) as judge:
        under_way = [
            judge.start([(Prompt(0, (1,), ""), said("a")), (Prompt(0, (1,), ""), said("b"))])
            for _ in range(8)
        ]
        assert [rollout.reward for future in under_way for rollout in future.result()] == [1.0] * 16
