"""The program in a response, and its tests: as data sets write them, and as statements in a row.

`def check(candidate)` that a test's last line calls is opened, and a loop over literal values is
written out:

    for inp, exp in zip([[1], [3]], [2, 4]):          inp = [1]
        assert f(*inp) == exp                         exp = 2
                                                      assert f(*inp) == exp
                                                      inp = [3]  ...

So every expression of the test gets values of its own, and the program's process does not need
those that its answers are compared with.
"""

from __future__ import annotations

import ast
import copy
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_stare.config import UserError

_FENCE = re.compile(r"[ \t]*```[ \t]*(\w*)")
_CLOSING = re.compile(r"[ \t]*```[ \t]*")
_PYTHON = ("python", "py", "python3")
_FIELD = "metadata.tests"
_MOST = 2_000  # statements of loops that are written out
_SIMPLE = (ast.Assert, ast.Assign, ast.Import, ast.ImportFrom, ast.Expr, ast.AugAssign)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class CodeTest:
    """Either `assertion`, code run after the program; or `function`, called with `arguments`, and
    one of the `values` that must come; or `stdin` and the `stdout` that must come.
    """

    stdin: str = ""
    stdout: str = ""
    assertion: str = ""
    function: str = ""
    arguments: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()


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

    [{"input": "1\\n", "output": "2\\n"}, ...], texts or lists of lines; the same with "fn_name", or
    "metadata": {"func_name": ...}, where a function, or a method of class Solution, is called;
    {"inputs": [...], "outputs": [...], "fn_name": ...}; ["assert f(1) == 2", ...]; one text of
    assertions; or any of these as JSON in a text.

    APPS and TACO put the value of a function into a list: where every output is a list of one item,
    the item is right as well as the list.
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
    outputs = [test.get("output") if isinstance(test, dict) else None for test in value]
    in_lists = all(isinstance(one, list) and len(one) == 1 for one in outputs)
    return tuple(_test(test, f"{_FIELD}[{number}]", in_lists) for number, test in enumerate(value))


