"""What stands around a value: its name (x = 5), a choice letter ((C) 12), about (\\approx 3.14);
and inequalities, which say the same as intervals (x > 2 is (2, \\infty)).
"""

from __future__ import annotations

import re

_VARIABLE = (
    r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|nu|phi|varphi|omega|rho|tau))"
    r"(?:_(?:\w|\{\w+\}))?"
)
# What an answer may be the value of: x, f(x), f(3), (x, y), a + b, AB, |AB|, \\angle A.
_NAMED = (
    rf"{_VARIABLE}(?:\((?:{_VARIABLE}|-?\d+)\))?|\({_VARIABLE}(?:,\s*{_VARIABLE})+\)"
    rf"|{_VARIABLE}(?:\s*\+\s*{_VARIABLE})+|(?:m\s*)?\\angle\s*[A-Z]{{1,3}}"
    r"|\|?\s*(?:\\overline\s*\{\s*[A-Z]{2}\s*\}|[A-Z]{2,4})\s*\|?|[a-zA-Z]_\{[\d,\s]+\}"
)
_NAME = re.compile(
    rf"({_NAMED})"
    r"\s*(?:=|\\approx(?![a-zA-Z]))\s*([^=<>]+)"
)
_CHOICE = re.compile(
    r"(?:\(([A-J])\)|([A-J])[).:]|\\(?:text(?:bf|it|rm)?|math(?:rm|bf))\s*"
    r"\{\s*\(?([A-J])\s*[).:]*\s*\})[\s:]*"
    r"(?=[^\s:.=^_!,;)\]}+*/]|\.\d)(?!\\(?:cdot|times)(?![a-zA-Z]))(.+)",
    re.DOTALL,
)
_FURTHER_CHOICE = re.compile(
    r"\([A-J]\)|(?<![a-zA-Z\\])[A-J][).:]|(?:\b(?:or|and|not)|,)\s*[A-J](?![\w'])|^\s*[A-J]\s*$"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_COMPARISON = re.compile(r"(<|>|\\(?:le|ge|ne|neq)(?![a-zA-Z]))")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\sor\s|\\(?:lor|vee|cup)(?![a-zA-Z])")
_SET_BUILDER = re.compile(
    rf"\\\{{\s*({_VARIABLE})\s*(?:\\in\s*(?:\\mathbb\s*\{{?R\}}?|\\R)\s*)?(?:\\mid|\||:)(.+)\\\}}",
    re.DOTALL,
)
_MEMBER = re.compile(rf"({_VARIABLE})\s*\\in(?![a-zA-Z])\s*(.+)", re.DOTALL)
_REALS = re.compile(r"\\mathbb\s*(?:\{\s*R\s*\}|R)|\\(?:R|Reals)")
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne", "\\neq": "\\ne"}


def without_names(answer: str, gold: str) -> tuple[str, str]:
    """Both without `x =` in front, where that names a value: N = 2,125 is 2125. Where both are
    named and differ, both keep their names: x = 5 is not y = 5.
    """
    mine, theirs = _NAME.fullmatch(answer), _NAME.fullmatch(gold)
    if ("=" in answer and not mine) or ("=" in gold and not theirs):
        return answer, gold  # an equation
    if mine and theirs and re.sub(r"\s", "", mine[1]) != re.sub(r"\s", "", theirs[1]):
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


def has_further_choice(value: str) -> bool:
    """Whether what stands after a choice letter chooses again: (A) or (C)."""
    return bool(_FURTHER_CHOICE.search(value))


def exact_and_rounded(text: str) -> tuple[str, str] | None:
    """The two sides of 22/7 \\approx 3.142; None for anything else."""
    sides = [side.strip() for side in re.split(r"\\approx(?![a-zA-Z])", text)]
    return (sides[0], sides[1]) if len(sides) == 2 and all(sides) else None


def as_interval(text: str) -> tuple[str, str] | None:
    """(variable, interval or union as text) of a normalised inequality, else None.

    x > 2; 2 < x \\le 5; x < 2 or x > 3; x \\ne 3; x \\in (2, 5); \\{x \\mid x > 2\\}; \\mathbb{R}
    (whose variable is empty).
    """
    if _REALS.fullmatch(text):
        return "", "(-\\infty, \\infty)"
    builder = _SET_BUILDER.fullmatch(text)
    if builder:
        inner = as_interval(builder[2].strip())
        return ("", inner[1]) if inner and inner[0] == builder[1] else None
    member = _MEMBER.fullmatch(text)
    if member and member[2][:1] in tuple("([\\"):
        whole = as_interval(member[2])
        return member[1], whole[1] if whole and not whole[0] else member[2].strip()
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
        if inside and sign in _OPENING:
            bounds = f"{_OPENING[sign]}-({right}), {right}{_CLOSING[sign]}"
            return (inside[1], bounds) if _is_of(inside[1], right) else None
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
