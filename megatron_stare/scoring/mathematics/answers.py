"""The `math` verifier: is the response's answer mathematically the label? Runs in worker processes.

In order, the first that applies decides:
1. the same text, except for spacing and spelling (\\dfrac, $, units, thousands separators):
correct;
2. both plain numbers: compared exactly, decimals within the tolerance;
3. a label in words, or a numeral in a base (52_8): compared as text;
4. a list, set, tuple, interval, union or matrix on both sides: element by element; an inequality
   is the interval that it describes;
5. an answer that is still to be computed (evaluated.py), where the label is a number: wrong. A
   formula copied from the problem equals the label, and so does a sum that is not summed;
6. computer algebra: latex2sympy and math-verify's comparison.
A label that none of them can read makes any answer but its own text unverifiable; an answer that
cannot be read is wrong. So is one that takes all memory, stack or time, which sympy would hide,
where the label alone does not.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.grader import should_treat_as_complex

from megatron_stare.scoring.mathematics import forms
from megatron_stare.scoring.mathematics.evaluated import (
    has_operation,
    is_exact_form,
    is_still_to_compute,
)
from megatron_stare.scoring.mathematics.values import (
    SPACE_IN_NUMBER,
    as_interval,
    chain,
    choice_and_value,
    choice_letter,
    exact_and_rounded,
    has_further_choice,
    plain_number,
    same_number,
    spelled_out,
    without_names,
)
from megatron_stare.scoring.verdict import Verdict, judged, provisionally, unverifiable
from megatron_stare.scoring.verifiers import choice_letters, extract, last_boxed

# A longer answer is not read as mathematics, unless its label is of that size as well.
MAX_CHARACTERS = 2000
# Where no box, tag or answer line is found, `any` reads the last expression of this many last
# characters.
TAIL = 2000
_NORMALISATION = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=True,
    boxed="none",
    equations=False,
)
_DIGITS = 30
_MOST_DIGITS = 10_000
# How far 22/7 \approx 3.14 may be off, relative, for its two sides to be one answer.
_ROUNDED = 0.01
_NOTHING = "\\emptyset"  # an answer that costs nothing to read
_NO_SOLUTION = {"no solution", _NOTHING}
_RESOURCES = (MemoryError, RecursionError)
# Two numbers next to each other, which sympy would multiply; 2^2 3 is a product.
_TWO_NUMBERS = re.compile(r"(?<![\^_\d.])(?<!binom )[\d.]+\s+\d")
_MIXED = re.compile(r"(?<![\^_\w.}])(\d{1,30})\s*\\frac\{(\d{1,30})\}\{(\d{1,30})\}")
_HUNDREDTH = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # latex2sympy's \%

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off


class _UnreadableLabel(Exception):
    pass


@dataclass(frozen=True)
class _Rules:
    """`tolerance` of decimals; `require_evaluated`: auto | always | never."""

    tolerance: float
    require_evaluated: str


def math(
    response: str,
    label: str,
    metadata: dict[str, Any],
    extraction: str = "any",
    tag: str = "answer",
    tolerance: float = 1e-6,
    require_evaluated: str = "auto",
) -> Verdict:
    """1 where the extracted answer equals the label. Has no time limit of its own:
    the pool's deadline holds.

    A label that cannot be read or worked out makes a response unverifiable; a response that is too
    long to be read, or takes all memory or stack, is wrong, and `reason` says why.
    """
    answer = extract(response, extraction, tag)
    gold = last_boxed(label) or label.rpartition("####")[2] or label  # GSM8K: solution #### 12
    gold = _all_answers(gold)
    with _exhaustion() as exhausted:
        try:
            if answer is None and extraction == "any":
                provisionally(judged(False, None))
                answer = _last_expression(response[-TAIL:])
            if answer is None:
                return judged(False, None, exhausted[0] if exhausted else "")
            if len(answer) > max(MAX_CHARACTERS, 4 * len(gold)):
                too_long, plain = f"{len(answer)} characters long", forms.normalise(gold)
                provisionally(judged(False, answer, too_long))
                short = forms.normalise(" ".join(answer.split()))
                same = forms.compact(short) == forms.compact(plain)
                return judged(same, answer, "" if same else too_long)
            right = equal(answer, gold, tolerance, require_evaluated)
        except _UnreadableLabel:
            return unverifiable(
                "the label cannot be read as mathematics, and the answer is not its text", answer
            )
        except _RESOURCES as error:
            exhausted.append(type(error).__name__)
            right = False
    if not exhausted or right:
        return judged(right, answer)
    why = f"{exhausted[0]} while comparing"
    return judged(False, answer, why) if _can_be_read(gold) else unverifiable(why, answer)


def _all_answers(label: str) -> str:
    """A label of several answers in one text; OlympiadBench has them as a list of texts."""
    try:
        found = json.loads(label) if label.startswith("[") else None
    except ValueError:
        return label
    if not found or not all(isinstance(one, str) for one in found):
        return label
    return ", ".join(one.strip(" $") for one in found)


def _can_be_read(gold: str) -> bool:
    """Whether the label alone is within reach: it is compared with nothing."""
    with _exhaustion() as exhausted:
        try:
            _equal(_NOTHING, forms.normalise(gold), _Rules(0.0, "never"))
        except (_UnreadableLabel, *_RESOURCES):
            return False
    return not exhausted


def equal(answer: str, gold: str, tolerance: float = 1e-6, require_evaluated: str = "auto") -> bool:
    """Whether two written answers are the same by the rules of this module, `gold` being the
    label. require_evaluated: as scoring.require_evaluated.
    """
    rules = _Rules(tolerance, require_evaluated)
    return _equal(forms.normalise(answer), forms.normalise(gold), rules)


def _equal_as_text(answer: str, gold: str) -> bool | None:
    """Whether spelling, a choice or a word decides, and how; None: the value does."""
    if forms.compact(answer) == forms.compact(gold):
        return True
    if {forms.word(answer) or answer, forms.word(gold) or gold} == _NO_SOLUTION:
        return True
    if {forms.half_day(answer), forms.half_day(gold)} == {"a", "p"}:
        return False
    chosen = re.fullmatch(r"(?:\\text\s*\{)?\s*\(?\s*([A-J])\s*\)?\s*\}?", gold)
    if chosen:
        return choice_letter(answer) == chosen[1]
    if re.fullmatch("[A-J, ]+", gold) and choice_letters(answer) == choice_letters(gold):
        return True  # BD, B, D
    gold_word = forms.word(gold)
    if gold_word is None:
        return None
    choice = choice_and_value(answer)
    if choice and has_further_choice(choice[1]):
        return False
    letter = choice[0].lower() if choice else answer.strip("() ").lower()
    return gold_word in (forms.word(answer), letter)


def _equal(answer: str, gold: str, rules: _Rules) -> bool:
    answer = forms.as_ratio(answer) if ":" in gold else answer
    decided = _equal_as_text(answer, gold)
    if decided is not None:
        return decided
    choice, offered = choice_and_value(answer), choice_and_value(gold)
    if offered and not has_further_choice(offered[1]):
        letter, value = offered
        if choice:
            return choice[0] == letter and _equal(choice[1], value, rules)
        return choice_letter(answer) == letter or _equal(answer, value, rules)
    if choice and not re.search(rf"(?<![a-zA-Z\\]){choice[0]}(?![a-zA-Z])", gold):
        answer = choice[1]
    value = without_names(answer, gold)[0] if "=" in answer else answer
    sides = exact_and_rounded(value)
    if sides and "\\approx" not in gold and without_names(value, gold)[0] == value:
        near = _Rules(max(rules.tolerance, _ROUNDED), "never")
        return _equal(*sides, near) and any(_equal(side, gold, rules) for side in sides)
    numerals = forms.in_base(answer), forms.in_base(gold)
    if numerals[1]:
        return numerals[0] == numerals[1]
    if forms.is_sentence(answer) and not forms.is_sentence(gold):
        return False
    values = chain(answer) if "=" not in gold else []
    if values:
        same = _Rules(rules.tolerance, "never")
        others = all(_equal(value, gold, same) for value in values[:-1])
        return others and _equal(values[-1], gold, rules)
    answer, gold = without_names(answer, gold)
    answer = forms.without_units(answer, gold)
    gold = forms.without_units(gold, answer, letters=2)  # 5m may be a formula
    answer, gold = map(forms.without_brackets, (answer, gold))
    if forms.compact(answer) == forms.compact(gold):
        return True
    number, expected = plain_number(answer), plain_number(gold)
    if number and expected:
        return same_number(number, expected, rules.tolerance)
    mine, theirs = as_interval(answer), as_interval(gold)
    if mine and theirs and mine[0] and theirs[0] and mine[0] != theirs[0]:
        return False  # x > 2 is not y > 2
    if mine and theirs:
        answer, gold = mine[1], theirs[1]
    found = forms.compound(mine[1] if mine else answer)
    wanted = forms.compound(theirs[1] if theirs else gold)
    if found and wanted:
        kinds = {found.kind, wanted.kind}
        if "ratio" in kinds:
            return found == wanted
        if len(kinds) == 1 or kinds == {"list", "set"}:
            return _same_items(found, wanted, rules)
        if "set" in kinds or any(kind.startswith("determinant") for kind in kinds):
            return False
    if wanted and "\\pm" in gold:  # sympy reads no a \pm b
        gold = ", ".join(wanted.items)
    return _equal_by_algebra(answer, gold, rules)


def _same_items(answer: forms.Compound, gold: forms.Compound, rules: _Rules) -> bool:
    """Element by element; lists and unions in any order."""
    if len(answer.items) != len(gold.items):
        return False
    if gold.kind not in ("list", "set", "union"):
        pairs = zip(answer.items, gold.items, strict=True)
        return all(_equal(mine, theirs, rules) for mine, theirs in pairs)
    left = list(gold.items)
    for mine in answer.items:
        for theirs in left:
            alike = mine.startswith("\\{") == theirs.startswith("\\{")
            if alike and _equal(mine, theirs, rules):
                left.remove(theirs)
                break
        else:
            return False
    return True


def _equal_by_algebra(answer: str, gold: str, rules: _Rules) -> bool:
    expected = _label(gold)
    if _is_unevaluated(answer, gold, expected, rules.require_evaluated):
        return False
    provisionally(judged(False, answer))
    found = _read(answer)
    if found is None:
        return False
    try:
        return _same(found, expected, rules.tolerance)
    except _RESOURCES:
        raise
    except Exception:  # of sympy, which cannot work the answer out
        return False


def _same(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether two objects of sympy are equal. sympy may raise anything over an answer."""
    if _is_number(found) and _is_number(expected):
        return _same_value(found, expected, tolerance)
    both = (found, expected)
    if all(isinstance(one, sympy.Eq) and isinstance(one.rhs, sympy.Expr) for one in both):
        mine, theirs = found.lhs - found.rhs, expected.lhs - expected.rhs
        if len(theirs.free_symbols) > 1 and mine.free_symbols == theirs.free_symbols:
            return bool(sympy.cancel(mine / theirs).is_number)  # 2y = 4x + 6 is y = 2x + 3
    return bool(verify(expected, found, timeout_seconds=None))