def _pairs(value: dict[str, Any]) -> list[Any]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UserError(
            f"{_FIELD} is {short(value)}; give inputs and outputs, lists of equal length"
        )
    return [
        {"input": given, "output": expected, "fn_name": value.get("fn_name")}
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


def _test(value: Any, field: str, in_lists: bool) -> CodeTest:
    if isinstance(value, str) and value.strip():
        if checks_nothing(value):
            raise UserError(
                f"{field} is {short(value)}; it checks nothing, because no statement of it asserts "
                "or calls a function; add the call of its function, such as check(f)"
            )
        return CodeTest(assertion=value)
    if isinstance(value, dict) and {"input", "output"} <= value.keys():
        given, expected, name = value["input"], value["output"], _function_of(value)
        if name is not None:
            if not isinstance(name, str) or not name.isidentifier():
                raise UserError(
                    f"{field} has fn_name={name!r}, which is not a function's name; correct it"
                )
            values = (_expected(expected), *(expected if in_lists else ()))
            return CodeTest(function=name, arguments=_arguments(given), values=values)
        given, expected = _text(given), _text(expected)
        if given is not None and expected is not None:
            return CodeTest(stdin=given, stdout=expected)
    raise UserError(
        f'{field} is {short(value)}; give {{"input": text, "output": text}} or a text of assertions'
    )


def _function_of(test: dict[str, Any]) -> Any:
    """What a test names as the function that it calls; None: it is one of stdin and stdout."""
    metadata = test.get("metadata")
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    calls = test.get("testtype") == "functional" or test.get("type") == "function_call"
    return test.get("fn_name") or named or ("" if calls else None)


def _text(value: Any) -> str | None:
    """A text, or a list of its lines; None for anything else."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else None


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def in_a_row(text: str) -> list[ast.stmt] | None:
    """The statements of a test whose assertions all stand at its top, or in functions of its own
    that statements at its top call; None for any other.
    """
    body = _Loops().written_out(_opened(parsed(text)))
    nested = [one for one in body if not isinstance(one, _SIMPLE)]
    loose = [each for one in nested for each in _outside_definitions(one)]
    if any(isinstance(one, ast.Assert | ast.Return) for one in loose):
        return None
    functions = {one.name for one in nested if isinstance(one, _DEFINITIONS) and asserts(one)}
    others = [one for one in body if _called(one) not in functions]
    if any(isinstance(each, ast.Name) and each.id in functions for each in _walk(others)):
        return None
    calls = len(others) < len(body)
    return body if calls or any(isinstance(one, ast.Assert) for one in body) else None


def parsed(text: str) -> list[ast.stmt]:
    """The statements of a text; none of one that is not Python."""
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def asserts(node: ast.AST) -> bool:
    """Whether an assertion is in it."""
    return any(isinstance(one, ast.Assert) for one in ast.walk(node))


def starred(parts: Iterable[ast.expr]) -> bool:
    """Whether one of the parts is *part."""
    return any(isinstance(one, ast.Starred) for one in parts)


def checks_nothing(text: str) -> bool:
    """Whether a test cannot fail because of what it states: its assertions are in functions that
    nothing calls.
    """
    body = parsed(text)
    able_to_fail = (ast.Assert, ast.Call, ast.Raise)
    run = [one for each in body for one in _outside_definitions(each)]
    return bool(body) and not any(isinstance(one, able_to_fail) for one in run)


def without_main(code: str) -> str:
    """A program without its `if __name__ == "__main__":`, for tests that call its functions."""
    lines = code.split("\n")
    for one in parsed(code):
        if isinstance(one, ast.If) and not one.orelse and _is_main(one.test):
            last = one.end_lineno or one.lineno
            lines[one.lineno - 1 : last] = [""] * (last - one.lineno + 1)
    return "\n".join(lines)


def run_by_unittest(text: str) -> str:
    """A test of unittest's classes, followed by their run; any other text as it is."""
    body = parsed(text)
    if not any(isinstance(one, ast.ClassDef) and _is_test_case(one) for one in body):
        return text
    return "\n".join([*(ast.unparse(one) for one in body if not _starts_unittest(one)), _UNITTEST])


_UNITTEST = """
ran = __import__('unittest').main(argv=['test'], exit=False).result
assert ran.testsRun and ran.wasSuccessful(), [*ran.failures, *ran.errors]
"""


def _starts_unittest(statement: ast.stmt) -> bool:
    """Its own start ends the process, before anything can be asserted."""
    match statement:
        case ast.If(condition):
            return _is_main(condition)
        case ast.Expr(ast.Call(function)):
            return ast.unparse(function) in ("unittest.main", "main")
    return False


def _is_test_case(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split(".")[-1].endswith("TestCase") for base in node.bases)


def _is_main(condition: ast.expr) -> bool:
    return ast.unparse(condition) in ("__name__ == '__main__'", "'__main__' == __name__")


def _opened(body: list[ast.stmt]) -> list[ast.stmt]:
    """The program with the statements of `def check(candidate)` in place of it and of its call
    `check(f)`.
    """
    match body:
        case [*before, ast.FunctionDef(name=name) as check, ast.Expr(ast.Call(ast.Name(called)))]:
            call = body[-1].value  # type: ignore[attr-defined]
            names = [argument.arg for argument in check.args.args]
            if name == called and len(names) == len(call.args) and not call.keywords:
                given = [_assigned(*pair) for pair in zip(names, call.args, strict=True)]
                return [*before, *given, *check.body]
    return body


def _assigned(name: str, value: ast.expr) -> ast.stmt:
    return ast.fix_missing_locations(ast.Assign([ast.Name(name, ast.Store())], value))


class _Loops:
    """Writes out loops. `values`: the variables that hold a literal."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.written = 0

    def written_out(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in body:
            match statement:
                case ast.For(target, iterable, inner, []) if (
                    rounds := self._rounds(target, iterable, inner)
                ) is not None:
                    for given in rounds:
                        own = [_assigned(name, ast.Constant(one)) for name, one in given.items()]
                        found += self.written_out([*own, *copy.deepcopy(inner)])
                    continue
                case ast.Assign([ast.Name(name)], value) if (
                    known := _literal(value)
                ) is not _UNKNOWN:
                    self.values[name] = known
                case _:  # it may change what it names, or give it another name
                    for one in _walk([statement]):
                        if isinstance(one, ast.Name):
                            self.values.pop(one.id, None)
            found.append(statement)
        return found

    def _rounds(
        self, target: ast.expr, iterable: ast.expr, inner: Sequence[ast.stmt]
    ) -> list[dict[str, Any]] | None:
        """The values of the target's names in each round; None: the loop cannot be written out."""
        if not all(isinstance(one, (*_SIMPLE, ast.For)) for one in inner):
            return None
        try:
            rounds = [
                _bound(target, item) for item in itertools.islice(self._items(iterable), _MOST)
            ]
        except (ValueError, TypeError, RecursionError):
            return None
        self.written += len(rounds) * len(inner)
        return rounds if self.written < _MOST else None

    def _items(self, node: ast.expr) -> Iterable[Any]:
        """The items of a literal. ValueError, TypeError: they are not known."""
        match node:
            case ast.Name(name) if name in self.values:
                return self.values[name]
            case ast.Call(ast.Name("range"), arguments, []):
                return range(*map(ast.literal_eval, arguments))
            case ast.Call(ast.Name("enumerate"), [iterable], []):
                return enumerate(self._items(iterable))
            case ast.Call(ast.Name("zip"), arguments, []):
                return zip(*map(self._items, arguments), strict=False)
            case ast.Call(ast.Attribute(mapping, "items" | "keys" | "values" as view), [], []):
                known = self._items(mapping)
                if isinstance(known, dict):
                    return getattr(known, view)()
        return ast.literal_eval(node)


_UNKNOWN = object()


def _literal(node: ast.expr) -> Any:
    """The value of a literal; _UNKNOWN of anything else."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return _UNKNOWN


def _bound(target: ast.expr, item: Any) -> dict[str, Any]:
    """The names that a loop's target gives an item's parts. ValueError: another target."""
    match target:
        case ast.Name(name):
            return {name: item}
        case ast.Tuple(names) | ast.List(names):
            pairs = zip(names, item, strict=True)
            return {name: one for pair in pairs for name, one in _bound(*pair).items()}
    raise ValueError


def _called(statement: ast.stmt) -> str:
    """The name of the function that the statement calls with plain arguments; else empty."""
    match statement:
        case ast.Expr(ast.Call(ast.Name(name), arguments)) if not starred(arguments):
            return name
    return ""


def _walk(statements: Iterable[ast.stmt]) -> Iterable[ast.AST]:
    return itertools.chain.from_iterable(map(ast.walk, statements))


def _outside_definitions(node: ast.AST) -> Iterable[ast.AST]:
    """Every node that runs with the statement, without the bodies of functions and classes."""
    if isinstance(node, _DEFINITIONS):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_definitions(child)
