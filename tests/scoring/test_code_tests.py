"""Programs judged by tests, run in the real sandbox."""

from __future__ import annotations

import json

import pytest

from megatron_stare.config import UserError
from megatron_stare.scoring.code_tests import (
    CodeTest,
    extract_code,
    read_tests,
    same_output,
    verify_code,
)
from tests.rollout.sandbox.sandboxes import open_kind

FENCE = "```"
PAIRS = (
    CodeTest(stdin="1 2\n", stdout="3\n"),
    CodeTest(stdin="5 -5\n", stdout="0"),
    CodeTest("7 7", "14"),
)
ASSERTS = (
    CodeTest(assertion="assert add(1, 2) == 3"),
    CodeTest(assertion="assert add(-1, 1) == 0"),
)


@pytest.fixture(scope="module")
def run():
    with open_kind("limits", wall_seconds=2.0) as sandbox:
        yield sandbox.run


def program(code):
    return f"Here it is:\n{FENCE}python\n{code}\n{FENCE}\nDone."


@pytest.mark.parametrize(
    ("code", "passed", "words"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 3, ""),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", 3, ""),
        ("print(3)", 1, "test 1: expected '0', got '3\\n'"),
        ("print(3)\n1/0", 0, "test 0: error: ZeroDivisionError"),
        ("print(3", 0, "SyntaxError"),
        ("import os\nprint(3, flush=True)\nos._exit(0)", 0, "killed"),
        ("5", 0, "expected '3\\n', got ''"),
    ],
)
def test_stdin_and_stdout(run, code, passed, words):
    verdict = verify_code(program(code), PAIRS, run)
    assert (verdict.passed, verdict.total, verdict.correct) == (passed, 3, passed == 3)
    assert words in verdict.failure


@pytest.mark.parametrize(
    ("code", "passed", "words"),
    [
        ("def add(a, b): return a + b", 2, ""),
        ("def add(a, b): return 3", 1, "test 1: error: AssertionError"),
        ("import sys; sys.exit(0)", 0, "ended before the assertions"),
        ("import os; os._exit(0)", 0, "killed"),
        ("def add(a, b):\n  import os; print('passed', flush=True); os._exit(0)", 0, "killed"),
        ("def add(a, b):\n  raise SystemExit", 0, "ended before the assertions"),
        ("def other(): pass", 0, "NameError"),
        ("if False:", 0, "IndentationError"),
        ("x = '''", 0, "SyntaxError"),
    ],
)
def test_assertions(run, code, passed, words):
    verdict = verify_code(program(code), ASSERTS, run)
    assert verdict.passed == passed
    assert words in verdict.failure


def test_a_program_that_hangs_and_stopping_early(run):
    seen = []

    def counted(code, stdin):
        seen.append(stdin)
        return run(code, stdin, 0.3)

    verdict = verify_code(program("while True: pass"), PAIRS, counted, stop_at_failure=True)
    assert (verdict.passed, len(seen)) == (0, 1)
    assert "timeout" in verdict.failure


def test_no_code_is_no_pass_and_no_tests_are_an_error(run):
    assert verify_code("The answer is 3.", PAIRS, run).code is None
    with pytest.raises(ValueError, match="no tests"):
        verify_code(program("print(3)"), (), run)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (f"{FENCE}python\na\n{FENCE}\n{FENCE}python\nb\n{FENCE}", "b\n"),
        (f"{FENCE}Python3\na\n{FENCE}\n{FENCE}\nout\n{FENCE}", "a\n"),
        (f"{FENCE}\na\n{FENCE}", "a\n"),
        (f"{FENCE}json\n1\n{FENCE}", None),
        (f"{FENCE}python\ncut off", None),
        ("", None),
    ],
)
def test_which_code_is_taken(response, code):
    assert extract_code(response) == code


def test_forms_of_tests():
    pair = CodeTest(stdin="1", stdout="2")
    for value in ([{"input": "1", "output": "2"}], {"inputs": ["1"], "outputs": ["2"]}):
        assert read_tests(value) == read_tests(json.dumps(value)) == (pair,)
    assert read_tests(["assert a", "assert b"]) == (
        CodeTest(assertion="assert a"),
        CodeTest(assertion="assert b"),
    )
    assert read_tests("assert a\nassert b") == (CodeTest(assertion="assert a\nassert b"),)


@pytest.mark.parametrize(
    "value",
    [
        [],
        "",
        None,
        {},
        {"inputs": ["1"], "outputs": []},
        [1],
        [{"input": 1, "output": "1"}],
        ["", "x"],
    ],
)
def test_other_forms_are_refused(value):
    with pytest.raises(UserError, match=r"metadata\.tests"):
        read_tests(value)
    with pytest.raises(UserError, match="fn_name"):
        read_tests({"inputs": [], "outputs": [], "fn_name": "f"})


def test_same_output():
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output("0.3333333", "0.3333334")
    assert same_output("x 0.3333333", "x 0.3333334", tolerance=1e-6)
    assert not same_output("x 0.3", "y 0.3", tolerance=1e-6)
    assert not same_output("nan", "1", tolerance=1e-6)
