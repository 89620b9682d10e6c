"""A test as statements in a row: `def check(candidate)` that the last line calls is opened, and a
loop over literal values is written out.

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
from collections.abc import Iterable, Sequence
from typing import Any

_MOST = 2_000  # statements of loops that are written out
_SIMPLE = (ast.Assert, ast.Assign, ast.Import, ast.ImportFrom, ast.Expr, ast.AugAssign)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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
