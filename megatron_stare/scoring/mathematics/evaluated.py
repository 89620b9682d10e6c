"""Whether an answer is computed to the end. This is read off the text, so that a tower of powers,
for example, is never computed. docs/rewards.md lists the rules under "Unevaluated answers".
"""

from __future__ import annotations

import re

from megatron_stare.scoring.mathematics.values import spelled_out

# Operations left to compute, by family: a label that holds one of a family allows the others.
_FAMILIES = {
    "sum": r"sum|prod|coprod|int|iint|iiint|oint|lim|limsup|liminf|sup|inf|max|min|arg|bigcup",
    "divisor": r"gcd|lcm|bmod|pmod|mod|equiv|varphi|tau|lfloor|lceil|det|dim|Pr|deg",
    "choose": r"binom|dbinom|tbinom|choose",
    "angle": r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?",
    "logarithm": r"log|ln|lg|exp",
}
_COMMANDS = {
    name: re.compile(rf"(?<![a-zA-Z])(?:{words})(?![a-zA-Z])") for name, words in _FAMILIES.items()
}
_FACTORIAL = re.compile(r"[\w)}\]]\s*!")
_OPERATOR = re.compile(r"\\operatorname\s*\{|\\math(?:rm|bf|sf)\s*\{\s*(?:gcd|lcm|mod|log)")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{[^{}]*\}(?:\^(?:\{-?\d\}|\d))?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LITERAL = re.compile(r"\d+(?:,\d{3})*(?:\.\d*)?|\.\d+")
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|\\%|\\\$")
_TIMES_TEN = re.compile(r"(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*[+-]?\d{1,3}\s*\}|[+-]?\d)")
_FRACTIONAL_POWER = re.compile(
    r"\^\s*\{\s*-?(?:\\frac\s*(?:\{\s*\d\s*\}|\d)\s*(?:\{\s*\d\s*\}|\d)|\d\s*/\s*\d)\s*\}"
)
_DIVISION = re.compile(r"/|\\frac(?![a-zA-Z])|\\div(?![a-zA-Z])")
_BINARY = re.compile(r"(?<=[\w)}\]!])\s*[+\-*]|\\(?:times|cdot|pm|mp|div)(?![a-zA-Z])")
_IRRATIONAL = re.compile(r"\\(?:sqrt|pi|infty)(?![a-zA-Z])|(?<![a-zA-Z\\])(?:e|i)(?![a-zA-Z])")
_BIG_POWER = re.compile(r"\^\s*(?:\{[^{}]*\d{4,}[^{}]*\}|[({]?\s*\d{4,})")
_CHARACTERS = 1000  # more, for a label that is a number, are no closed form


def is_still_to_compute(answer: str, gold: str, rational: bool) -> bool:
    """Whether a normalised answer is still to be computed, the label being a number.

    Always: a sum, integral, limit, divisor, binomial, factorial, function of an angle or logarithm
    of a kind that the label does not hold; a variable; a power of a power, or one above 999, that
    the label does not hold. `rational` says that the label is an integer or a fraction; then an
    answer has one number, or a fraction of two (each perhaps a power), or a mixed one, and no
    operation besides. For other labels (roots, pi, e, complex numbers) an answer may have half as
    many numbers again as the label, and one in any case: 2\\sqrt{3} as \\sqrt{12}, but not
    (1 + 2i) 6 - 3i for 6 + 9i.
    """
    answer, gold = spelled_out(answer), spelled_out(gold)
    if has_operation(answer, gold) or len(answer) > max(_CHARACTERS, 4 * len(gold)):
        return True
    mine, theirs = _bare(answer), _bare(gold)
    if any(letter not in theirs for letter in _variables(mine)):
        return True
    if "|" in mine and "|" not in theirs:
        return True
    if _too_high(mine) and not _too_high(theirs):
        return True
    count, expected = len(_LITERAL.findall(mine)), len(_LITERAL.findall(theirs))
    if rational and not _is_computation(theirs, expected):
        return _is_computation(mine, count)
    return count > expected + max(1, expected // 2)


def has_operation(answer: str, gold: str) -> bool:
    """Whether the answer holds an operation of a family that the label does not."""
    mine, theirs = (_TEXT.sub(" ", text) for text in (answer, gold))
    for pattern in (*_COMMANDS.values(), _FACTORIAL):
        if pattern.search(mine) and not pattern.search(theirs):
            return True
    return bool(_OPERATOR.search(answer)) and not _OPERATOR.search(gold)


def _bare(text: str) -> str:
    """Without units, and with a root's exponent as one number: 2^{1/2} is \\sqrt{2}."""
    bare = _TIMES_TEN.sub(" ", _DEGREES.sub(" ", _TEXT.sub(" ", text)))
    return _FRACTIONAL_POWER.sub(r"\\sqrt ", bare)


def _variables(text: str) -> set[str]:
    """Letters that are no command's, except for e and i."""
    return set(re.findall(r"[^\W\d_]", _COMMAND.sub(" ", text))) - {"e", "i"}


def _too_high(text: str) -> bool:
    powers = [match.end() for match in re.finditer(r"\^", text)]
    return bool(_BIG_POWER.search(text)) or any(
        "^" in _exponent(text, end) or text[end + len(_exponent(text, end)) :].strip()[:1] == "^"
        for end in powers
    )


def _exponent(text: str, start: int) -> str:
    """The exponent that begins here: a group in brackets, or one symbol."""
    at = start + len(text[start:]) - len(text[start:].lstrip())
    if text[at : at + 1] not in ("{", "("):
        symbol = re.match(r"\\?[a-zA-Z]+|[+-]?\d+|.?", text[at:], re.DOTALL)
        return text[start : at + (symbol.end() if symbol else 0)]
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] in "({") - (text[place] in ")}")
        if depth == 0:
            return text[start : place + 1]
    return text[start:]


def _is_computation(text: str, literals: int) -> bool:
    """More than a number, a fraction or a power: an operation, a root, a product by brackets."""
    known = r"frac|left|right|displaystyle|infty|overline|bar|dot"
    if re.search(rf"\\(?!(?:{known})(?![a-zA-Z]))[a-zA-Z]", text) or _BINARY.search(text):
        return True
    divisions, powers = len(_DIVISION.findall(text)), text.count("^")
    mixed = len(re.findall(r"\d\s*\\frac", text))
    return divisions > 1 or powers > 2 or literals > 1 + divisions + powers + mixed


def is_exact_form(text: str) -> bool:
    """Whether it holds a root, pi, e or i: a value that no decimal spells out."""
    return bool(_IRRATIONAL.search(spelled_out(text)))
