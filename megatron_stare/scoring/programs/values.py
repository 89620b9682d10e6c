"""Values of a program, told as text inside its process and compared outside of it.

What is told is of plain kinds only: None, bool, int, float, str, bytes, complex, list, tuple, set,
dict. So an object that calls itself equal to everything never meets the expected value, which the
program's process does not hold.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable
from typing import Any

# Put behind the program, with names that it cannot have used. Subclasses (Counter, namedtuple, an
# enumeration of integers) and NumPy's values are told as what they are made of.
ENCODER = """
def {encode}(value, isinstance=isinstance, list=list, str=str, repr=repr, type=type):
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", int.__repr__(value)]
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
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return {encode}(value.tolist())
    return ["other", str(type(value).__name__)]
"""


class Unknown:
    """A value of no plain kind: equal to nothing, itself included."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.kind}>"


def decode(text: str) -> Any:
    """The values behind a line that ENCODER's function made.
    ValueError, TypeError or RecursionError: it made none.
    """
    return _read(json.loads(text))


def _read(encoded: Any) -> Any:
    if not isinstance(encoded, list):
        if encoded is None or isinstance(encoded, bool | str):
            return encoded
        raise ValueError("no value")
    kind, held = encoded
    readers: dict[str, Callable[[Any], Any]] = {
        "int": int,
        "float": float,
        "complex": complex,
        "bytes": bytes.fromhex,
        "list": lambda held: [_read(one) for one in held],
        "tuple": lambda held: tuple(_read(one) for one in held),
        "set": lambda held: {_read(one) for one in held},
        "dict": lambda held: {_read(key): _read(one) for key, one in held},
        "other": Unknown,
    }
    return readers[kind](held)


def same_json(found: Any, expected: Any, tolerance: float) -> bool:
    """Equal as JSON: a tuple is a list, a dictionary's keys are texts, true is not 1, 2.0 is not
    the integer 2. A float that is expected may differ by `tolerance`, relative and absolute.
    """
    if isinstance(expected, float) and not isinstance(expected, bool):
        if isinstance(found, bool) or not isinstance(found, int | float):
            return False
        return found == expected or math.isclose(
            found, expected, rel_tol=tolerance, abs_tol=tolerance
        )
    if isinstance(expected, list):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(same_json(a, b, tolerance) for a, b in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return False
        mine = {_key(key): value for key, value in found.items()}
        return len(mine) == len(found) == len(expected) and all(
            key in mine and same_json(mine[key], value, tolerance)
            for key, value in expected.items()
        )
    return type(found) is type(expected) and bool(found == expected)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=repr)


_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: lambda a, b: type(a) is type(b) and a == b,
    ast.IsNot: lambda a, b: type(a) is not type(b) or a != b, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "len": len, "set": set, "list": list, "tuple": tuple, "round": round,
    "sorted": sorted, "isclose": math.isclose, "bool": bool, "max": max, "min": min, "sum": sum,
}  # fmt: skip


def split(test: ast.expr, asked: list[str]) -> ast.expr:
    """A test such as abs(f(2) - 1.5) < 1e-6 with the program's parts, f(2), taken out: their texts
    go to `asked`, and names that `evaluate` fills stand in their place.
    """
    match test:
        case ast.Constant():
            return test
        case ast.Compare(left, ops, comparators):
            return ast.Compare(split(left, asked), ops, [split(one, asked) for one in comparators])
        case ast.BoolOp(op, values):
            return ast.BoolOp(op, [split(one, asked) for one in values])
        case ast.UnaryOp(ast.Not() | ast.USub() as op, operand):
            return ast.UnaryOp(op, split(operand, asked))
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            return ast.BinOp(split(left, asked), op, split(right, asked))
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() if _closed(test):
            return test
        case ast.Call(ast.Name(name) as function, [_, *_] as arguments, []) if (
            name in _FUNCTIONS and not any(isinstance(one, ast.Starred) for one in arguments)
        ):
            return ast.Call(function, [split(one, asked) for one in arguments], [])
    asked.append(ast.unparse(test))
    return ast.Name(str(len(asked) - 1))


def _closed(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def evaluate(test: ast.expr, values: list[Any]) -> Any:
    """What a test that `split` made is worth. Whatever an operation raises passes through."""
    match test:
        case ast.Name(number):
            return values[int(number)]
        case ast.Compare(left, ops, comparators):
            sides = [evaluate(one, values) for one in (left, *comparators)]
            return all(
                _COMPARE[type(op)](sides[place], sides[place + 1]) for place, op in enumerate(ops)
            )
        case ast.BoolOp(op, parts):
            decide = all if isinstance(op, ast.And) else any
            return decide(evaluate(part, values) for part in parts)
        case ast.UnaryOp(ast.Not(), operand):
            return not evaluate(operand, values)
        case ast.UnaryOp(ast.USub(), operand):
            return -evaluate(operand, values)
        case ast.BinOp(left, op, right):
            return _ARITHMETIC[type(op)](evaluate(left, values), evaluate(right, values))
        case ast.Call(ast.Name(name), arguments, _):
            return _FUNCTIONS[name](*[evaluate(one, values) for one in arguments])
    return ast.literal_eval(test)
