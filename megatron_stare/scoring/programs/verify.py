"""Is a program right? Its tests are run in a sandbox that the caller brings (`run`).

A test is a pair of stdin and expected stdout; a function with arguments and the value that it must
return; or Python that asserts. What is expected on stdout or of a function never reaches the
program's process: it prints plain values as JSON, which are compared elsewhere. The same holds
for assertions that stand in a row, alone or in `def check(candidate)`: what they ask of the program
is computed in its process, and everything else (assertions.py) in a second call without the
program. A condition that is itself a call of the program's function or method, or of a function
that takes objects of the program's classes, stays a claim of the program's process.

Assertions inside loops and functions share the program's process. A line that is drawn again for
every test must follow them, so leaving early passes nothing; but a program that searches its own
source for that line, or returns objects that equal everything, is not stopped there.
"""

from __future__ import annotations

import functools
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_stare.scoring.programs.assertions import DividedTest, Step, divide
from megatron_stare.scoring.programs.reading import (
    CodeTest,
    extract_code,
    run_by_unittest,
    short,
    without_main,
)

FLOAT_TOLERANCE = 1e-6  # of a function's floats, as judges of such problems have it
_CHECK_SECONDS = 2.0  # for comparing values, at least
_EARLY = "the program ended before the assertions"


class SandboxLost(RuntimeError):
    """The sandbox ended without an answer: whether the program is right is unknown."""


class ProgramOutcome(Protocol):
    """The result of `run`. `reason` is "ok" if the program ended by itself with status 0; `seconds`
    is the time that it took; `lost`: the sandbox itself ended.
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
    """The result of a program's tests."""

    passed: int
    total: int
    code: str | None  # the program; None: the response holds none
    failure: str = ""  # why the first failed test failed

    @property
    def correct(self) -> bool:
        return self.passed == self.total


