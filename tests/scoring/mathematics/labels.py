"""Real ground truths, the forms a model may write them in,
and answers that are certainly different.
"""

import re
from fractions import Fraction

import pyarrow.parquet
import pytest

from tests.paths import MATH

needs_math_data = pytest.mark.skipif(not MATH.is_dir(), reason=f"no {MATH}")


def ground_truths() -> list[str]:
    """Every distinct ground truth of every file, in file order."""
    found: dict[str, None] = {}
    for file in sorted(MATH.glob("*.parquet")):
        for row in pyarrow.parquet.read_table(file, columns=["reward_model"]).to_pylist():
            found[row["reward_model"]["ground_truth"]] = None
    return list(found)


def bare(label: str) -> str:
    match = re.fullmatch(r"\\boxed\{(.*)\}", label)
    return match[1] if match else label


def rational(label: str) -> Fraction | None:
    """The value of a label that is written as an integer, decimal or simple fraction.
    Independent of our parser.
    """
    text = label.replace("\\dfrac", "\\frac").replace("\\!", "").replace(" ", "").replace("\\$", "")
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+", text):
        text = text.replace(",", "")
    if re.fullmatch(r"-?\d*\.?\d+", text):
        return Fraction(text)
    match = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", text)
    return Fraction(int(match[1] + match[2]), int(match[3])) if match else None


def terminating(value: Fraction) -> str | None:
    """Its decimal expansion, or None where that never ends (or is long)."""
    for places in range(1, 8):
        scaled = value * 10**places
        if scaled.denominator == 1:
            sign, digits = (
                "-" if scaled < 0 else "",
                str(abs(scaled.numerator)).rjust(places + 1, "0"),
            )
            return f"{sign}{digits[:-places]}.{digits[-places:]}"
    return None


def written_forms(label: str) -> dict[str, str]:
    """Responses that give this very answer, by the name of their form."""
    text = bare(label)
    forms = {
        "boxed": f"So the answer is $\\boxed{{{text}}}$.",
        "text around": f"Step 1 gives 17, hence\n\\[ x_0 = \\boxed{{{text}}} \\]\n"
        "as required, for all 3 cases.",
        "spaces": f"\\boxed{{ {_spaced(text)} }}",
        "dfrac": f"\\boxed{{{_with_fraction(text, 'dfrac')}}}",
        "tfrac": f"\\boxed{{{_with_fraction(text, 'tfrac')}}}",
        "answer line": f"We tried 12 first.\nAnswer: ${text}$",
        "tag": f"<think>12 or 13?</think> <answer>{text}</answer>",
    }
    value = rational(text)
    if value is not None:
        sign, size = "-" if value < 0 else "", abs(value.numerator)
        forms["fraction"] = f"\\boxed{{{sign}\\frac{{{size}}}{{{value.denominator}}}}}"
        forms["unreduced"] = f"\\boxed{{{3 * value.numerator}/{3 * value.denominator}}}"
        forms["units"] = f"\\boxed{{{text} \\text{{ cm}}}}"
        decimal = terminating(value)
        if decimal:
            forms["decimal"] = f"\\boxed{{{decimal}}}"
    return forms


def _spaced(text: str) -> str:
    if re.fullmatch(r"\S*\d,\d{3}\S*", text) or "\\text" in text or "\\mbox" in text:
        return f" {text} "
    return re.sub(r"(?<![\\a-zA-Z{])([,+=()^]|-(?=.))", r" \1 ", text)


def _with_fraction(text: str, command: str) -> str:
    r"""The fraction with \dfrac or \tfrac for \frac; an integer as such a fraction over two."""
    if re.fullmatch(r"-?\d+", text):
        return f"{'-' if int(text) < 0 else ''}\\{command}{{{2 * abs(int(text))}}}{{2}}"
    return re.sub(r"\\[dt]?frac(?![a-zA-Z])", rf"\\{command}", text)


def perturbed(label: str) -> dict[str, str]:
    """Answers that differ from the label in value, not in spelling alone, by what was changed.

    Changing one integer literal by one changes the value of every label of these files (none
    multiplies it by zero or stands in a choice); other changes are made only where they certainly
    make a difference.
    """
    text = bare(label)
    answers = {}
    plain = text.replace("\\!", "")
    literals = list(re.finditer(r"\d+", re.sub(r"\\mbox\{.*", "", plain)))  # units are not compared
    if literals:
        for name, match, step in (
            ("first number + 1", literals[0], 1),
            ("last number + 1", literals[-1], 1),
        ):
            changed = str(int(match[0]) + step).rjust(len(match[0]), "0")
            answers[name] = plain[: match.start()] + changed + plain[match.end() :]
        value = rational(text)
        if value:
            answers["opposite sign"] = text[1:] if text.startswith("-") else f"-{text}"
            answers["ten times"] = str(value * 10)
            answers["its inverse"] = str(1 / value) if abs(value) != 1 else "2"
            answers["one off in the last decimal"] = _nudged(text)
            answers["two answers"] = f"{text} \\text{{ or }} {value + 1}"
    if re.fullmatch(r"\\text\{\(?\w+\)?\}", text):
        word = re.sub(r"\\text|\W", "", text)
        answers["another word"] = f"\\text{{{word[::-1] + 'x'}}}"
        if len(set(word)) > 1:
            answers["an anagram"] = f"\\text{{{word[1:] + word[0]}}}"
    opening, closing = re.match(r"(\\left)?\s*[(\[]", text), re.search(r"[)\]]$", text)
    if opening and closing and "," in text and "\\cup" not in text and "matrix" not in text:
        answers["longer"] = text[: closing.start()].removesuffix("\\right") + ", 77)"
    if "\\infty" in text:
        answers["no infinity"] = text.replace("\\infty", "1000")
    if re.search(r"\((?!-\\infty)", text) and ("\\infty" in text or "\\cup" in text):
        answers["closed"] = re.sub(r"\((?!-\\infty)", "[", text, count=1)
    if re.fullmatch(r"-?\d+(, ?-?\d+)+", text) and rational(text) is None:
        answers["one missing"] = text.rsplit(",", 1)[0]
        answers["one too many"] = f"{text}, 99"
    answers["plus one"] = f"{text} + 1" if not literals else answers["first number + 1"]
    if re.fullmatch(r"\\text\{.*\}", text):
        del answers["plus one"]
    return answers


def _nudged(text: str) -> str:
    decimal = re.search(r"\d(?=\D*$)", text)
    assert decimal is not None
    return text[: decimal.start()] + str((int(decimal[0]) + 1) % 10) + text[decimal.end() :]