def _label(gold: str) -> Any:
    """The label as sympy's object, and its value worked out where it is a number: from here on,
    what takes forever is the answer's doing. _UnreadableLabel: it cannot be read.
    """
    expected = _read(gold)
    if expected is None or (expected is sympy.S.EmptySet and "emptyset" not in gold):
        raise _UnreadableLabel
    if _is_number(expected):
        _value(expected)
    return expected


def _is_unevaluated(answer: str, gold: str, expected: Any, required: str) -> bool:
    """Whether scoring.require_evaluated refuses the answer, which is not the label's own text."""
    constant = _is_number(expected) or {str(s) for s in getattr(expected, "free_symbols", "?")} == {
        "i"
    }
    if required == "never" or (required == "auto" and not constant):
        return False
    if not constant:
        return has_operation(answer, gold)
    number = plain_number(gold)
    rational = number is not None or (expected.is_rational and not is_exact_form(gold))
    if number is not None and number.decimals is not None and is_exact_form(answer):
        rational = False  # 10.8167 is 3\\sqrt{13} to this many places
    return is_still_to_compute(answer, gold, bool(rational))


def _is_number(expression: Any) -> bool:
    return isinstance(expression, sympy.Expr) and bool(expression.is_number)


@functools.lru_cache(maxsize=4096)
def _value(expression: sympy.Expr) -> Any:
    """A number to 30 digits."""
    return sympy.N(expression.doit(), _DIGITS)