def verify_code(
    response: str,
    tests: Sequence[CodeTest],
    run: RunProgram,
    stop_at_failure: bool = False,
    seconds: float = math.inf,
) -> CodeVerdict:
    """Run the response's last piece of Python against the tests.

    `stop_at_failure` leaves the rest out, counted as failed. `seconds` is what all tests together
    may take, without the time that a call waits for a free sandbox; tests that are not reached are
    failed. Nothing that the program prints or returns raises. An exception of `run` is not a
    verdict on the program, and passes through. ValueError: there are no tests. SandboxLost.
    """
    if not tests:
        raise ValueError("no tests: a program cannot be judged by none")
    code = extract_code(response)
    if code is None:
        return CodeVerdict(0, len(tests), None, "the response holds no Python between ``` fences")
    trial = _Trial(code, run, seconds)
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

    def __init__(self, code: str, run: RunProgram, seconds: float) -> None:
        self.code = code
        self.left = seconds
        self._run = run

    @functools.cached_property
    def functions(self) -> str:
        """The program for tests that call its functions."""
        return without_main(self.code)

    def failure(self, test: CodeTest) -> str:
        """The reason why the program fails the test; empty: it passes."""
        if test.function:
            return self._of_function(test)
        if test.assertion:
            return self._of_assertion(test.assertion)
        outcome = self._outcome(self.code, test.stdin)
        if outcome.reason != "ok":
            return _why(outcome)
        if same_output(outcome.stdout, test.stdout):
            return ""
        return f"expected {short(test.stdout)}, got {short(outcome.stdout)}"

    def _of_function(self, test: CodeTest) -> str:
        name, given = test.function, json.dumps(json.dumps(list(test.arguments)))
        has = f"'Solution' in globals() and hasattr(Solution, {name!r})"
        found = f"(getattr(Solution(), {name!r}) if {has} else {name})"
        call = f"{found}(*__import__('json').loads({given}))"
        wrong, line = self._values([0], [call])
        if wrong:
            return wrong
        try:
            (value,) = json.loads(line)[1]
            if any(same_json(value, one, FLOAT_TOLERANCE) for one in test.values):
                return ""
            return f"expected {short(test.values[0])}, got {short(value)}"
        except Exception as error:  # the line is the program's: it may hold anything
            return f"the returned value cannot be compared ({type(error).__name__})"

    def _of_assertion(self, text: str) -> str:
        values = f"values_{secrets.token_hex(16)}"
        test = divide(text, self.functions, values)
        if test is None:
            proof, text = secrets.token_hex(16), run_by_unittest(text)
            outcome = self._outcome(f"{self.functions}\n{text}\nprint({proof!r})\n", "")
            if outcome.reason == "ok" and outcome.stdout.splitlines()[-1:] == [proof]:
                return ""
            return _why(outcome) or _EARLY
        wrong, line = self._values(test.program_steps, test.asked)
        return wrong or self._checked(test, values, line)

    def _values(self, steps: Sequence[Step], asked: Sequence[str]) -> tuple[str, str]:
        """(why there are none, the values of the expressions `asked` as ENCODER writes them)."""
        mark = f"encoded_{secrets.token_hex(16)}"
        lines = [
            self.functions,
            ENCODER.replace("{encode}", f"_{mark}").replace("{exact}", repr(EXACT)),
            f"_{mark}_all = []",
        ]
        for step in steps:
            one = f"_{mark}_all.append(_{mark}({asked[step]}))" if isinstance(step, int) else step
            lines.append(one)
        lines.append(f"print('\\n{mark}' + __import__('json').dumps(['list', _{mark}_all]))")
        return self._line("\n".join(lines) + "\n", "", mark)

    def _checked(self, test: DividedTest, values: str, encoded: str) -> str:
        """The first assertion that does not hold of the program's values, in words; empty: all
        hold. It is found without the program.
        """
        held, mark = f"{values}_held", f"checked_{secrets.token_hex(16)}"
        lines = [
            DECODER.replace("{decode}", f"{values}_decode").replace("{modules}", repr(_MODULES)),
            f"{values} = {values}_decode(__import__('json').loads(input()))",
            f"{held} = []",
        ]
        for step in test.checker_steps:
            if isinstance(step, str):
                lines.append(step)
            else:
                lines += ["try:", f"    {held}.append(bool({test.conditions[step]}))"]
                lines += [
                    f"except Exception as {mark}:",
                    f"    {held}.append(type({mark}).__name__)",
                ]
        lines.append(f"print('\\n{mark}' + __import__('json').dumps({held}))")
        wrong, line = self._line("\n".join(lines) + "\n", encoded + "\n", mark, _CHECK_SECONDS)
        if wrong:
            return wrong
        for held_one, written in zip(json.loads(line), test.written, strict=True):
            if held_one is not True:
                return f"error: {held_one or 'AssertionError'}: {short(written)}"
        return ""

    def _line(
        self, code: str, stdin: str, mark: str, least_seconds: float = 0.0
    ) -> tuple[str, str]:
        """(why there is none, the rest of the last line that the code prints, after the mark)."""
        outcome = self._outcome(code, stdin, least_seconds)
        printed = outcome.stdout.splitlines()
        if outcome.reason != "ok":
            return _why(outcome), ""
        if not printed or not printed[-1].startswith(mark):
            return _EARLY, ""
        return "", printed[-1].removeprefix(mark)

    def _outcome(self, code: str, stdin: str, least_seconds: float = 0.0) -> ProgramOutcome:
        limit = None if math.isinf(self.left) else max(self.left, least_seconds, 0.05)
        outcome = self._run(code, stdin, limit)
        if outcome.lost:
            raise SandboxLost(f"the sandbox was lost: {outcome.detail}")
        self.left -= outcome.seconds
        return outcome


def same_output(printed: str, expected: str) -> bool:
    """Equal line by line, except for blanks at line ends and empty lines at the end."""
    lines, wanted = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected)
    )
    return lines == wanted


def _why(outcome: ProgramOutcome) -> str:
    if outcome.reason == "ok":
        return ""
    last = outcome.stderr.strip().splitlines()[-1:] or [""]
    return f"{outcome.reason}: {outcome.detail or last[0]}"


