"""Is a program right? Its tests, run in a sandbox that the caller brings (`run`),
say how many pass.

Pure except for `run`. A test is a pair of stdin and expected stdout; a function with arguments and
the value that it must return; or Python that asserts. What is expected on stdout, or of a function,
never reaches the program: its process tells plain values, which are compared here (values.py). So
are assertions that stand in a row (`assert f(1) == [2]`, `assert abs(f(2) - 1.5) < 1e-6`, alone or
in `def check(candidate)`). Assertions inside loops and functions do share the program's process;
they must be followed by a line that is drawn again for every test, so that leaving early passes
nothing, but a program that searches its own source for that line, or returns objects that equal
everything, is not stopped there.
"""

from __future__ import annotations

import ast
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_stare.scoring.programs.reading import CodeTest, extract_code, short
from megatron_stare.scoring.programs.values import ENCODER, decode, evaluate, same_json, split

FLOAT_TOLERANCE = 1e-6  # of a function's floats, as judges of such problems have it


class SandboxLost(RuntimeError):
    """The sandbox ended without an answer: no one knows whether the program is right."""


class ProgramOutcome(Protocol):
    """What `run` tells of a program. `reason` is "ok" where it ended by itself with status 0;
    `seconds` is what it took; `lost`: the sandbox itself ended.
    """

    @property
    def reason(self) -> str: ...

    @property
    def detail(self) -> str: ...

    @property
    def stdout(self) -> str: ...

    @property
    def stderr(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    @property
    def lost(self) -> bool: ...


class RunProgram(Protocol):
    """E.g. rollout.sandbox.Sandbox.run; `wall_seconds` can only lower its own limit."""

    def __call__(
        self, code: str, stdin: str = "", wall_seconds: float | None = None
    ) -> ProgramOutcome: ...


@dataclass(frozen=True)
class CodeVerdict:
    """`passed` of `total` tests; `code` is the program (None: the response holds none);
    why the first one failed.
    """

    passed: int
    total: int
    code: str | None
    failure: str = ""

    @property
    def correct(self) -> bool:
        return self.passed == self.total


def verify_code(
    response: str,
    tests: Sequence[CodeTest],
    run: RunProgram,
    stop_at_failure: bool = False,
    tolerance: float = 0.0,
    seconds: float = math.inf,
) -> CodeVerdict:
    """Run the response's last piece of Python against the tests.

    `stop_at_failure` leaves the rest out, counted as failed. `tolerance` (relative and absolute) is
    allowed to numbers on stdout. `seconds` is what all tests together may take, the time that a
    call waits for a free sandbox left out; tests that it does not reach are failed. Whatever `run`
    raises is no verdict on the program, and passes through. ValueError without tests; SandboxLost.
    """
    if not tests:
        raise ValueError("no tests: a program cannot be judged by none")
    code = extract_code(response)
    if code is None:
        return CodeVerdict(0, len(tests), None, "the response holds no Python between ``` fences")
    trial = _Trial(code, run, tolerance, seconds)
    passed, failure = 0, ""
    for number, test in enumerate(tests):
        if trial.left <= 0:
            failure = failure or f"test {number}: not reached within {seconds:g} s"
            break
        wrong = trial.failure(test)
        if not wrong:
            passed += 1
            continue
        failure = failure or f"test {number}: {wrong}"
        if stop_at_failure:
            break
    return CodeVerdict(passed, len(tests), code, failure)


class _Trial:
    """One program, and the seconds that are left to it."""

    def __init__(self, code: str, run: RunProgram, tolerance: float, seconds: float) -> None:
        self.code, self.tolerance, self.left = code, tolerance, seconds
        self._run = run

    def failure(self, test: CodeTest) -> str:
        """Why the program fails the test; empty: it passes."""
        if test.function:
            return self._of_function(test)
        if test.assertion:
            return self._of_assertion(test.assertion)
        outcome = self._outcome(self.code, test.stdin)
        if outcome.reason != "ok":
            return _why(outcome)
        if same_output(outcome.stdout, test.stdout, self.tolerance):
            return ""
        return f"expected {short(test.stdout)}, got {short(outcome.stdout)}"

    def _of_function(self, test: CodeTest) -> str:
        name, given = test.function, json.dumps(json.dumps(list(test.arguments)))
        has = f"'Solution' in globals() and hasattr(Solution, {name!r})"
        found = f"(getattr(Solution(), {name!r}) if {has} else {name})"
        call = f"{found}(*__import__('json').loads({given}))"
        wrong, values = self._values([], [call])
        if wrong:
            return wrong
        tolerance = max(self.tolerance, FLOAT_TOLERANCE)
        if same_json(values[0], test.value, tolerance):
            return ""
        return f"expected {short(test.value)}, got {short(values[0])}"

    def _of_assertion(self, text: str) -> str:
        plan = _in_a_row(text)
        if plan is None:
            proof = secrets.token_hex(16)
            outcome = self._outcome(f"{self.code}\n{text}\nprint({proof!r})\n", "")
            lines = outcome.stdout.splitlines()
            if outcome.reason == "ok" and lines and lines[-1] == proof:
                return ""
            return _why(outcome) or "the program ended before the assertions"
        asked: list[str] = []
        steps: list[str | int] = []
        conditions = []
        for statement in plan:
            if isinstance(statement, ast.Assert):
                before = len(asked)
                conditions.append((split(statement.test, asked), ast.unparse(statement)))
                steps += range(before, len(asked))
            else:
                steps.append(ast.unparse(statement))
        wrong, values = self._values(steps, asked)
        if wrong:
            return wrong
        for condition, written in conditions:
            try:
                held = bool(evaluate(condition, values))
            except Exception as error:  # the values do not bear the comparison
                return f"error: {type(error).__name__} in {short(written)}"
            if not held:
                return f"error: AssertionError: {short(written)}"
        return ""

    def _values(self, steps: Sequence[str | int], asked: list[str]) -> tuple[str, list[Any]]:
        """(why there are none, the values of the expressions `asked`). `steps`: statements, and
        places in `asked`, in their order; none: just the expressions.
        """
        mark = f"told_{secrets.token_hex(16)}"
        lines = [ENCODER.replace("{encode}", f"_{mark}"), f"_{mark}_all = []"]
        for step in steps or range(len(asked)):
            if isinstance(step, str):
                lines.append(step)
            else:
                lines.append(f"_{mark}_all.append(_{mark}({asked[step]}))")
        lines.append(f"print('\\n{mark}' + __import__('json').dumps(['list', _{mark}_all]))")
        outcome = self._outcome(self.code + "\n" + "\n".join(lines) + "\n", "")
        printed = outcome.stdout.splitlines()
        if outcome.reason != "ok":
            return _why(outcome), []
        if not printed or not printed[-1].startswith(mark):
            return "the program ended before the assertions", []
        try:
            values = decode(printed[-1].removeprefix(mark))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            return f"what the program returned cannot be read ({type(error).__name__})", []
        if not isinstance(values, list) or len(values) != len(asked):
            return "what the program returned cannot be read", []
        return "", values

    def _outcome(self, code: str, stdin: str) -> ProgramOutcome:
        limit = None if math.isinf(self.left) else max(self.left, 0.05)
        outcome = self._run(code, stdin, limit)
        if outcome.lost:
            raise SandboxLost(f"the sandbox was lost: {outcome.detail}")
        self.left -= outcome.seconds
        return outcome


def _in_a_row(text: str) -> list[ast.stmt] | None:
    """The statements of a test whose assertions all stand at its top; None for any other.

    `def check(candidate): ...` that the last line calls, `check(f)`, is opened.
    """
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match body:
        case [*before, ast.FunctionDef(name=name) as check, ast.Expr(ast.Call(ast.Name(called)))]:
            call = body[-1].value  # type: ignore[attr-defined]
            names = [argument.arg for argument in check.args.args]
            if name == called and len(names) == len(call.args) and not call.keywords:
                given = [
                    ast.parse(f"{one} = {ast.unparse(argument)}").body[0]
                    for one, argument in zip(names, call.args, strict=True)
                ]
                body = [*before, *given, *check.body]
    simple = (ast.Assert, ast.Assign, ast.Import, ast.ImportFrom, ast.Expr, ast.AugAssign)
    nested = [one for one in body if not isinstance(one, simple)]
    inside = (ast.Assert, ast.Return)
    if any(isinstance(node, inside) for one in nested for node in ast.walk(one)):
        return None
    return body if any(isinstance(one, ast.Assert) for one in body) else None


def same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Equal line by line, except for blanks at line ends, empty lines at the end,
    and numbers within the tolerance.
    """
    lines, wanted = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected)
    )
    if len(lines) != len(wanted):
        return False
    return all(
        line == other or (tolerance > 0 and _close(line.split(), other.split(), tolerance))
        for line, other in zip(lines, wanted, strict=True)
    )


def _close(words: list[str], others: list[str], tolerance: float) -> bool:
    if len(words) != len(others):
        return False
    for word, other in zip(words, others, strict=True):
        try:
            if word != other and not math.isclose(
                float(word), float(other), rel_tol=tolerance, abs_tol=tolerance
            ):
                return False
        except ValueError:
            return False
    return True


def _why(outcome: ProgramOutcome) -> str:
    if outcome.reason == "ok":
        return ""
    last = outcome.stderr.strip().splitlines()[-1:] or [""]
    return f"{outcome.reason}: {outcome.detail or last[0]}"