def _same_value(found: sympy.Expr, expected: sympy.Expr, tolerance: float) -> bool:
    """Exact numbers must agree to 20 digits, and beyond 1 to 20 places, up to _MOST_DIGITS digits:
    2^{100} - 1 is not 2^{100}. Decimals within the tolerance, but to 12 digits where the label is
    an integer.

    A percentage equals its number as well: 50% is 0.5 and, where one side leaves the sign out, 50.
    """
    decimal = bool(found.atoms(sympy.Float) or expected.atoms(sympy.Float))
    allowed = max(0.0 if expected.is_integer else tolerance, 1e-12) if decimal else 1e-20
    candidates = [(found, expected)]
    # A label that leaves the sign out is at least 1.
    of_label = expected.has(_HUNDREDTH)
    if found.has(_HUNDREDTH) != of_label and (of_label or abs(_value(expected)) >= 1):
        candidates.append((found.subs(_HUNDREDTH, 1), expected.subs(_HUNDREDTH, 1)))
    for pair in candidates:
        one, other = _value(pair[0]), _value(pair[1])
        if not (one.is_finite and other.is_finite):
            continue
        if abs(one - other) <= allowed * max(abs(one), abs(other)):
            return decimal or _same_places(*pair, one)
    return False


def _same_places(found: sympy.Expr, expected: sympy.Expr, value: Any) -> bool:
    """Whether two exact numbers of about this value agree to 20 places."""
    exact = [each.doit() for each in (found, expected)]
    if all(each.is_Rational for each in exact):
        return bool(exact[0] == exact[1])
    digits = _DIGITS + int(sympy.log(1 + abs(value), 10))
    if digits > _MOST_DIGITS:
        return True
    one, other = (sympy.N(each, digits) for each in exact)
    return bool(abs(one - other) <= 1e-20)


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Any:
    """The sympy object of one written answer, or None where it cannot be read."""
    latex = SPACE_IN_NUMBER.sub("", spelled_out(text))
    if _TWO_NUMBERS.search(latex):
        return None
    latex = _MIXED.sub(_as_fraction, latex).rstrip()
    if latex.endswith("\\%") and not re.search(r"\d\s*\\%$", latex):
        number = _read(latex[:-2])
        return number * _HUNDREDTH if _is_number(number) else None
    latex = re.sub(r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)", r"\\sqrt{\1}", latex)
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
    except Exception:  # of many kinds; they say only that this is not a formula
        return None


def _as_fraction(mixed: re.Match[str]) -> str:
    """\\frac{7}{3} of 2\\frac{1}{3}; anything else, which is a product, as it is."""
    whole, above, below = map(int, mixed.groups())
    return f"\\frac{{{whole * below + above}}}{{{below}}}" if above < below else mixed[0]


def _last_expression(text: str) -> str | None:
    """The text of the last formula or number of a response that marks no answer,
    as math-verify finds it.
    """
    found = parse(text, (LatexExtractionConfig(), ExprExtractionConfig()), parsing_timeout=None)
    return next((part for part in found if isinstance(part, str) and part.strip()), None)


@contextmanager
def _exhaustion() -> Iterator[list[str]]:
    """Notes memory and stack running out even where sympy or
    math-verify catches the exception and continues.
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
