"""Numbers as they are written, read exactly and without computer algebra.

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
