"""Programs judged by tests, run in the real sandbox."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from megatron_stare.config import UserError
from megatron_stare.scoring.programs.reading import CodeTest, extract_code, read_tests
from megatron_stare.scoring.programs.verify import SandboxLost, same_output, verify_code
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
    with open_kind("limits", wall_seconds=8.0) as sandbox:
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
        ("import os\nprint(3, flush=True)\nos._exit(0)", 1, "expected '0', got '3\\n'"),
        ("import os\nprint(3, flush=True)\nos._exit(1)", 0, "killed"),
        ("5", 0, "expected '3\\n', got ''"),
    ],
)
def test_programs_read_stdin_and_write_stdout(run, code, passed, words):
    verdict = verify_code(program(code), PAIRS, run)
    assert (verdict.passed, verdict.total, verdict.correct) == (passed, 3, passed == 3)
    assert words in verdict.failure


@pytest.mark.parametrize(
    "code",
    [
        "import atexit, io, os\nout = io.StringIO()\n"
        "atexit.register(lambda: os.write(1, out.getvalue().encode()))\n"
        "print = lambda *a: out.write(' '.join(map(str, a)) + '\\n')\nprint(answer())",
        "import os, sys\nprint(answer())\nsys.stdout.flush()\nos._exit(0)",
        "out = open(1, 'w')\nout.write(f'{answer()}\\n')",
        "import os\nout = os.fdopen(1, 'wb')\nout.write(b'%d\\n' % answer())",
        "import os.path\nassert os.path.basename(__file__).endswith('.py')\nprint(answer())",
        "import atexit\natexit.register(lambda: print(answer()))\nraise SystemExit",
        "import threading\nthreading.Thread(target=lambda: print(answer())).start()",
    ],
)
def test_usual_ways_to_print(run, code):
    code = "def answer(): return sum(map(int, input().split()))\n" + code
    assert verify_code(program(code), PAIRS, run).correct


@pytest.mark.parametrize(
    ("code", "passed", "words"),
    [
        ("def add(a, b): return a + b", 2, ""),
        ("def add(a, b): return 3", 1, "test 1: error: AssertionError"),
        ("import sys; sys.exit(0)", 0, "ended before the assertions"),
        ("import os; os._exit(0)", 0, "ended before the assertions"),
        ("import os; os._exit(1)", 0, "killed"),
        ("def add(a, b):\n  import os; print('passed', flush=True); os._exit(0)", 0, "before the"),
        ("def add(a, b):\n  raise SystemExit", 0, "ended before the assertions"),
        ("def other(): pass", 0, "NameError"),
        ("if False:", 0, "IndentationError"),
        ("x = '''", 0, "SyntaxError"),
    ],
)
def test_assertions_judge_a_program(run, code, passed, words):
    verdict = verify_code(program(code), ASSERTS, run)
    assert verdict.passed == passed
    assert words in verdict.failure


def test_a_program_that_hangs_and_stopping_early(run):
    seen = []

    def counted(code, stdin, wall_seconds):
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
def test_code_is_extracted_from_a_response(response, code):
    assert extract_code(response) == code


def test_forms_of_tests():
    pair = CodeTest(stdin="1", stdout="2")
    for value in ([{"input": "1", "output": "2"}], {"inputs": ["1"], "outputs": ["2"]}):
        assert read_tests(value) == read_tests(json.dumps(value)) == (pair,)
    lines = {"inputs": [["1", "2 3"], []], "outputs": [["5", ""], ["0"]]}
    assert read_tests(lines) == (CodeTest("1\n2 3", "5\n"), CodeTest("", "0"))
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
        [{"input": [1], "output": "1"}],
        [{"input": [1], "fn_name": "f"}],
        ["", "x"],
    ],
)
def test_other_forms_of_tests_are_refused(value):
    with pytest.raises(UserError, match=r"metadata\.tests"):
        read_tests(value)
    with pytest.raises(UserError, match="fn_name"):
        read_tests({"inputs": [[]], "outputs": [1], "fn_name": "f()"})


def test_same_output():
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output("0.3333333", "0.3333334")


EQUALS_ALL = (
    "class All:\n  def __eq__(self, other): return True\n  def __sub__(self, other): return -9"
)


@pytest.mark.parametrize(
    "assertion",
    [
        "assert add(1, 2) == 3",
        "assert 3 == add(1, 2)",
        "assert abs(add(1, 2) - 3) < 1e-6",
        "assert add(1, 2) in [3]",
        "assert add(1, 2) == 3 and add(1, 2) < 4",
        "x = 1\nassert add(x, 2) == 3\nassert add(x, x) == 2",
        "def check(candidate):\n    assert candidate(1, 2) == 3\n\ncheck(add)",
    ],
)
def test_an_object_that_equals_everything_equals_nothing(run, assertion):
    tests = (CodeTest(assertion=assertion),)
    assert verify_code(program("def add(a, b): return a + b"), tests, run).correct
    cheat = verify_code(program(f"{EQUALS_ALL}\ndef add(a, b): return All()"), tests, run)
    assert cheat.passed == 0


@pytest.mark.parametrize(
    ("code", "assertion", "passes"),
    [
        ("def f(): return (1, 2)", "assert f() == (1, 2)", True),
        ("def f(): return [1, 2]", "assert f() == (1, 2)", False),
        ("def f(): return {2, 1}", "assert f() == {1, 2}", True),
        (
            "from collections import Counter\nf = lambda: Counter('aab')",
            "assert f() == {'a': 2, 'b': 1}",
            True,
        ),
        ("def f(): return None", "assert f() is None", True),
        ("def f(): return False", "assert not f()", True),
        ("def f(): return 10**50", "assert f() == 10**50", True),
        ("def f(x): return x", "for i in range(3):\n    assert f(i) == i", True),
        ("def f(x): return 0", "for i in range(3):\n    assert f(i) == i", False),
        ("def f(): print('no newline', end=''); return 1", "assert f() == 1", True),
        ("class S: pass\ndef f(): return S()", "assert isinstance(f(), S)", True),
    ],
)
def test_values_are_compared_by_kind_outside_the_program(run, code, assertion, passes):
    assert verify_code(program(code), (CodeTest(assertion=assertion),), run).correct is passes


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("def add(a, b): return a + b", 3),
        ("class Solution:\n  def add(self, a, b): return a + b", 3),
        (
            "class Solution:\n  def add(self, a, b): return (lambda: a + b)()",
            3,
        ),
        ("def add(a, b): return float(a + b)", 0),
        (f"{EQUALS_ALL}\ndef add(a, b): return All()", 0),
        ("def other(): pass", 0),
    ],
)
def test_a_function_by_name(run, code, passed):
    inputs, outputs = [[1, 2], ["5", "6"], "[1]\n[2]"], [3, '"56"', "[1, 2]"]
    tests = read_tests({"fn_name": "add", "inputs": inputs, "outputs": outputs})
    assert tests[0] == CodeTest(function="add", arguments=(1, 2), values=(3,))
    verdict = verify_code(program(code), tests, run)
    assert verdict.passed == passed, verdict.failure


@pytest.mark.parametrize("named", [{"fn_name": "f"}, {"metadata": {"func_name": "f"}}])
def test_every_test_may_name_its_function(named):
    test = {"input": "[1]\n2", "output": "[1, 2]", "testtype": "functional", **named}
    wanted = CodeTest(function="f", arguments=([1], 2), values=([1, 2],))
    assert read_tests([test]) == read_tests(json.dumps([test])) == (wanted,)
    unnamed = test | dict.fromkeys(named)
    with pytest.raises(UserError, match="fn_name=''"):
        read_tests([unnamed])
    assert read_tests([unnamed | {"testtype": "stdin"}])[0].stdin == "[1]\n2"


def test_values_in_lists_of_one_are_read_as_apps_and_taco_mean_them(run):
    row = {"fn_name": "f", "inputs": [["a"], ["bc"]], "outputs": [["A"], ["BC"]]}
    assert verify_code(program("def f(x): return x.upper()"), read_tests(row), run).correct
    assert verify_code(program("def f(x): return [x.upper()]"), read_tests(row), run).correct
    assert verify_code(program("def f(x): return x"), read_tests(row), run).passed == 0
    lists = row | {"outputs": [["A"], ["B", "C"]]}
    assert verify_code(program("def f(x): return list(x.upper())"), read_tests(lists), run).correct
    assert verify_code(program("def f(x): return x.upper()"), read_tests(lists), run).passed == 0


def test_json_values_have_kinds(run):
    code = program("def f(x): return {'a': True, 'b': 0.1 + 0.2, 'c': (1, 'x')}[x]")
    right = {"fn_name": "f", "inputs": [["a"], ["b"], ["c"]], "outputs": [True, 0.3, [1, "x"]]}
    assert verify_code(code, read_tests(right), run).correct
    wrong = right | {"outputs": [1, 0.31, [True, "x"]]}
    assert verify_code(code, read_tests(wrong), run).passed == 0


def test_all_tests_together_have_a_time_limit(run):
    tests, allowed = (CodeTest("", "0"),) * 100, []

    def noted(code, stdin, wall_seconds):
        allowed.append(wall_seconds)
        return run(code, stdin, min(wall_seconds, 2.0))

    verdict = verify_code(program("while True: pass"), tests, noted, seconds=3.0)
    assert verdict.passed == 0 and "timeout" in verdict.failure
    assert 1 < len(allowed) < 5 and sorted(allowed, reverse=True) == allowed


def test_a_lost_sandbox_is_no_verdict(run):
    def lost(code, stdin, wall_seconds):
        return dataclasses.replace(run("1"), lost=True, reason="killed", detail="it ended")

    with pytest.raises(SandboxLost, match="it ended"):
        verify_code(program("print(3)"), PAIRS, lost)


def test_long_stdin_reaches_the_program():
    text = "x y\n" * (3 << 18)  # 3 MiB, where a file may have 2
    with open_kind("limits", wall_seconds=20.0, cpu_seconds=20.0) as sandbox:
        code = program("import sys\nprint(len(sys.stdin.read()))")
        verdict = verify_code(code, (CodeTest(text, str(len(text))),), sandbox.run)
    assert verdict.correct, verdict.failure


@pytest.mark.parametrize("unit", [f"{FENCE}python\n", f"{FENCE}python\nx\n{FENCE}\n", " \n", "`"])
def test_code_is_found_in_linear_time(unit):
    """Four times the text, about four times the time; a quadratic search takes sixteen."""

    def seconds(length):
        text = unit * (length // len(unit))
        times = []
        for _ in range(5):
            began = time.process_time()
            extract_code(text)
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(400_000) < 10 * seconds(100_000) + 0.05
