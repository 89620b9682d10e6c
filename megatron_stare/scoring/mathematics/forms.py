"""Forms of a written answer that need no computer algebra:
plain text, plain numbers, words, lists and tuples.

math-verify alone is not enough for labels that it reads wrongly: it drops the base of 52_8, reads
`east` as E*a*s*t, and rounds decimals to six places whatever their size. Forms decided here never
reach it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_UNICODE = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": "\\times ", "\u22c5": "\\cdot ",
    "\u00b7": "\\cdot ", "\u00f7": "/", "\u03c0": "\\pi ", "\u221e": "\\infty ", "\u2264": "\\le ",
    "\u2265": "\\ge ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ",
    "\u00b0": "^\\circ ", "\u00b1": "\\pm ", "\u00b2": "^2", "\u00b3": "^3",
    "\u2205": "\\emptyset ", "\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}",
    "\u00be": "\\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ",
    "\uff0c": ",", "\u20ac": "", "\u00a3": "",
}  # fmt: skip
_TRANSLATION = {ord(character): text for character, text in _UNICODE.items()}
_SPACING = re.compile(
    r"(?<!\\)\\(?:[,!;: ]|q?quad(?![a-zA-Z])|(?:left|right|displaystyle|big+|Big+)(?![a-zA-Z]))|~"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mbox|textup|operatorname|emph)\s*\{([^{}]*)\}"
)
_UNIT = re.compile(
    r"(?<=[\d})%])\s*(?:"
    r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{\s*(?!and\b|or\b)[a-zA-Z][a-zA-Z "
    r".\-/]*\}(?:\s*\^\s*(?:\{\d\}|\d))?|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\(?:degrees?|circ)(?![a-zA-Z])"
    r"|(?:\s(?:square|cubic))?\s[a-zA-Z]{3,}(?:\s+[a-zA-Z]{3,})?"
    r")\s*$"
)
_CONJUNCTION = re.compile(r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s")
_PLAIN = re.compile(r"([+-]?)(\d*)\.?(\d*)")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_FRACTION = re.compile(r"([+-]?)(\d*)\\frac(?:\{([+-]?\d+)\}|(\d))(?:\{(\d+)\}|(\d))")
_SLASH = re.compile(r"([+-]?\d+)/(\d+)")
_BASE = re.compile(r"([0-9A-Za-z]+)_(?:\{(\d+)\}|(\d+))")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' \-]*")
_MAX_DIGITS = 4000


@dataclass(frozen=True)
class PlainNumber:
    """An integer, fraction, mixed number or decimal as written;
    `decimals` is None for all but the last.
    """

    value: Fraction
    decimals: int | None = None
    significant: int = 0


def normalise(answer: str) -> str:
    """One spelling of what is written in many:
    no spacing commands, one kind of fraction, no $, no closing stop.
    """
    text = answer.translate(_TRANSLATION).strip()
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
            text = text[len(opening) : -len(closing)].strip()
    text = (
        text.replace("\\$", "")
        .replace("$", "")
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )
    text = text.replace("\\cfrac", "\\frac").replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = re.sub(r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le", text)
    text = re.sub(r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge", text)
    text = _SPACING.sub(" ", text).replace("{,}", ",")
    text = re.sub(r"(?<=\d,) +(?=\d{3}(?:\D|$))", "", text) if re.search(r"\\!", answer) else text
    text = text.strip().rstrip(".").strip()
    return re.sub(r"\s+", " ", text)


def without_units(text: str) -> str:
    """A normalised answer without the unit behind its number; units are not compared."""
    return _UNIT.sub("", text).strip() or text


def compact(text: str) -> str:
    """A normalised answer without any blanks and without braces that group nothing:
    for comparing as text.
    """
    bare = re.sub(r"\s+", "", _TEXT.sub(r"\1", text))
    bare = re.sub(r"(?<=[_^])\{(\w)\}", r"\1", bare)
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), bare)


def plain_number(text: str) -> PlainNumber | None:
    """The number that a normalised answer spells out, or None:
    12, -3.50, 2,125, 7/3, \\frac{7}{3}, 1\\frac{4}{5}.
    """
    bare = re.sub(r"\s+", "", text) if not re.search(r"\d +\d", text) else text
    if len(bare) > _MAX_DIGITS:
        return None
    if _THOUSANDS.fullmatch(bare.lstrip("+-").split(".")[0]):
        bare = bare.replace(",", "")
    if (match := _PLAIN.fullmatch(bare)) and (match[2] or match[3]):
        digits = match[2] + match[3]
        value = Fraction(int(digits), 10 ** len(match[3])) * (-1 if match[1] == "-" else 1)
        decimal = "." in bare and bool(match[3])
        return PlainNumber(value, len(match[3]) if decimal else None, len(digits.lstrip("0")))
    if (match := _SLASH.fullmatch(bare)) and int(match[2]):
        return PlainNumber(Fraction(int(match[1]), int(match[2])))
    if (match := _FRACTION.fullmatch(bare)) and int(match[5] or match[6]):
        value = Fraction(int(match[3] or match[4]), int(match[5] or match[6]))
        if match[2] and not 0 <= value < 1:
            return None  # 2\frac{7}{3} is a product, not a mixed number
        return PlainNumber((int(match[2] or 0) + value) * (-1 if match[1] == "-" else 1))
    return None


def same_number(one: PlainNumber, other: PlainNumber, tolerance: float) -> bool:
    """Exact where neither is a decimal. A decimal may differ by `tolerance`, relative to the larger
    of the two, or be the other number correctly rounded to at least six significant digits.
    """
    difference = abs(one.value - other.value)
    if not difference:
        return True
    if one.decimals is None and other.decimals is None:
        return False
    if difference <= Fraction(tolerance).limit_denominator(10**15) * max(
        abs(one.value), abs(other.value)
    ):
        return True
    if one.decimals is not None and other.decimals is not None:
        return False
    written = one if one.decimals is not None else other
    return written.significant >= 6 and difference * 2 * 10 ** (written.decimals or 0) <= 1


def word(text: str) -> str | None:
    """An answer in words (or one choice letter in brackets), in small letters; None for a formula.

    Inside \\text{} any word counts; bare letters only from three on, for `ab` may be a product.
    """
    inside = _TEXT.sub(r"\1", text).strip()
    bare = inside.strip("()").strip()
    if not _WORDS.fullmatch(bare) or (inside == text and (len(bare) < 3 or "\\" in text)):
        return None
    return re.sub(r"\s+", " ", bare).lower()


def in_base(text: str) -> tuple[str, int] | None:
    """(digits, base) of a numeral such as 4210_{5}; None for anything else."""
    match = _BASE.fullmatch(
        re.sub(r"[\s{}]+(?=\d|\}|$)", lambda m: m.group().replace(" ", ""), text.replace(" ", ""))
    )
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    return match[1].lower().lstrip("0") or "0", int(match[2] or match[3])


_PAIRS = {"(": ")", "[": "]"}


@dataclass(frozen=True)
class Compound:
    """An answer made of answers: `kind` is list (unordered), union, matrix,
    or the two brackets of a tuple.
    """

    kind: str
    items: tuple[str, ...]


def compound(text: str) -> Compound | None:
    """A normalised answer's outermost list, set, tuple, interval, union or matrix;
    None where it is a single one.
    """
    matrix = re.fullmatch(
        r"\\begin\s*\{[pbv]?matrix\}(.*)\\end\s*\{[pbv]?matrix\}", text, re.DOTALL
    )
    if matrix:
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[1]) if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        return Compound(f"matrix {shape}", tuple(cell.strip() for row in rows for cell in row))
    unions = _split(text, "\\cup")
    if len(unions) > 1:
        return Compound("union", tuple(unions))
    if (
        text.startswith("\\{")
        and text.endswith("\\}")
        and len(text) > 4
        and _enclosed(text[1:-2] + "}")
    ):
        inner = text[2:-2].strip()
        return (
            None if re.search(r"\\mid|\||:", inner) else Compound("list", tuple(_elements(inner)))
        )
    if text[:1] in _PAIRS and text[-1:] in ")]" and _enclosed(text):
        items = _split(text[1:-1], ",")
        return Compound(text[0] + text[-1], tuple(items)) if len(items) > 1 else None
    items = _elements(text)
    return Compound("list", tuple(items)) if len(items) > 1 else None


def without_brackets(text: str) -> str:
    """A normalised answer without round brackets that hold all of it and no list: ((5)) is 5."""
    while (
        text.startswith("(")
        and text.endswith(")")
        and _enclosed(text)
        and len(_split(text[1:-1], ",")) == 1
    ):
        text = text[1:-1].strip()
    return text


def _elements(text: str) -> list[str]:
    """The elements of a list; a +- b counts as two, and a shared `x =` is dropped from each."""
    if _THOUSANDS.fullmatch(text.lstrip("+-").strip()):
        return [text]
    items = []
    for item in _split(_CONJUNCTION.sub(",", text), ","):
        pieces = re.split(r"\\pm(?![a-zA-Z])", item)
        items += (
            [f"{pieces[0]}{sign}{pieces[1]}".strip() for sign in "+-"]
            if len(pieces) == 2
            else [item]
        )
    named = [re.fullmatch(r"([a-zA-Z])\s*=(.+)", item) for item in items]
    if len(items) > 1 and all(named) and len({match[1] for match in named if match}) == 1:
        return [match[2].strip() for match in named if match]
    return items


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator outside of all brackets; empty pieces (a comma too many) are dropped."""
    pieces, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text.startswith(separator, at) and depth == 0:
            pieces.append(text[start:at])
            at = start = at + len(separator)
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return [piece.strip() for piece in [*pieces, text[start:]] if piece.strip()]


def _enclosed(text: str) -> bool:
    """Whether the first bracket is closed by the last character and not before."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth <= 0:
            return at == len(text) - 1 and depth == 0
    return False
