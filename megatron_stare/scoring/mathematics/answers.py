"""The `math` verifier: is the response's answer mathematically the label? Runs in worker processes.

In order, the first that applies decides:
1. the same text, but for spacing and spelling (\\dfrac, $, units, thousands separators): correct;
2. both plain numbers: compared exactly, decimals within the tolerance;
3. a label in words, or a numeral in a base (52_8): compared as text;
4. a list, set, tuple, interval, union or matrix on both sides: element by element;
5. computer algebra: latex2sympy and math-verify's comparison.
A label that none of them can read makes any answer but its own text unverifiable; an answer that
cannot be read is wrong. Whatever runs out of memory or stack on the way is unverifiable, although
sympy would hide it.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.grader import should_treat_as_complex

from megatron_stare.scoring.mathematics import forms
from megatron_stare.scoring.mathematics.extraction import extract, last_boxed
from megatron_stare.scoring.verdict import Verdict, judged, unverifiable

# A longer answer is not read as mathematics, unless its label is of that size as well.
MAX_CHARACTERS = 2000
# Where no box, tag or answer line is found, `any` reads the last expression of this many last
# characters.
TAIL = 2000
_NORMALISATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
)
_DIGITS = 30
_RESOURCES = (MemoryError, RecursionError)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off


class _UnreadableLabel(Exception):
    pass


def math(
    response: str,
    label: str,
    metadata: dict[str, Any],
    extraction: str = "any",
    tag: str = "answer",
    tolerance: float = 1e-6,
) -> Verdict:
    """1 where the extracted answer equals the label. Has no time limit of its own:
    the pool's deadline holds.
    """
    with _exhaustion() as exhausted:
        answer = extract(response, extraction, tag)
        if answer is None and extraction == "any":
            answer = _last_expression(response[-TAIL:])
        if answer is None:
            return judged(False, None) if not exhausted else unverifiable(exhausted[0])
        gold = last_boxed(label) or label
        if len(answer) > max(MAX_CHARACTERS, 4 * len(gold)):
            same = forms.compact(forms.normalise(answer)) == forms.compact(forms.normalise(gold))
            return (
                judged(True, answer)
                if same
                else unverifiable(f"an answer of {len(answer)} characters", answer)
            )
        try:
            right = equal(answer, gold, tolerance)
        except _UnreadableLabel:
            return unverifiable(
                "the label cannot be read as mathematics, and the answer is not its text", answer
            )
        except _RESOURCES as error:
            return unverifiable(f"{type(error).__name__} while comparing", answer)
    if exhausted and not right:
        return unverifiable(f"{exhausted[0]} while comparing", answer)
    return judged(right, answer)


def equal(answer: str, gold: str, tolerance: float = 1e-6) -> bool:
    """Whether two written answers are the same by the rules of this module,
    `gold` being the label.
    """
    answer, gold = forms.normalise(answer), forms.normalise(gold)
    return _equal(answer, gold, tolerance)


def _equal(answer: str, gold: str, tolerance: float) -> bool:
    if forms.compact(answer) == forms.compact(gold):
        return True
    gold_word = forms.word(gold)
    if gold_word is not None:
        return forms.word(answer) == gold_word or answer.strip("() ").lower() == gold_word
    answer, gold = (forms.without_brackets(forms.without_units(text)) for text in (answer, gold))
    if forms.compact(answer) == forms.compact(gold):
        return True
    numbers = forms.plain_number(answer), forms.plain_number(gold)
    if numbers[0] and numbers[1]:
        return forms.same_number(numbers[0], numbers[1], tolerance)
    numerals = forms.in_base(answer), forms.in_base(gold)
    if numerals[1]:
        return numerals[0] == numerals[1]
    several = forms.compound(answer), forms.compound(gold)
    if several[0] and several[1] and several[0].kind == several[1].kind:
        return _same_items(several[0], several[1], tolerance)
    return _equal_by_algebra(answer, gold, tolerance)


def _same_items(answer: forms.Compound, gold: forms.Compound, tolerance: float) -> bool:
    """Element by element; lists and unions in any order."""
    if gold.kind not in ("list", "union"):
        return len(answer.items) == len(gold.items) and all(
            _equal(mine, theirs, tolerance)
            for mine, theirs in zip(answer.items, gold.items, strict=True)
        )
    if len(answer.items) != len(gold.items):
        return False
    left = list(gold.items)
    for mine in answer.items:
        found = next(
            (place for place, theirs in enumerate(left) if _equal(mine, theirs, tolerance)), None
        )
        if found is None:
            return False
        left.pop(found)
    return True


def _equal_by_algebra(answer: str, gold: str, tolerance: float) -> bool:
    expected = _read(gold)
    if expected is None or (
        expected is sympy.S.EmptySet and "empty" not in gold and "varnothing" not in gold
    ):
        raise _UnreadableLabel
    found = _read(answer)
    if found is None:
        return False
    if _is_number(found) and _is_number(expected):
        return _same_value(found, expected, tolerance)
    return bool(verify(expected, found, timeout_seconds=None))


def _is_number(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and bool(expression.is_number)


def _same_value(found: sympy.Expr, expected: sympy.Expr, tolerance: float) -> bool:
    """Numbers to 30 digits: exact ones must agree to 20 of them, decimals within the tolerance.

    A percentage equals its number as well: 50% is 0.5 and, where the label leaves the sign out, 50.
    """
    decimal = bool(found.atoms(sympy.Float) or expected.atoms(sympy.Float))
    allowed = max(tolerance, 1e-12) if decimal else 1e-20
    candidates = [(found, expected)]
    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if found.has(hundredth) != expected.has(hundredth):
        candidates.append((found.subs(hundredth, 1), expected.subs(hundredth, 1)))
    for pair in candidates:
        one, other = (sympy.N(side.doit(), _DIGITS) for side in pair)
        if not (one.is_finite and other.is_finite):
            continue
        if abs(one - other) <= allowed * max(abs(one), abs(other)):
            return True
    return False


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Any:
    """The sympy object of one written answer, or None where it cannot be read."""
    latex = re.sub(r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    latex = re.sub(
        r"(?<![\\a-zA-Z])(pi|infty|sqrt|sin|cos|tan|cot|ln|log)(?![a-zA-Z])", r"\\\1 ", latex
    )
    latex = latex.replace("**", "^").replace("\u221a", "\\sqrt ")
    try:
        latex = normalize_latex(latex, config=_NORMALISATION)
        return latex2sympy(
            latex,
            is_real=not should_treat_as_complex(latex),
            convert_degrees=False,
            normalization_config=None,
        )
    except _RESOURCES:
        raise
    except (
        Exception
    ):  # the parser's own errors are of many kinds, and say only that this is no formula
        return None


def _last_expression(text: str) -> str | None:
    """The text of the last formula or number of a response that marks no answer,
    as math-verify finds it.
    """
    found = parse(text, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=None)
    return next((part for part in found if isinstance(part, str) and part.strip()), None)


@contextmanager
def _exhaustion() -> Iterator[list[str]]:
    """Notes memory and stack running out even where sympy or
    math-verify catches the exception and goes on.
    """
    noted: list[str] = []

    def note(code: Any, offset: int, error: BaseException) -> None:
        if isinstance(error, _RESOURCES) and not noted:
            noted.append(type(error).__name__)

    monitoring = sys.monitoring
    tool = next((number for number in (4, 3, 5) if monitoring.get_tool(number) is None), None)
    if tool is None:
        yield noted
        return
    monitoring.use_tool_id(tool, "megatron_stare")
    monitoring.register_callback(tool, monitoring.events.RAISE, note)
    monitoring.set_events(tool, monitoring.events.RAISE)
    try:
        yield noted
    finally:
        monitoring.set_events(tool, monitoring.events.NO_EVENTS)
        monitoring.register_callback(tool, monitoring.events.RAISE, None)
        monitoring.free_tool_id(tool)