# Values of a program are written as JSON in its process and read where the program is not. Only
# plain kinds are written (None, bool, int, float, str, bytes, complex, list, tuple, set, dict), so
# that an object that calls itself equal to everything never meets the expected value. JSON has
# lists for all but None, bool and str: [kind, content].
#
# ENCODER is appended to the program; {encode} is a name that the program cannot have used.
# Subclasses (Counter, namedtuple, an enumeration of integers) and NumPy's values are written as
# what they are made of, values of EXACT as their parts; any other iterable as its items, which len,
# list and sorted can take.
_DAY, _CLOCK = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
EXACT = (
    ("builtins", "range", ("start", "stop", "step")),
    ("fractions", "Fraction", ("numerator", "denominator")),
    ("datetime", "date", _DAY),
    ("datetime", "time", _CLOCK),
    ("datetime", "datetime", (*_DAY, *_CLOCK)),
    ("datetime", "timedelta", ("days", "seconds", "microseconds")),
)
_MODULES = {name: module for module, name, _ in EXACT} | {"Decimal": "decimal"}
ENCODER = """
def {encode}(value, isinstance=isinstance, list=list, str=str, repr=repr, type=type):
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, complex):
        return ["complex", complex.__repr__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    for kind, types in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, types):
            return [kind, [{encode}(one) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[{encode}(key), {encode}(one)] for key, one in dict.items(value)]]
    for module, name, parts in {exact}:
        if type(value).__module__ == module and type(value).__name__ == name:
            return [name, [{encode}(getattr(value, part)) for part in parts]]
    if type(value).__module__ == "decimal" and hasattr(value, "as_tuple"):
        return ["Decimal", [str(value)]]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return {encode}(value.tolist())
    try:
        return ["other", [{encode}(one) for _, one in zip(range(100000), value)]]
    except TypeError:
        return ["other", []]
"""
# For the process that compares, in which no line of the program runs.
DECODER = """
class {decode}_other(list):
    def __eq__(self, other):
        return False
    def __ne__(self, other):
        return True
    __hash__ = None

def {decode}(encoded):
    if not isinstance(encoded, list):
        return encoded
    kind, content = encoded
    if kind in ("list", "tuple", "set", "other"):
        types = {"list": list, "tuple": tuple, "set": set, "other": {decode}_other}
        return types[kind]([{decode}(one) for one in content])
    if kind == "dict":
        return {{decode}(key): {decode}(one) for key, one in content}
    if kind == "int":
        return int(content, 16)
    modules = {modules}
    if kind in modules:
        return getattr(__import__(modules[kind]), kind)(*map({decode}, content))
    return {"float": float, "complex": complex, "bytes": bytes.fromhex}[kind](content)
"""


def same_json(encoded: Any, expected: Any, tolerance: float) -> bool:
    """Whether a value that ENCODER wrote equals a JSON value: a tuple is a list, a dictionary's
    keys are texts, true is not 1, 2.0 is not the integer 2. An expected float may differ by
    `tolerance`, relative and absolute. A text that ENCODER cannot have written may raise anything.
    """
    if expected is None or isinstance(expected, bool | str):
        return type(encoded) is type(expected) and bool(encoded == expected)
    if not isinstance(encoded, list):
        return False
    kind, content = encoded
    if isinstance(expected, float):
        if kind not in ("int", "float"):
            return False
        found = float(content) if kind == "float" else float(int(content, 16))
        close = math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
        return found == expected or close
    if isinstance(expected, int):
        return kind == "int" and int(content, 16) == expected
    if len(content) != len(expected):
        return False
    if isinstance(expected, list):
        pairs = zip(content, expected, strict=True)
        return kind in ("list", "tuple") and all(same_json(a, b, tolerance) for a, b in pairs)
    values = {_key(key): value for key, value in content} if kind == "dict" else {}
    return len(values) == len(expected) and all(
        key in values and same_json(values[key], value, tolerance)
        for key, value in expected.items()
    )


def _key(encoded: Any) -> str:
    """A dictionary's key as JSON writes it."""
    match encoded:
        case str():
            return encoded
        case ["int", str(digits)]:
            return str(int(digits, 16))
        case ["float", str(number)]:
            return number
    return json.dumps(encoded)
