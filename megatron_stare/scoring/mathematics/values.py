"""A value as it is written: its number, read exactly and without computer algebra; the text around
it: its name (x = 5), a choice letter ((C) 12), about (\\approx 3.14); and inequalities, which say
the same as intervals (x > 2 is (2, \\infty)).

math-verify reads 4.5e33 as 4.5 times Euler's number times 33, drops the bar of 0.\\overline{3} and
rounds decimals to six places whatever their size. What is read here never reaches it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

# Digits that a number may have, and the largest power of ten: both are read in microseconds.
MAX_DIGITS = 4000
THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
SPACE_IN_NUMBER = re.compile(r"(?<=\d) (?=\d{3}(?!\d))")  # 12 000
_INTEGER = r"(?:\{([+-]?\d+)\}|([+-]?\d+))"
_DECIMAL = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?(?:[eE]" + _INTEGER + ")?")
_FRACTION = re.compile(r"([+-]?)(\d*)\\frac(?:\{([+-]?\d+)\}|(\d))(?:\{(\d+)\}|(\d))")
_SLASH = re.compile(r"([+-]?\d+)[/:](\d+)")
_MIXED = re.compile(r"([+-]?) ?(\d+) +(\d+) ?/ ?(\d+)")
_ELLIPSIS = re.compile(r"([+-]?)(\d*)\.(\d*?)(\d+?)\4{2,}\\(?:l|c)?dots")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot)(?:\{(\d+)\}|(\d))")
_SCIENTIFIC = re.compile(
    r"([+-]?)(?:(\d*)(?:\.(\d*))?(?:\\times|\\cdot|\*|x))?\{?10\}?(?:\^|\*\*)" + _INTEGER
)
_POWER = re.compile(r"([+-]?)(\d+)(?:\^|\*\*)" + _INTEGER)
_VARIABLE = (
    r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|nu|phi|varphi|omega|rho|tau|sigma))"
    r"(?:_(?:\w|\{\\?[\w,\s]+\}))?"
)
_POINTS = r"[A-Z]{2,4}"
_DRESSED = (
    rf"\\(?:vec|hat|bar|tilde|overline|overrightarrow)\s*\{{?\s*(?:{_VARIABLE}|{_POINTS})\s*\}}?"
)
_SYMBOL = rf"(?:{_VARIABLE}|{_DRESSED})"
_FUNCTION = (
    rf"(?:{_VARIABLE}|\\(?:operatorname|text|mathrm|mathbb)\s*\{{\w+\}}|\\(?:gcd|lcm|max|min)\s*)"
    r"(?:'*|\s*\^\s*\{-1\})\s*"
)
# Names that an answer may give the value of: x, f(x), f'(3), (x, y), a + b, ab, m/n, AB, |AB|,
# [ABC], \\angle A, \\text{Area}. None has a number as a factor or a power: 2x = 4 says something
# else.
_NAMED = (
    rf"{_SYMBOL}'*|P\([^()]*\)|{_FUNCTION}(?:\([^()=<>]*(?:\([^()=<>]*\))?[^()=<>]*\)|\[[^\[\]=<>]*\])"
    rf"|\({_VARIABLE}(?:,\s*{_VARIABLE})+\)|{_SYMBOL}(?:\s*(?:[+-]|\\cdot)?\s*{_SYMBOL}){{1,4}}"
    rf"|\\frac\s*\{{\s*{_VARIABLE}\s*\}}\s*\{{\s*{_VARIABLE}\s*\}}|{_VARIABLE}\s*/\s*{_VARIABLE}"
    rf"|\\lim\s*_\s*\{{[^{{}}]*\}}\s*{_VARIABLE}\([^()]*\)|\\(?:max|min)\s*{_VARIABLE}|\\l(?:floor|ceil)\s*{_VARIABLE}\s*\\r(?:floor|ceil)"
    rf"|(?:m\s*)?\\(?:angle|triangle|det)\s*[A-Z]{{1,4}}|\[\s*{_POINTS}\s*\]"
    rf"|\\?\|\s*(?:{_SYMBOL}|{_POINTS})\s*\\?\||{_POINTS}|\\text\s*\{{[^{{}}=<>\d]*\}}\s*[A-Z]{{0,4}}"
)
_NAME = re.compile(
    rf"({_NAMED})"
    r"\s*(?:=|\\approx(?![a-zA-Z]))\s*([^=<>]+)"
)
_TURNED_NAME = re.compile(rf"([^=<>a-zA-Z]+?)\s*=\s*({_NAMED})")
_CHOICE = re.compile(
    r"(?:\(([A-J])\)|([A-J])[).:]|\\(?:text(?:bf|it|rm)?|math(?:rm|bf))\s*"
    r"\{\s*\(?([A-J])\s*[).:]*\s*\})[\s:]*"
    r"(?=[^\s:.=^_!,;)\]}+*/]|\.\d)(?!\\(?:cdot|times)(?![a-zA-Z]))(.+)",
    re.DOTALL,
)
_FURTHER_CHOICE = re.compile(
    r"\([A-J]\)|(?<![a-zA-Z\\])[A-J][).:]|(?:\b(?:or|and|not)|,)\s*[A-J](?![\w'])|^\s*[A-J]\s*$"
)
_LETTER = re.compile(
    r"(?:the\s+)?(?:final\s+|correct\s+)?(?:option|choice|answer)?(?:\s+is)?\s*:?\s*[\[({]*\s*([a-jA-J])\s*[\])}]*\s*[.:]?",
    re.I,
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_COMPARISON = re.compile(r"(<|>|\\(?:le|ge|ne|neq)(?![a-zA-Z]))")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\sor\s|\\(?:lor|vee|cup)(?![a-zA-Z])")
_AND = re.compile(r"\\text\s*\{\s*and\s*\}|\sand\s|\\(?:land|wedge)(?![a-zA-Z])")
_SET_BUILDER = re.compile(
    rf"\\\{{\s*({_VARIABLE})\s*(?:\\in\s*(?:\\mathbb\s*\{{?R\}}?|\\R)\s*)?(?:\\mid|\||:)(.+)\\\}}",
    re.DOTALL,
)
_MEMBER = re.compile(rf"({_VARIABLE})\s*\\in(?![a-zA-Z])\s*(.+)", re.DOTALL)
_REALS = re.compile(r"\\mathbb\s*(?:\{\s*R\s*\}|R)|\\(?:R|Reals)")
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "\\neq": "\\ne"}


@dataclass(frozen=True)
class PlainNumber:
    """A number as written; `decimals` are its places after the point, None if it is exact:
    an integer, a fraction, a power. A decimal's places are negative from 4.5e33 on.
    """

    value: Fraction
    decimals: int | None = None
    significant: int = 0


def plain_number(text: str) -> PlainNumber | None:
    """The number that a normalised answer spells out, or None: 12, -3.50, 2,125, 7/3,
    \\frac{7}{3}, 1\\frac{4}{5}, 4.5e33, 4.5 \\times 10^{33}, 0.\\overline{3}, 2^{10}.
    """
    text = SPACE_IN_NUMBER.sub("", text)
    bare = re.sub(r"\s+", "", text) if not re.search(r"\d +\d", text) else text
    if len(bare) > MAX_DIGITS:
        return None
    if THOUSANDS.fullmatch(bare.lstrip("+-").split(".")[0]):
        bare = bare.replace(",", "")
    return next((found for read in _READERS if (found := read(bare))), None)


def same_number(found: PlainNumber, expected: PlainNumber, tolerance: float) -> bool:
    """Exact where neither is a decimal, and where an integer is expected: 203.9999 is not 204.

    Else a decimal may differ by `tolerance`, relative to the larger of the two, or be the other
    number correctly rounded to at least six significant digits.
    """
    difference = abs(found.value - expected.value)
    if not difference:
        return True
    if found.decimals is None and expected.decimals is None:
        return False
    if expected.decimals is None and expected.value.denominator == 1:
        return False
    if difference <= Fraction(tolerance).limit_denominator(10**15) * max(
        abs(found.value), abs(expected.value)
    ):
        return True
    if found.decimals is not None and expected.decimals is not None:
        return False
    written = found if found.decimals is not None else expected
    return written.significant >= 6 and difference * 2 * _ten(written.decimals or 0) <= 1


def spelled_out(text: str) -> str:
    """A formula with its 4.5e33 as 4.5 \\times 10^{33}, for parsers that take e for Euler's
    number. A digit must stand on either side: 2e^3 and 3e stay.
    """
    return re.sub(
        r"(?<![\w\\.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])", r"\1 \\times 10^{\2}", text
    )


def _decimal(bare: str) -> PlainNumber | None:
    match = _DECIMAL.fullmatch(bare) or _SCIENTIFIC.fullmatch(bare)
    if not match:
        return None
    without_mantissa = match[2] is None  # 10^5
    whole, places = ("1", "") if without_mantissa else (match[2], match[3] or "")
    digits, exponent = whole + places, match[4] or match[5] or "0"
    if not digits or len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS:
        return None
    shift = int(exponent) - len(places)
    value = Fraction(int(digits)) * _ten(shift) * _sign(match[1])
    return PlainNumber(value, -shift if places else None, len(digits.lstrip("0")))


def _slash(bare: str) -> PlainNumber | None:
    match = _SLASH.fullmatch(bare)
    if not match or not int(match[2]):
        return None
    return PlainNumber(Fraction(int(match[1]), int(match[2])))


def _mixed(bare: str) -> PlainNumber | None:
    match = _MIXED.fullmatch(bare)
    if not match or not int(match[3]) < int(match[4]):
        return None
    return PlainNumber((int(match[2]) + Fraction(int(match[3]), int(match[4]))) * _sign(match[1]))


def _fraction(bare: str) -> PlainNumber | None:
    match = _FRACTION.fullmatch(bare)
    if not match or not int(match[5] or match[6]):
        return None
    value = Fraction(int(match[3] or match[4]), int(match[5] or match[6]))
    if match[2] and not 0 <= value < 1:
        return None  # 2\frac{7}{3} is a product, not a mixed number
    return PlainNumber((int(match[2] or 0) + value) * _sign(match[1]))


def _repeating(bare: str) -> PlainNumber | None:
    match = _REPEATING.fullmatch(bare) or _ELLIPSIS.fullmatch(bare)
    if not match:
        return None
    sign, whole, places, *periods = match.groups()
    period = next(filter(None, periods))
    value = Fraction(int(whole + places or 0)) + Fraction(int(period), 10 ** len(period) - 1)
    return PlainNumber(value / 10 ** len(places) * _sign(sign))


def _power(bare: str) -> PlainNumber | None:
    match = _POWER.fullmatch(bare)
    if not match:
        return None
    base, exponent = int(match[2]), match[3] or match[4]
    if len(exponent) > 5 or not base or abs(int(exponent)) * len(match[2]) > MAX_DIGITS:
        return None
    return PlainNumber(Fraction(base) ** int(exponent) * _sign(match[1]))


_READERS: tuple[Callable[[str], PlainNumber | None], ...] = (
    *(_decimal, _slash, _mixed, _fraction, _repeating, _power),
)


def _sign(sign: str) -> int:
    return -1 if sign == "-" else 1


def _ten(exponent: int) -> Fraction:
    return Fraction(10) ** exponent


def without_names(answer: str, gold: str) -> tuple[str, str]:
    """Both without `x =` in front, where that names a value: N = 2,125 is 2125. Where both are
    named and differ, both keep their names: x = 5 is not y = 5.
    """
    answer, gold = (
        _TURNED_NAME.sub(r"\2=\1", text) if _TURNED_NAME.fullmatch(text) else text
        for text in (answer, gold)
    )
    point = re.fullmatch(r"(?:[A-Z]|\\text\s*\{\s*(?:the )?point\s*\})\s*(\(.*,.*\))", answer)
    if point and gold.startswith("("):
        answer = point[1]
    mine, theirs = _NAME.fullmatch(answer), _NAME.fullmatch(gold)
    if ("=" in answer and not mine) or ("=" in gold and not theirs):
        return answer, gold  # an equation
    names = {re.sub(r"\s", "", one[1]) for one in (mine, theirs) if one}
    if len(names) > 1 and names != {"y", "f(x)"}:
        return answer, gold
    return (mine[2].strip() if mine else answer), (theirs[2].strip() if theirs else gold)


def choice_and_value(text: str) -> tuple[str, str] | None:
    """("C", "12") of (C) 12, C. 12 or \\textbf{(C)} 12; None where no value follows a letter."""
    match = _CHOICE.fullmatch(text)
    return (match[1] or match[2] or match[3], match[4].strip()) if match else None


def chain(text: str) -> list[str]:
    """The values of x = 3 + 4 = 7 or 3 + 4 = 7, which must all be one; empty for a single one, and
    for an equation.
    """
    sides = [side.strip() for side in re.split(r"(?<![<>\\])=", text)]
    if len(sides) > 1 and re.fullmatch(_NAMED, sides[0]):
        sides = sides[1:]
    letters = re.search("[a-zA-Z]", _COMMAND.sub("", " ".join(sides)))
    return sides if len(sides) > 1 and not letters else []


def choice_letter(text: str) -> str | None:
    """The one letter that an answer chooses: C, (C), [C], C), \\text{Option C}, (C) 12."""
    bare = re.sub(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf))\s*\{([^{}]*)\}", r"\1", text)
    alone = _LETTER.fullmatch(bare.strip())
    if alone:
        return alone[1].upper()
    chosen = choice_and_value(text) or choice_and_value(bare)
    return chosen[0] if chosen and not has_further_choice(chosen[1]) else None


def has_further_choice(value: str) -> bool:
    """Whether what stands after a choice letter chooses again: (A) or (C)."""
    return bool(_FURTHER_CHOICE.search(value))


def exact_and_rounded(text: str) -> tuple[str, str] | None:
    """The two sides of 22/7 \\approx 3.142; None for anything else, also for two numbers of which
    neither is the other one rounded: 101 \\approx 100.0 would be two answers.
    """
    sides = [side.strip() for side in re.split(r"\\approx(?![a-zA-Z])", text)]
    if len(sides) != 2 or not all(sides):
        return None
    one, other = map(plain_number, sides)
    if one and other:
        places = [each.decimals for each in (one, other) if each.decimals is not None]
        if not places or abs(one.value - other.value) >= _ten(-min(places)):
            return None
    return sides[0], sides[1]


def as_interval(text: str) -> tuple[str, str] | None:
    """(variable, interval or union as text) of a normalised inequality, else None.

    x > 2; 2 < x \\le 5; x < 2 or x > 3; x \\ne 3; x \\in (2, 5); \\{x \\mid x > 2\\}; \\mathbb{R}
    (whose variable is empty).
    """
    if _REALS.fullmatch(text):
        return "", "(-\\infty, \\infty)"
    without = re.fullmatch(rf"(?:{_REALS.pattern})\s*\\setminus\s*\\\{{([^{{}},]+)\\\}}", text)
    if without:
        return "", f"(-\\infty, {without[1]}) \\cup ({without[1]}, \\infty)"
    builder = _SET_BUILDER.fullmatch(text)
    if builder:
        inner = as_interval(builder[2].strip())
        return ("", inner[1]) if inner and inner[0] == builder[1] else None
    member = _MEMBER.fullmatch(text)
    if member and member[2][:1] in tuple("([\\"):
        whole = as_interval(member[2])
        return member[1], whole[1] if whole and not whole[0] else member[2].strip()
    both = [_single(piece.strip()) for piece in _AND.split(text)]
    if len(both) == 2 and both[0] and both[1]:
        return _overlap(both[0], both[1])
    found = [_single(piece.strip()) for piece in _OR.split(text)]
    known = [piece for piece in found if piece]
    if len(known) < len(found) or len({variable for variable, _ in known}) != 1:
        return None
    return known[0][0], " \\cup ".join(interval for _, interval in known)


def _single(text: str) -> tuple[str, str] | None:
    """One inequality: its variable on one side, or in the middle of two of one direction."""
    pieces = [piece.strip() for piece in _COMPARISON.split(text)]
    if not all(pieces):
        return None
    if len(pieces) == 3:
        left, sign, right = pieces
        inside = re.fullmatch(rf"\|\s*({_VARIABLE})\s*\|", left)
        if inside and _is_of(inside[1], right):
            if sign in _OPENING:
                return inside[1], f"{_OPENING[sign]}-({right}), {right}{_CLOSING[sign]}"
            ends = {">": ")(", "\\ge": "]["}.get(sign)
            if ends:
                far = f"(-\\infty, -({right}){ends[0]} \\cup {ends[1]}{right}, \\infty)"
                return inside[1], far
        if not re.fullmatch(_VARIABLE, left):
            left, sign, right = right, _TURNED[sign], left
        return _half_line(left, sign, right)
    if len(pieces) == 5:
        low, first, middle, second, high = pieces
        if first in (">", "\\ge"):
            low, first, second, high = high, _TURNED[second], _TURNED[first], low
        if first in ("<", "\\le") and second in ("<", "\\le") and _is_of(middle, low, high):
            return middle, f"{_OPENING[first]}{low}, {high}{_CLOSING[second]}"
    return None


def _overlap(one: tuple[str, str], other: tuple[str, str]) -> tuple[str, str] | None:
    """The interval of two half-lines that open towards each other: x > 1 and x < 2."""
    lower, upper = (one, other) if one[1].endswith("\\infty)") else (other, one)
    if one[0] != other[0] or "\\cup" in one[1] + other[1]:
        return None
    if not lower[1].endswith(", \\infty)") or not upper[1].startswith("(-\\infty, "):
        return None
    low, high = lower[1].removesuffix(", \\infty)"), upper[1].removeprefix("(-\\infty, ")
    ends = plain_number(low[1:]), plain_number(high[:-1])
    if ends[0] and ends[1] and ends[0].value >= ends[1].value:
        return None
    return one[0], f"{low}, {high}"


_OPENING, _CLOSING = {"<": "(", "\\le": "["}, {"<": ")", "\\le": "]"}


def _half_line(variable: str, sign: str, bound: str) -> tuple[str, str] | None:
    if not _is_of(variable, bound):
        return None
    intervals = {
        "<": f"(-\\infty, {bound})",
        "\\le": f"(-\\infty, {bound}]",
        ">": f"({bound}, \\infty)",
        "\\ge": f"[{bound}, \\infty)",
    }
    return variable, intervals.get(sign, f"(-\\infty, {bound}) \\cup ({bound}, \\infty)")


def _is_of(variable: str, *bounds: str) -> bool:
    """Whether it is a variable, and one that no bound contains."""
    alone = rf"(?<![a-zA-Z\\]){re.escape(variable)}(?![a-zA-Z])"
    return bool(re.fullmatch(_VARIABLE, variable)) and not any(
        re.search(alone, bound) for bound in bounds
    )
