"""Tests as data sets write them, and the program in a response."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from megatron_stare.config import UserError
from megatron_stare.scoring.programs.statements import checks_nothing

_FENCE = re.compile(r"[ \t]*```[ \t]*(\w*)")
_CLOSING = re.compile(r"[ \t]*```[ \t]*")
_PYTHON = ("python", "py", "python3")
_FIELD = "metadata.tests"


@dataclass(frozen=True)
class CodeTest:
    """Either `assertion`, code run after the program; or `function`, called with `arguments`, and
    the `value` that must come; or `stdin` and the `stdout` that must come.
    """

    stdin: str = ""
    stdout: str = ""
    assertion: str = ""
    function: str = ""
    arguments: tuple[Any, ...] = ()
    value: Any = None


def extract_code(response: str) -> str | None:
    """The last fence marked as Python, else the last without a language;
    None where there is neither. One pass over the lines.
    """
    found: dict[bool, str] = {}
    language, lines = None, list[str]()
    for line in response.split("\n"):
        if language is None:
            match = _FENCE.match(line)
            if match:
                language, lines = match[1].lower(), []
        elif not _CLOSING.fullmatch(line):
            lines.append(f"{line}\n")
        else:
            code = "".join(lines)
            if (language in _PYTHON or not language) and code.strip():
                found[language in _PYTHON] = code
            language = None
    return found.get(True, found.get(False))


def read_tests(value: Any) -> tuple[CodeTest, ...]:
    """Tests in the forms that data sets use. UserError for any other.

    [{"input": "1\\n", "output": "2\\n"}, ...]; {"inputs": [...], "outputs": [...]}, with "fn_name"
    where a function, or a method of class Solution, is called; ["assert f(1) == 2", ...]; one text
    of assertions; or any of these as JSON in a text.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [value] if value.strip() else []
    if isinstance(value, dict):
        value = _pairs(value)
    if not isinstance(value, list) or not value:
        raise UserError(f"{_FIELD} is {short(value)}; give a list of tests that is not empty")
    return tuple(_test(test, f"{_FIELD}[{number}]") for number, test in enumerate(value))


def _pairs(value: dict[str, Any]) -> list[Any]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UserError(
            f"{_FIELD} is {short(value)}; give inputs and outputs, lists of equal length"
        )
    name = value.get("fn_name")
    if name:
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(f"{_FIELD} has fn_name={name!r}, which is not a function's name")
        return [
            CodeTest(function=name, arguments=_arguments(given), value=_expected(expected))
            for given, expected in zip(inputs, outputs, strict=True)
        ]
    return [
        {"input": given, "output": expected}
        for given, expected in zip(inputs, outputs, strict=True)
    ]


def _arguments(given: Any) -> tuple[Any, ...]:
    """A list of arguments; or a text with one of them, as JSON, on each line."""
    if isinstance(given, str):
        return tuple(_expected(line) for line in given.splitlines() if line.strip())
    return tuple(given) if isinstance(given, list) else (given,)


def _expected(value: Any) -> Any:
    """A value, or what a text of JSON holds."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _test(value: Any, field: str) -> CodeTest:
    if isinstance(value, CodeTest):
        return value
    if isinstance(value, str) and value.strip():
        if checks_nothing(value):
            raise UserError(
                f"{field} is {short(value)}; it checks nothing, because no statement of it asserts "
                "or calls a function; add the call of its function, such as check(f)"
            )
        return CodeTest(assertion=value)
    if (
        isinstance(value, dict)
        and isinstance(value.get("input"), str)
        and isinstance(value.get("output"), str)
    ):
        return CodeTest(stdin=value["input"], stdout=value["output"])
    raise UserError(
        f'{field} is {short(value)}; give {{"input": text, "output": text}} or a text of assertions'
    )


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
