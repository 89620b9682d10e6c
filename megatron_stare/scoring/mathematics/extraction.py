"""Finding the answer in a response: the last box, the last "Answer:" line, or the last tag."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\w])")
_CONNECTOR = re.compile(r"[\s$,;.]*(?:and|or|\\text\{ ?(?:and|or) ?\})?[\s$,;.]*")
_ANSWER_LINE = re.compile(
    r"^[^\w\n]*(?:the\s+)?(?:final\s+)?answer\b[*_ ]*(?:is)?[*_ ]*[:\uff1a](.*)$", re.I | re.M
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
        if text[match.end()] != "{":
            content, end = text[match.end()], match.end() + 1
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
    "**Answer:**").
    """
    found = _ANSWER_LINE.findall(text)
    return found[-1].strip().strip("*_").strip().removesuffix(".") if found else None


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
