"""Environments that come with the project: Python in a sandbox, and a calculator."""

from __future__ import annotations

import ast
import asyncio
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from megatron_stare.config import UserError
from megatron_stare.records import Prompt
from megatron_stare.rollout.sandbox.sandbox import CodeRunner, Sandbox
from megatron_stare.rollout.tools.calls import CODE_TOOL, Tool
from megatron_stare.rollout.tools.environment import (
    CodeError,
    MakeEnvironment,
    ToolError,
    function_tool,
    hold_clock,
)

PYTHON_TOOL = function_tool(
    CODE_TOOL,
    "Run Python code. Shows what it prints, and the value of a last expression.",
    {"code": {"type": "string", "description": "the code"}},
    ["code"],
)
CALCULATOR_TOOL = function_tool(
    "calculator",
    "Evaluate an arithmetic expression with + - * / // % ** ( ), sqrt, abs, min, max, factorial, "
    "gcd, pi and e.",
    {"expression": {"type": "string", "description": "for example (3 + 4) * 2 ** 5"}},
    ["expression"],
)
Number = int | float | Fraction
LONGEST_EXPRESSION = 1000
# 2 ** 4096 has 1,234 digits: long enough for contests, short enough to be quick and readable.
MOST_BITS = 4096


class PythonEnvironment:
    """The tool `python`: each call in a fresh interpreter, or, stateful, all in one."""

    tools: Sequence[Tool] = (PYTHON_TOOL,)

    def __init__(self, runner: CodeRunner, stateful: bool = False) -> None:
        self._runner = runner
        if stateful and not isinstance(runner, Sandbox):
            raise UserError(
                "sandbox.stateful=true needs the sandbox of this machine; leave sandbox.url empty"
            )
        self._session = runner.session() if stateful and isinstance(runner, Sandbox) else None
        self._turn = asyncio.Lock()

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The output of the code and its value. CodeError: it failed; the message also has its
        errors, and why it ended early. A session runs the calls of a turn in their order, and takes
        one of the sandbox's places for all of them.
        """
        code, on_start = arguments["code"], hold_clock()
        if self._session is None:
            result, lost = await self._runner.run_async(code, on_start), ""
        else:
            async with self._turn:
                result = await self._session.run_async(code, on_start)
            lost = "" if result.alive else "\n[all variables are lost]"
        if not result.ok:
            raise CodeError(result.message() + lost)
        return result.message() + lost

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close_async()


def python_environments(runner: CodeRunner, stateful: bool = False) -> MakeEnvironment:
    """Makes a PythonEnvironment for each Prompt; all share the sandbox, which its owner closes."""

    def make(prompt: Prompt) -> PythonEnvironment:
        return PythonEnvironment(runner, stateful)

    return make


class CalculatorEnvironment:
    """The tool `calculator`: exact integers and fractions where possible, floats otherwise."""

    tools: Sequence[Tool] = (CALCULATOR_TOOL,)

    def __init__(self, prompt: Prompt) -> None:
        """Nothing depends on the prompt."""

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The value; ToolError for what is not arithmetic."""
        return show(evaluate(arguments["expression"]))

    async def close(self) -> None:
        """Nothing to release."""


def evaluate(expression: str) -> Number:
    """The value of an arithmetic expression;
    ToolError for anything else. Division of integers is exact.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"an expression may have at most {LONGEST_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
    except SyntaxError as error:
        raise ToolError(f"{expression!r} is not an arithmetic expression ({error.msg})") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r} cannot be evaluated ({error})") from None
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    return value


def show(value: Number) -> str:
    """A number as text; a fraction with its decimal value."""
    if isinstance(value, Fraction) and value.denominator > 1:
        try:
            return f"{value} = {float(value):.12g}"
        except OverflowError:  # beyond 1e308
            return str(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ToolError(
        f"{ast.unparse(node)!r} is not allowed; use numbers, + - * / // % ** and "
        f"{', '.join(_FUNCTIONS)}"
    )


def _power(base: Number, exponent: Number) -> Number:
    """base ** exponent, refused before it is computed where it would be too large."""
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        exponent = exponent.numerator
    if not isinstance(exponent, int) or isinstance(base, float):
        value = float(base) ** float(exponent)
        if isinstance(value, complex):
            raise ToolError(f"{show(base)} ** {show(exponent)} is not a real number")
        return value
    exact = Fraction(base)
    bits = max(exact.numerator.bit_length(), exact.denominator.bit_length())
    if abs(exact) not in (0, 1) and bits * abs(exponent) > MOST_BITS:
        raise ToolError(f"{show(base)} ** {exponent} is too large")
    return _bounded(exact**exponent)


def _bounded(value: Number) -> Number:
    if isinstance(value, int | Fraction):
        exact = Fraction(value)
        if max(exact.numerator.bit_length(), exact.denominator.bit_length()) > MOST_BITS:
            raise ToolError(f"a number has more than {MOST_BITS} bits")
        return exact
    return value


def _factorial(value: Number) -> Number:
    if value != int(value) or not 0 <= value <= 400:
        raise ToolError(f"factorial({show(value)}): only of whole numbers from 0 to 400")
    return math.factorial(int(value))


def _gcd(*values: Number) -> Number:
    if any(value != int(value) for value in values):
        raise ToolError("gcd: only of whole numbers")
    return math.gcd(*map(int, values))


def _square_root(value: Number) -> Number:
    if isinstance(value, float):
        return math.sqrt(value)
    exact = Fraction(value)
    if exact >= 0:
        roots = math.isqrt(exact.numerator), math.isqrt(exact.denominator)
        if (roots[0] ** 2, roots[1] ** 2) == (exact.numerator, exact.denominator):
            return Fraction(*roots)
    return math.sqrt(exact)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    "sqrt": _square_root,
    "abs": abs,
    "min": min,
    "max": max,
    "factorial": _factorial,
    "gcd": _gcd,
}
