"""Is a program right? Its tests, run in a sandbox that the caller brings (`run`),
say how many pass.

Pure but for `run`. A test is a pair of stdin and expected stdout, or Python that asserts. What is
expected on stdout never reaches the program. Assertions do share its process: each must be followed
by a line that is drawn anew for every test, so that leaving early (sys.exit, os._exit) passes
nothing; but a program that searches its own source for that line, or returns objects that equal
everything, is not stopped. Prefer stdin and stdout where a model may cheat.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_stare.config import UserError

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_PYTHON = ("python", "py", "python3")


class Outcome(Protocol):
    """What `run` tells of a program. `reason` is "ok" where it ended by itself with status 0."""

    @property
    def reason(self) -> str: ...

    @property
    def detail(self) -> str: ...

    @property
    def stdout(self) -> str: ...

    @property
    def stderr(self) -> str: ...


Run = Callable[[str, str], Outcome]  # (code, stdin), e.g. rollout.sandbox.Sandbox.run


@dataclass(frozen=True)
class CodeTest:
    """Either `assertion`, code run after the program,
    or `stdin` and the `stdout` that must come.
    """

    stdin: str = ""
    stdout: str = ""
    assertion: str = ""


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
    run: Run,
    stop_at_failure: bool = False,
    tolerance: float = 0.0,
) -> CodeVerdict:
    """Run the response's last piece of Python against the tests.

    `stop_at_failure` leaves the rest out, counted as failed. `tolerance` (relative and absolute) is
    allowed to numbers on stdout. Whatever `run` raises is no verdict on the program, and passes
    through. ValueError without tests.
    """
    if not tests:
        raise ValueError("no tests: a program cannot be judged by none")
    code = extract_code(response)
    if code is None:
        return CodeVerdict(0, len(tests), None, "the response holds no Python between ``` fences")
    passed, failure = 0, ""
    for number, test in enumerate(tests):
        wrong = _failure(code, test, run, tolerance)
        if not wrong:
            passed += 1
            continue
        failure = failure or f"test {number}: {wrong}"
        if stop_at_failure:
            break
    return CodeVerdict(passed, len(tests), code, failure)


def extract_code(response: str) -> str | None:
    """The last fence marked as Python, else the last without a language;
    None where there is neither.
    """
    fences = [(match[1].lower(), match[2]) for match in _FENCE.finditer(response)]
    for languages in (_PYTHON, ("",)):
        found = [code for language, code in fences if language in languages and code.strip()]
        if found:
            return found[-1]
    return None


def read_tests(value: Any, field: str = "metadata.tests") -> tuple[CodeTest, ...]:
    """Tests in the forms that data sets use. UserError naming the field for any other.

    [{"input": "1\\n", "output": "2\\n"}, ...]; {"inputs": [...], "outputs": [...]}; ["assert f(1)
    == 2", ...]; one text of assertions; or any of these as JSON in a text.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value] if value.strip() else []
    if isinstance(value, dict):
        value = _pairs(value, field)
    if not isinstance(value, list) or not value:
        raise UserError(f"{field} is {_short(value)}; give a list of tests that is not empty")
    return tuple(_test(test, f"{field}[{number}]") for number, test in enumerate(value))


def _pairs(value: dict[str, Any], field: str) -> list[dict[str, Any]]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if value.get("fn_name"):
        raise UserError(
            f"{field} has fn_name={value['fn_name']!r}; write such tests as assertions that call it"
        )
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UserError(
            f"{field} is {_short(value)}; give inputs and outputs, lists of equal length"
        )
    return [
        {"input": given, "output": expected}
        for given, expected in zip(inputs, outputs, strict=True)
    ]


def _test(value: Any, field: str) -> CodeTest:
    if isinstance(value, str) and value.strip():
        return CodeTest(assertion=value)
    if (
        isinstance(value, dict)
        and isinstance(value.get("input"), str)
        and isinstance(value.get("output"), str)
    ):
        return CodeTest(stdin=value["input"], stdout=value["output"])
    raise UserError(
        f'{field} is {_short(value)}; give {{"input": text, "output": text}} '
        "or a text of assertions"
    )


def _failure(code: str, test: CodeTest, run: Run, tolerance: float) -> str:
    """Why the program fails the test; empty: it passes."""
    if test.assertion:
        proof = secrets.token_hex(16)
        outcome = run(f"{code}\n{test.assertion}\nprint({proof!r})\n", "")
        lines = outcome.stdout.splitlines()
        if outcome.reason == "ok" and lines and lines[-1] == proof:
            return ""
        return _why(outcome) or "the program ended before the assertions"
    outcome = run(code, test.stdin)
    if outcome.reason != "ok":
        return _why(outcome)
    if same_output(outcome.stdout, test.stdout, tolerance):
        return ""
    return f"expected {_short(test.stdout)}, got {_short(outcome.stdout)}"


def same_output(printed: str, expected: str, tolerance: float = 0.0) -> bool:
    """Equal line by line, but for blanks at line ends, empty lines at the end,
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


def _why(outcome: Outcome) -> str:
    if outcome.reason == "ok":
        return ""
    last = outcome.stderr.strip().splitlines()[-1:] or [""]
    return f"{outcome.reason}: {outcome.detail or last[0]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
