"""Verifiers that need neither algebra nor other machines: multiple choice, format, language."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from typing import Any

from megatron_stare.scoring.mathematics.extraction import extract
from megatron_stare.scoring.verdict import Verdict, judged, unverifiable

# Script -> how the Unicode names of its letters begin.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "latin": ("LATIN", "FULLWIDTH LATIN"),
    "han": ("CJK",),
    "japanese": ("HIRAGANA", "KATAKANA", "CJK"),
    "hangul": ("HANGUL",),
    "cyrillic": ("CYRILLIC",),
    "greek": ("GREEK",),
    "arabic": ("ARABIC",),
    "hebrew": ("HEBREW",),
    "devanagari": ("DEVANAGARI",),
    "thai": ("THAI",),
}
# A letter by itself. Before a further word it must be a capital that is not an English word: in "a
# mystery" and "I think" no choice is made, except for a few words that give the reason.
_REASON = r"(?=\s+(?i:because|since|as|is|was|for|and|which|where)\b)"
_BEFORE_WORDS = rf"(?:[B-HJ-Z](?=\s)|[AI]{_REASON})"
_ALONE = r"[A-Za-z](?=\W*\Z|\s*[^\w\s'\\])"
_LETTER = rf"({_ALONE}|{_BEFORE_WORDS})"
_CHOICE = re.compile(rf"\W*{_LETTER}(?:\W.*)?", re.DOTALL)
_CHOSEN = re.compile(rf"(?i:answer|option|choice)\s{{0,9}}(?i:is|:)?[^\w]{{0,9}}{_LETTER}")
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# Formulas, commands and code are Latin in every language. A formula ends before the next one opens,
# so that the search for its end is not repeated over the same text.
_NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)|\$\$.*?\$\$|\$[^$\n]*\$|\\\[(?:(?!\\\[).)*?\\\]"
    r"|\\\((?:(?!\\\().)*?\\\)|`[^`\n]*`|\\[a-zA-Z]+",
    re.DOTALL,
)


def multiple_choice(
    response: str,
    label: str,
    metadata: dict[str, Any],
    extraction: str = "any",
    tag: str = "answer",
) -> Verdict:
    """1 where the chosen letter is the label's:
    C, (C), \\text{(C)}, `C. 12 cm`. Letters count in either case.

    extraction `any` also takes the letter of the last "answer is C". Unverifiable: a label that is
    no letter.
    """
    wanted = _letter(label)
    if wanted is None:
        return unverifiable(f"the label {label[:80]!r} is not a choice letter")
    answer = extract(response, extraction, tag)
    if answer is None and extraction == "any":
        answer = next((match[1] for match in reversed(list(_CHOSEN.finditer(response)))), None)
    return judged(answer is not None and _letter(answer) == wanted, answer)


def response_format(response: str, label: str, metadata: dict[str, Any], pattern: str) -> Verdict:
    """1 where the regular expression scoring.format_pattern is found in the response;
    the dot matches newlines.
    """
    return judged(re.search(pattern, response, re.DOTALL) is not None, None)


def language(response: str, label: str, metadata: dict[str, Any], script: str) -> Verdict:
    """The share of letters, outside formulas and code, that are of the script scoring.language;
    correct above 1/2.

    A response without a letter has share 1: nothing in it is of another script.
    """
    counts = Counter(
        character for character in _NOT_PROSE.sub(" ", response) if character.isalpha()
    )
    letters = counts.total()
    expected = sum(count for character, count in counts.items() if _in_script(character, script))
    share = expected / letters if letters else 1.0
    return Verdict(share, "correct" if share > 0.5 else "wrong")


def _letter(text: str) -> str | None:
    match = _CHOICE.fullmatch(_TEXT_COMMAND.sub(r"\1", text.strip()))
    return match[1].upper() if match else None


@functools.lru_cache(maxsize=65536)
def _in_script(character: str, script: str) -> bool:
    return unicodedata.name(character, "").startswith(SCRIPTS[script])
