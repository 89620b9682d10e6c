"""The answer in a response: the last box, the last "Answer:" line, or the last tag. And verifiers
that need neither algebra nor other machines: multiple choice, format, language.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from typing import Any

from megatron_stare.scoring.verdict import Verdict, judged, unverifiable

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w]|-\d)")
# TeX boxes one character where braces are missing; a model that leaves them out means the number.
_UNBRACED = re.compile(r"-?\d+(?:[.,]\d+)*|\w")
_CONNECTOR = re.compile(r"[\s$,;.]*(?:and|or|\\text\{ ?(?:and|or) ?\})?[\s$,;.]*")
_ANSWER_LINE = re.compile(
    r"^[^\w\n]*(?:the\s+)?(?:final\s+)?answer\b[*_ ]*(?:is[*_ ]*)?[:\uff1a](.*)$", re.I | re.M
)
# What Minerva's prompts (arXiv 2206.14858) teach to write after "Final Answer:".
_SAID_AGAIN = re.compile(
    r"(?:the\s+)?(?:final\s+)?answer\s+is\s+(.*?)(?:\.\s*I hope it is correct)?", re.I
)
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
# Letters and nothing else: A, C; AC; (A) and (C).
_MARKS = r"[\s,;/|&()\[\]{}.:*$]"
_SEVERAL = re.compile(rf"(?:{_MARKS}*(?:(?:and|or|no|not){_MARKS}+)*[A-Ja-j]){{2,}}{_MARKS}*")
_NAMED = re.compile(
    r"^(?:the\s+)?(?:(?:final|correct|best)\s+)?(?:option|choice|answer)(?:\s+is)?\s*:?\s+(.*)",
    re.I | re.DOTALL,
)
_ONLY = re.compile(r"[\s*(\[]*([A-J])[\s*)\].:]*")
_CHOSEN = re.compile(rf"(?i:answer|option|choice)\s{{0,9}}(?i:is|:)?[^\w]{{0,9}}{_LETTER}")
_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# Formulas, commands and code are Latin in every language. A formula ends before the next one opens,
# so that the search for its end is not repeated over the same text.
_NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)|\$\$.*?\$\$|\$[^$\n]*\$|\\\[(?:(?!\\\[).)*?\\\]"
    r"|\\\((?:(?!\\\().)*?\\\)|`[^`\n]*`|\\[a-zA-Z]+",
    re.DOTALL,
)


def extract(response: str, extraction: str, tag: str = "answer") -> str | None:
    """The answer by scoring.extraction:
    boxed | answer | tag | any (the first of the three that the response has); or None.

    A box inside an answer line or a tag is opened. Boxes that follow one another, joined by a
    comma, "and" or "or", are one answer: a list.
    """
    finders = {
        "boxed": last_boxed,
        "tag": lambda text: last_tag(text, tag),
        "answer": last_answer_line,
    }
    for name in finders if extraction == "any" else (extraction,):
        found = finders[name](response)
        if found is not None and name != "boxed":
            boxed = last_boxed(found)
            found = found if boxed is None else boxed
        if found is not None and found.strip():
            return found.strip()
    return None


def last_boxed(text: str) -> str | None:
    """The content of the last complete \\boxed{...}, braces balanced;
    with the boxes just before it, joined by commas.
    """
    found: list[str] = []
    previous_end = -1
    for match in _BOX.finditer(text):
        if match.start() < previous_end:
            continue  # a box inside a box
        if bare := _UNBRACED.match(text, match.end()):
            content, end = bare[0], bare.end()
        else:
            close = closing_brace(text, match.end())
            if close is None:
                break  # all text after an unclosed brace is inside it
            content, end = text[match.end() + 1 : close], close + 1
        content = _inside(content)
        joined = found and _CONNECTOR.fullmatch(
            text, previous_end, min(match.start(), previous_end + 40)
        )
        adjacent = joined and joined.end() == match.start() and joined.group().strip(" $\n.") != ""
        found = [*found, content] if adjacent else [content]
        previous_end = end
    return ", ".join(found) if found else None


def _inside(content: str) -> str:
    """The innermost content of a box that holds nothing but another box."""
    bare = content.strip()
    while (match := _BOX.match(bare)) and bare[match.end() : match.end() + 1] == "{":
        if closing_brace(bare, match.end()) != len(bare) - 1:
            break
        content = bare[match.end() + 1 : -1]
        bare = content.strip()
    return content


def last_answer_line(text: str) -> str | None:
    """The text after the colon of the last line that begins with "Answer:" (also "Final answer:",
    "**Answer:**"), without a further "the answer is".
    """
    found = _ANSWER_LINE.findall(text)
    if not found:
        return None
    line = found[-1].strip().strip("*_").strip().removesuffix(".")
    again = _SAID_AGAIN.fullmatch(line)
    return again[1] if again else line


def last_tag(text: str, tag: str) -> str | None:
    """The text between the last <tag> and the </tag> that closes it."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(tag) + 2 : end]


def closing_brace(text: str, opening: int) -> int | None:
    """The place that closes the brace at `opening`; None: no place does."""
    depth, at = 0, opening
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1  # an escaped brace is not a brace
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return None


def multiple_choice(
    response: str,
    label: str,
    metadata: dict[str, Any],
    extraction: str = "any",
    tag: str = "answer",
) -> Verdict:
    """1 where the chosen letter is the label's: C, (C), \\text{(C)}, `C. 12 cm`; of a label of
    several (AC; A, C) all of them, in any order. Letters count in either case.

    extraction `any` also takes the letter of the last "answer is C", or else one that is all of the
    last line. Unverifiable: a label that is no letter.
    """
    wanted = choice_letters(label)
    if not wanted:
        return unverifiable(f"the label {label[:80]!r} is not a choice letter")
    answer = extract(response, extraction, tag)
    if answer is None and extraction == "any":
        answer = next((match[1] for match in reversed(list(_CHOSEN.finditer(response)))), None)
        only = _ONLY.fullmatch(response.rstrip().rpartition("\n")[2])
        answer = only[1] if answer is None and only else answer
    return judged(answer is not None and choice_letters(answer) == wanted, answer)


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


def choice_letters(text: str) -> set[str]:
    """The letters that an answer chooses, as capitals; none for anything else."""
    bare = _NAMED.sub(r"\1", _TEXT_COMMAND.sub(r"\1", text.strip()), count=1)
    if _SEVERAL.fullmatch(bare):
        return set(re.sub(r"\b(?:and|or|no|not)\b", "", bare).upper()) & set("ABCDEFGHIJ")
    match = _CHOICE.fullmatch(bare)
    return {match[1].upper()} if match else set()


@functools.lru_cache(maxsize=65536)
def _in_script(character: str, script: str) -> bool:
    return unicodedata.name(character, "").startswith(SCRIPTS[script])
