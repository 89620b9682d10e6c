"""Forms of a written answer that need no computer algebra: text, words, lists and tuples.

math-verify alone is not enough for labels that it reads wrongly: it drops the base of 52_8 and
reads `east` as E*a*s*t. Forms decided here never reach it.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from megatron_stare.scoring.mathematics.extraction import closing_brace
from megatron_stare.scoring.mathematics.numbers import THOUSANDS, plain_number

_UNICODE = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": "\\times ", "\u22c5": "\\cdot ",
    "\u00b7": "\\cdot ", "\u00f7": "/", "\u03c0": "\\pi ", "\u221e": "\\infty ", "\u2264": "\\le ",
    "\u2265": "\\ge ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ",
    "\u00b0": "^\\circ ", "\u00b1": "\\pm ", "\u00b2": "^2", "\u00b3": "^3",
    "\u2205": "\\emptyset ", "\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}",
    "\u00be": "\\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ",
    "\uff0c": ",", "\u20ac": "", "\u00a3": "", "\u2248": "\\approx ", "\u2260": "\\ne ",
    "\u211d": "\\mathbb{R}", "\u200b": "", "\u2044": "/", "\u2026": "\\ldots ",
}  # fmt: skip
_FRACTION_SIGN = re.compile(r"(\d?)([\u2150-\u215e])")  # one third and the like
_SUPERSCRIPT = re.compile("[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_ROOT = re.compile("\u221a\\(([^()]*)\\)")
# Other spellings of one command, and decoration that means nothing.
_SPELLINGS = (
    (re.compile(r"\\(?:nice|s|x|[dtc])frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\{([^{}]+)\\over(?![a-zA-Z])([^{}]+)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\\(?:pi|theta|alpha|beta|phi)(?![a-zA-Z])|\w)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*\})\s*(\\(?:pi|theta|alpha|beta|phi)(?![a-zA-Z])|\w)"), r"\1{\2}"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\[lr]angle(?![a-zA-Z])"), lambda match: "()"[match[0] == "\\rangle"]),
    (re.compile(r"\\[lr]?vert(?![a-zA-Z])"), "|"),
    (re.compile(r"\\(?:text)?color\s*\{[^{}]*\}|\\checkmark(?![a-zA-Z])"), " "),
    (re.compile(r"\\(?:begin|end)\s*\{(?:aligned|align\*?|gathered)\}"), " "),
    (re.compile(r"(?<=\d)'(?=\d{3}(?!\d))"), ""),
    (re.compile(r"^\s*\\text\s*\{[^{}]*(?:\bis|:|=)\s*\}"), ""),
)  # fmt: skip
_TRANSLATION = {ord(character): text for character, text in _UNICODE.items()}
_SPACING = re.compile(
    r"(?<!\\)\\(?:[,!;: ]|q?quad(?![a-zA-Z])|(?:left|right|displaystyle|big+|Big+)(?![a-zA-Z]))|~"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mbox|textup|operatorname|emph)\s*\{([^{}]*)\}"
)
# One unit, \text{ cm}^2 or \mathrm{~s^{-1}}; several may follow one another.
_ONE_UNIT = (
    r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{[\s~]*(?!and\b|or\b)[a-zA-Z][a-zA-Z "
    r".\-/]*(?:\^(?:\{-?\d\}|-?\d))?\}(?:\s*\^\s*(?:\{-?\d\}|\d))?"
)
_UNIT = re.compile(
    r"(?<=[\d})%])\s*(?:"
    rf"{_ONE_UNIT}(?:\s*(?:/|\\cdot)?\s*{_ONE_UNIT})*"
    r"|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\(?:degrees?|circ)(?![a-zA-Z])"
    r"|(?:\s(?:square|cubic))?\s[a-zA-Z]{3,}(?:\s+[a-zA-Z]{3,})?"
    r")\s*$"
)
# Words that follow a number and are no units: the number is not the answer, or not all of it.
_NO_UNITS = set(
    """
    zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
    half halves third thirds quarter quarters times plus minus over divided multiplied squared cubed
    factorial power root not nor but is isn are was wrong right incorrect false true invalid
    extraneous if when unless only at least most more less fewer than greater about to from mod
    modulo choose fold none never no undefined
    """.split()  # noqa: SIM905
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12}
# Bold and slanted type around a formula; around words it is left, for words are compared as such.
_TYPE = re.compile(
    r"\\(?:underline|boldsymbol|bm|pmb|mathit|mathsf|mathnormal|(?:mathbf|textbf)(?=\s*\{[^{}]*[\d\\]))"
    r"\s*(?=\{)"
)
_ABOUT = re.compile(r"(?:=|\\(?:approx|simeq|sim|thickapprox)(?![a-zA-Z]))\s*(?=\S)")
_EMPTY = re.compile(r"\\(?:varnothing|emptyset|O)(?![a-zA-Z])|\\\{\s*\\\}")
_UNARY_PLUS = re.compile(r"(^|[(\[,{=<>]|\\(?:le|ge|cup))\s*\+\s*(?=[\w.\\])")
_CONJUNCTION = re.compile(r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s")
_BASE = re.compile(r"([0-9A-Za-z]+)_(?:\{(\d+)\}|(\d+))")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' \-]*")


def normalise(answer: str) -> str:
    """One spelling of what is written in many:
    no spacing commands, one kind of fraction, no $, no closing stop.
    """
    text = _ROOT.sub(r"\\sqrt{\1}", answer)
    text = _FRACTION_SIGN.sub(
        lambda match: f"{match[1]} {unicodedata.normalize('NFKC', match[2])}".strip(), text
    )
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = text.translate(_TRANSLATION).strip()
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
            text = text[len(opening) : -len(closing)].strip()
    text = text.replace("\\$", "").replace("$", "")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    for spelling, usual in _SPELLINGS:
        text = spelling.sub(usual, text)
    text = text if "matrix" in text or "&=" not in text else text.replace("&=", "=")
    text = re.sub(r"\\(?:leq|leqslant)(?![a-zA-Z])", r"\\le", text)
    text = re.sub(r"\\(?:geq|geqslant)(?![a-zA-Z])", r"\\ge", text)
    text = re.sub(r"\\(gt|lt)(?![a-zA-Z])", lambda match: "><"[match[1] == "lt"], text)
    text = re.sub(r"\\neq(?![a-zA-Z])", r"\\ne", text)
    text = _SPACING.sub(" ", text).replace("{,}", ",")
    text = _plain_type(text)
    text = re.sub(r"(?<=\d,) +(?=\d{3}(?:\D|$))", "", text) if re.search(r"\\!", answer) else text
    text = _EMPTY.sub(r"\\emptyset ", text).strip().rstrip(".,").strip()
    text = _ABOUT.sub("", text, count=1) if _ABOUT.match(text) else text
    return re.sub(r"\s+", " ", _UNARY_PLUS.sub(r"\1", text)).strip()


def _plain_type(text: str) -> str:
    """Without \\boldsymbol{} and the like around what they hold."""
    pieces, at = [], 0
    while match := _TYPE.search(text, at):
        close = closing_brace(text, match.end())
        if close is None:
            break
        pieces += [text[at : match.start()], text[match.end() + 1 : close]]
        at = close + 1
    return "".join([*pieces, text[at:]])


def without_units(text: str) -> str:
    """A normalised answer without the unit after its number, for units are not compared; words
    that are no units stay, and 3 million is 3000000.
    """
    match = _UNIT.search(text)
    if match is None or is_sentence(text):
        return text
    number = text[: match.start()].strip()
    scale = next((_SCALES[one] for one in _words(match[0]) if one in _SCALES), 1)
    if scale == 1:
        return number or text
    read = plain_number(number)
    value = read.value * scale if read else None
    return str(value) if value is not None else text


def is_sentence(text: str) -> bool:
    """Whether a normalised answer says something of a number that no unit says: 5 squared, 4 is
    wrong, 100 or more.
    """
    return any(one in _NO_UNITS for one in _words(text)) and bool(re.search(r"\d", text))


def _words(text: str) -> list[str]:
    """The words in an answer, in small letters, without commands."""
    plain = re.sub(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*(?=\{)", " ", text)
    return re.findall(r"[a-z]{2,}", re.sub(r"\\[a-zA-Z]+", " ", plain).lower())


def compact(text: str) -> str:
    """A normalised answer without any blanks and without braces that group nothing:
    for comparing as text.
    """
    text = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", _TEXT.sub(r"\1", text))
    bare = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # 3 1/2 is not 31/2
    bare = re.sub(r"(?<=[_^])\{(\w)\}", r"\1", bare)
    return THOUSANDS.sub(lambda match: match.group().replace(",", ""), bare)


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
    """An answer made of answers: `kind` is list or set (both unordered), union, matrix,
    determinant, or the two brackets of a tuple.
    """

    kind: str
    items: tuple[str, ...]


def compound(text: str) -> Compound | None:
    """A normalised answer's outermost list, set, tuple, interval, union or matrix;
    None where it is a single one.
    """
    matrix = re.fullmatch(
        r"\\begin\s*\{([pbv]?)matrix\}(.*)\\end\s*\{[pbv]?matrix\}", text, re.DOTALL
    )
    if matrix:
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        kind = "determinant" if matrix[1] == "v" else "matrix"
        return Compound(f"{kind} {shape}", tuple(cell.strip() for row in rows for cell in row))
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
        if re.search(r"\\mid|\||:", inner):
            return None
        return Compound("set", tuple({compact(one): one for one in _elements(inner)}.values()))
    outward = re.fullmatch(r"([\[\]])([^\[\]]+)([\[\]])", text)  # ]1, 2[ is (1, 2)
    if outward and (outward[1], outward[3]) != ("[", "]"):
        text = "(["[outward[1] == "["] + outward[2].replace(";", ",") + ")]"[outward[3] == "]"]
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
    if THOUSANDS.fullmatch(text.lstrip("+-").strip()):
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
