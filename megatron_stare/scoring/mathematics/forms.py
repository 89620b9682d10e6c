"""Forms of a written answer that need no computer algebra: text, words, lists and tuples.

math-verify alone is not enough for labels that it reads wrongly: it drops the base of 52_8 and
reads `east` as E*a*s*t. Forms decided here never reach it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stare.scoring.mathematics.values import SPACE_IN_NUMBER, THOUSANDS, plain_number
from megatron_stare.scoring.verifiers import closing_brace

_UNICODE = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": "\\times ", "\u22c5": "\\cdot ",
    "\u00b7": "\\cdot ", "\u00f7": "/", "\u03c0": "\\pi ", "\u221e": "\\infty ", "\u2264": "\\le ",
    "\u2265": "\\ge ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ",
    "\u00b0": "^\\circ ", "\u00b1": "\\pm ", "\u00b2": "^2", "\u00b3": "^3",
    "\u2205": "\\emptyset ", "\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}",
    "\u00be": "\\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ",
    "\uff0c": ",", "\u20ac": "", "\u00a3": "", "\u20b9": "", "\u00a5": "", "\u200b": "",
    "\u2248": "\\approx ", "\u2260": "\\ne ", "\u211d": "\\mathbb{R}", "\u2044": "/",
    "\u2026": "\\ldots ",
}  # fmt: skip
_FRACTION_SIGN = re.compile(r"(\d?)([\u2150-\u215e])")  # one third and the like
_MARKDOWN = re.compile(r"(\*\*?|__|`)([^*`]+)\1$")
_SUPERSCRIPT = re.compile("[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_ROOT = re.compile("\u221a\\(([^()]*)\\)")
_GROUP = r"(?:\{([^{}]*)\}|([^{}]+?))"
# Other spellings of one command, and decoration that means nothing.
_SPELLINGS = (
    (re.compile(r"\.\.\."), r"\\ldots "),
    (re.compile(r"\\text\s*\{[\s.,]*\}"), " "),
    (re.compile(r"\\mathbb\s*([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"(?<=\\mathbb\{R\})\s*(?:-|\\backslash(?![a-zA-Z]))\s*(?=\\\{)"), r"\\setminus "),
    (re.compile(r"\\colon(?![a-zA-Z])|\{:\}"), ":"),
    (re.compile(r":="), "="),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"<=(?!>)"), r"\\le "),
    (re.compile(r"\\cr(?![a-zA-Z])|\\\\\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]"), r"\\\\"),
    (re.compile(r"\\[hv]?(?:space|phantom)\*?\s*\{[^{}]*\}"), " "),
    (
        re.compile(
            r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|rm|sf|thinspace|strut)"
            r"(?![a-zA-Z])"
        ),
        " ",
    ),
    (re.compile(r"^(?:\s|\\(?:therefore|implies|[rR]ightarrow|because)(?![a-zA-Z]))+"), ""),
    (re.compile(r"\s*\\(?:square|blacksquare|Box|qed|qedsymbol|checkmark)(?![a-zA-Z])\s*$"), ""),
    (
        re.compile(r"^\s*(?:\\text\s*\{\s*)?(?:US|USD|EUR|GBP|INR|Rs)\.?\s*\}?\s*(?=\d|\.\d)"),
        "",
    ),
    (re.compile(r"\\(?:nice|s|x|[dtc])frac(?![a-zA-Z])"), r"\\frac"),
    (
        re.compile(rf"\{{\s*{_GROUP}\s*\\over(?![a-zA-Z])\s*{_GROUP}\s*\}}"),
        lambda match: f"\\frac{{{match[1] or match[2]}}}{{{match[3] or match[4]}}}",
    ),
    (re.compile(r"\\frac\s*(\\(?:pi|theta|alpha|beta|phi)(?![a-zA-Z])|\w)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\{[^{}]*\})\s*(\\(?:pi|theta|alpha|beta|phi)(?![a-zA-Z])|\w)"), r"\1{\2}"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\[lr]angle(?![a-zA-Z])"), lambda match: "()"[match[0] == "\\rangle"]),
    (re.compile(r"\\[lr]?vert(?![a-zA-Z])"), "|"),
    (re.compile(r"\\(?:text)?color(?:box)?\s*\{[^{}]*\}"), " "),
    (re.compile(r"\\(?:begin|end)\s*\{(?:aligned|align\*?|gathered|equation\*?)\}"), " "),
    (re.compile(r"\\(begin|end)\s*\{smallmatrix\}"), r"\\\1{pmatrix}"),
    (re.compile(r"(?<=\d)'(?=\d{3}(?!\d))"), ""),
    (re.compile(r"^\s*\\text\s*\{[^{}]*(?:\bis|:|=)\s*\}"), ""),
    (re.compile(r"^\s*(?:\\text\s*\{\s*negative\s*\}|negative\s)\s*(?=[\d.\\])"), "-"),
)  # fmt: skip
_TRANSLATION = {ord(character): text for character, text in _UNICODE.items()}
_SPACING = re.compile(
    r"(?<!\\)\\(?:(?:left|right)\.|[,!;: ]|q?quad(?![a-zA-Z])"
    r"|(?:left|right|displaystyle|[bB]ig+[lrm]?)(?![a-zA-Z]))|~"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|[mh]box|textup|operatorname|emph)\s*\{([^{}]*)\}"
)
# Answers in words that are written as symbols as well.
_SETS = (
    (re.compile(r"(?:for )?(?:all|any|every) reals?(?: numbers?| x)?", re.I), r"\mathbb{R}"),
    (re.compile(r"(?:the )?(?:empty|null) set", re.I), r"\emptyset"),
    (re.compile(r"(?:positive )?infinity", re.I), r"\infty"),
)  # fmt: skip
# One unit, \text{ cm}^2 or \mathrm{~s^{-1}}; several may follow one another.
_ONE_UNIT = (
    r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{[\s~]*(?!and\b|or\b)[a-zA-Z][a-zA-Z "
    r".\-/]*(?:\^(?:\{-?\d\}|-?\d))?\}(?:\s*\^\s*(?:\{-?\d\}|\d))?"
)
_SHORT = (
    r"(?:sq\.? [ck]?m|[cdkm]?m(?:/[sh]| per (?:second|minute|hour))?|k?g|m[glL]|\\Omega|ft|lbs?|oz"
    r"|yd|mi|k[JWN]|Hz|Pa)"
)
_UNIT = re.compile(
    r"(?:(?<=[\d})%])|(?<=\\pi))\s*(?:"
    rf"{_ONE_UNIT}(?:\s*(?:/|\\cdot)?\s*{_ONE_UNIT})*"
    rf"|\\frac\s*\{{\s*{_ONE_UNIT}\s*\}}\s*\{{\s*{_ONE_UNIT}\s*\}}"
    r"|(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\(?:degrees?|circ)(?![a-zA-Z]))"
    r"\s*(?:\\(?:text|mathrm)\s*\{\s*[CF]\s*\}|[CF])?"
    r"|\s(?!and\b)[a-zA-Z]{3,}(?:(?:\s+|\s*/\s*)[a-zA-Z]{2,}){0,3}"
    r")\s*$"
)
# Abbreviations that may be products of variables: a unit only where the other side is a number.
_SHORT_UNIT = re.compile(
    rf"(?<=\d)(?:\s*{_SHORT}|\s[sghKLJNWV])(?:\s*\^\s*(?:\{{-?\d\}}|-?\d))?\s*$"
)
# Words that follow a number and are no units: the number is not the answer, or not all of it.
_NO_UNITS = set(
    """
    zero one two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty
    half halves third thirds quarter quarters times plus minus over divided multiplied squared cubed
    factorial power root not nor but is isn are was wrong right incorrect false true invalid
    extraneous if when unless only at least most more less fewer than greater about to from mod
    modulo choose fold none never no undefined gross score doubled tripled quadrupled halved raised
    reduced increased decreased rejected discarded excluded impossible neither except does cannot
    fails too remainder smaller larger negative short root roots twos threes fours tens
    """.split()  # noqa: SIM905
)
_ORDINAL = re.compile(
    r"(?:(?:thir|four|fif|six|seven|eigh|nine)teen|four|fif|six|seven|eigh|nin|ten|eleven|twelf"
    r"|(?:twent|thirt|fort|fift|sixt|sevent|eight|ninet)ie|hundred|thousand|million|billion)ths?"
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_SCALES |= {"trillion": 10**12}
# Bold and slanted type around a formula; around words it is left, for words are compared as such.
_TYPE = re.compile(
    r"\\(?:underline|ensuremath|boldsymbol|bm|pmb|mathit|mathsf|mathnormal|(?:mathbf|textbf)(?=\s*\{[^{}]*[\d\\]))"
    r"\s*(?=\{)"
)
_ABOUT = re.compile(r"(?:=|\\(?:approx|simeq|sim|thickapprox)(?![a-zA-Z]))\s*(?=\S)")
_EMPTY = re.compile(r"\\(?:varnothing|emptyset|O)(?![a-zA-Z])|\\\{\s*\\\}")
_UNARY_PLUS = re.compile(r"(^|[(\[,{=<>]|\\(?:le|ge|cup))\s*\+\s*(?=[\w.\\])")
_CONJUNCTION = re.compile(r"\\text\s*\{\s*(?:and|or)\s*\}|\s(?:and|or)\s")
_HALF_DAY = re.compile(r"(?<=\d)\s*([aApP])\.?\s?[mM]\b\.?(?![\w^/])")
_BASE = re.compile(r"([0-9A-Za-z]+)_(?:\{(\d+)\}|(\d+))")
_BASE_NAMES = (
    *("two", "three", "four", "five", "six", "seven"),
    *("eight", "nine", "ten", "eleven", "twelve"),
)
_BASE_WORD = re.compile(rf"_\{{?\s*\\text\s*\{{\s*({'|'.join(_BASE_NAMES)})\s*\}}\s*\}}?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' \-]*")


def normalise(answer: str) -> str:
    """One spelling of what is written in many:
    no spacing commands, one kind of fraction, no $, no closing stop.
    """
    text = _MARKDOWN.sub(r"\2", answer.strip()) if answer.strip()[:1] in tuple("*_`") else answer
    text = _ROOT.sub(r"\\sqrt{\1}", text)
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
    text = re.sub(r"[\s.,;]+$|(?<!\\)(?:\\[\\\s]*)$", "", _EMPTY.sub(r"\\emptyset ", text)).strip()
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    inside = _TEXT.sub(r"\1", text).strip()
    text = inside if _TEXT.fullmatch(text) and re.match(r"[-+.]?\d", inside) else text
    text = next((symbol for words, symbol in _SETS if words.fullmatch(inside)), text)
    text = _ABOUT.sub("", text, count=1) if _ABOUT.match(text) else text
    return re.sub(r"\s+", " ", _UNARY_PLUS.sub(r"\1", text)).strip()


def _plain_type(text: str) -> str:
    """Without \\boldsymbol{} and the like around what they hold."""
    while match := _TYPE.search(text):
        close = closing_brace(text, match.end())
        if close is None:
            break
        text = text[: match.start()] + text[match.end() + 1 : close] + text[close + 1 :]
    return text


def without_units(text: str, other: str = "", letters: int = 1) -> str:
    """A normalised answer without the unit after its number, for units are not compared; words
    that are no units stay, and 3 million is 3000000. `other`: what it is compared with; where that
    is a plain number, 12 m is a length, if its unit has as many `letters`.
    """
    match = _UNIT.search(text)
    if match is None and (short := _SHORT_UNIT.search(text)) and plain_number(other):
        is_unit = sum(map(str.isalpha, short[0])) >= letters
        return text[: short.start()].strip() if is_unit else text
    if match is None or is_sentence(text):
        return text
    number = text[: match.start()].strip()
    words = (one.removesuffix("s") for one in _words(match[0]))
    scale = math.prod(_SCALES[one] for one in words if one in _SCALES)
    if scale == 1:
        return number or text
    read = plain_number(number)
    value = read.value * scale if read else None
    return str(value) if value is not None else text


def as_ratio(text: str) -> str:
    """A normalised answer with 3:7 for 3 to 7."""
    return re.sub(r"(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*(?=\d)", ":", text)


def is_sentence(text: str) -> bool:
    """Whether a normalised answer says something of a number that no unit says: 5 squared, 4 is
    wrong, 100 or more.
    """
    words = _words(text)
    said = any(one in _NO_UNITS or _ORDINAL.fullmatch(one) for one in words)
    return said and bool(re.search(r"\d", text))


def _words(text: str) -> list[str]:
    """The words in an answer, in small letters, without commands."""
    plain = re.sub(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*(?=\{)", " ", text)
    return re.findall(r"[a-z]{2,}", re.sub(r"\\[a-zA-Z]+", " ", plain).lower())


def compact(text: str) -> str:
    """A normalised answer without any blanks and without braces that group nothing:
    for comparing as text.
    """
    text = SPACE_IN_NUMBER.sub("", _TEXT.sub(r"\1", text))
    text = _HALF_DAY.sub(lambda match: match[1].lower() + "m", text)
    bare = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # 3 1/2 is not 31/2
    bare = re.sub(r"(?<=[_^])\{(\w)\}", r"\1", bare)
    return THOUSANDS.sub(lambda match: match.group().replace(",", ""), bare)


def half_day(text: str) -> str:
    """a or p of a normalised time of day such as 3:00 PM; empty for anything else."""
    match = _HALF_DAY.search(_TEXT.sub(r"\1", text))
    return match[1].lower() if match else ""


def word(text: str) -> str | None:
    """An answer in words (or one choice letter in brackets), in small letters; None for a formula.

    Inside \\text{} any word counts; bare letters only from three on, for `ab` may be a product.
    """
    inside = _TEXT.sub(r"\1", text).strip()
    bare = inside.strip("()").rstrip(".").strip()
    if not _WORDS.fullmatch(bare):
        return None
    if inside == text and ("\\" in text or not re.search(r"[A-Za-z]{3}", bare)):
        return None
    found = re.sub(r"\s+", " ", bare).lower()
    return re.sub(r"^(no (?:real )?)solutions?(?: exists?)?$", r"\1solution", found)


def in_base(text: str) -> tuple[str, int] | None:
    """(digits, base) of a numeral such as 4210_{5}; None for anything else."""
    text = re.sub(r"_\{\((\d+)\)\}$", r"_{\1}", text)
    text = _BASE_WORD.sub(lambda match: f"_{{{_BASE_NAMES.index(match[1]) + 2}}}", text)
    text = re.sub(r"\s*(?:\\text\s*\{\s*)?(?:in )?base\s*\}?\s*(\d+)$", r"_{\1}", text)
    text = re.sub(r"^\(([0-9A-Za-z]+)\)\s*_", r"\1_", text)
    match = _BASE.fullmatch(
        re.sub(r"[\s{}]+(?=\d|\}|$)", lambda m: m.group().replace(" ", ""), text.replace(" ", ""))
    )
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    return match[1].lower().lstrip("0") or "0", int(match[2] or match[3])


_PAIRS = {"(": ")", "[": "]"}


@dataclass(frozen=True)
class Compound:
    """An answer made of answers: `kind` is list or set (both unordered), union, ratio,
    matrix, determinant, or the two brackets of a tuple.
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
    ratio = re.fullmatch(r"\d+(?:\s*:\s*\d+){2,}", text)
    if ratio:
        terms = [int(term) for term in text.split(":")]
        unit = math.gcd(*terms) or 1
        return Compound("ratio", tuple(str(term // unit) for term in terms))
    items = _elements(text)
    named = _named(items)
    if len(items) > 1 and len({name for name, _ in named}) == len(items):
        return Compound("()", tuple(value for _, value in sorted(named)))  # y = 2, x = 1 is (1, 2)
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
        match re.split(r"\\pm(?![a-zA-Z])", item):
            case [before, after]:
                items += [f"{before}{sign}{after}".strip() for sign in "+-"]
            case _:
                items.append(item)
    named = _named(items)
    if len(items) > 1 and len(named) == len(items) and len({name for name, _ in named}) == 1:
        return [value for _, value in named]
    return items


def _named(items: Sequence[str]) -> list[tuple[str, str]]:
    """(letter, value) of the items that are a letter's value: x = 5."""
    found = (re.fullmatch(r"([a-zA-Z])\s*=(.+)", item) for item in items)
    return [(match[1], match[2].strip()) for match in found if match]


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
