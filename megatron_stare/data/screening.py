"""Rows that must not be trained on twice, or at all: duplicates, problems of the evaluation files,
and problems that are too easy or too hard.

Two prompts are the same by what they ask (Row.question); the label does not count. `normalised`
forgets case, white space and LaTeX's spacing and spelling variants; no word is left out,
instructions included.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator

from megatron_stare.config import DataConfig, UserError
from megatron_stare.data.rows import Dropped, Row
from megatron_stare.data.sources import raw_rows
from megatron_stare.records import Prompt

DUPLICATE, RELABELLED, EVALUATED = (
    "duplicate",
    "duplicate with another label",
    "in the evaluation data",
)
# A problem is looked for by this many characters from its middle, then letter by letter.
_WINDOW = 40
# TeX: thin, medium, thick and negative space, a line break, a tie; wide space; the size of
# brackets; formula marks.
_FORGOTTEN = re.compile(
    r"\\[,:;!> "
    r"]|\\\\|~|\\q?quad(?![a-z])|\\(?:left|right|displaystyle|limits)(?![a-z])|\\[()\[\]]|\$|\s+"
)
_SPELLINGS = (
    (re.compile(r"\\[dt]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\([lg])e(?![a-z])"), r"\\\1eq"),
)


def normalised(text: str) -> str:
    """The text without case, white space, LaTeX spacing and dollar signs, which mean nothing."""
    text = unicodedata.normalize("NFKC", text).casefold()
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return _FORGOTTEN.sub("", text)


class PassRates:
    """Fractions of correct responses that `evaluate` found (problems.jsonl), by prompt and label.
    Several rows of one problem are added up.
    """

    def __init__(self, data: DataConfig) -> None:
        self._least, self._most = data.min_pass_rate, data.max_pass_rate
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}
        for raw in raw_rows(data.pass_rates, "data.pass_rates"):
            try:
                problem = (raw.row["prompt"], raw.row["label"])
                correct, sampled = self._counts.get(problem, (0, 0))
                self._counts[problem] = (correct + raw.row["correct"], sampled + raw.row["k"])
            except (TypeError, KeyError) as error:
                lacks = f"lacks {error}" if isinstance(error, KeyError) else "has another form"
                raise UserError(
                    f"data.pass_rates={raw.file}, row {raw.number}: {raw.fault or lacks}; give the "
                    "problems.jsonl that `evaluate` writes"
                ) from None

    def refusal(self, prompt: Prompt) -> tuple[str, str]:
        """The setting that leaves the prompt out, and its counts; empty if it is kept."""
        correct, sampled = self._counts.get((prompt.text, prompt.label), (0, 0))
        if not sampled:
            return "without a row in data.pass_rates", ""
        rate, said = correct / sampled, f"{correct} of {sampled} responses are correct"
        if rate < self._least:
            return "below data.min_pass_rate", said
        return ("above data.max_pass_rate", said) if rate > self._most else ("", "")


class Screen:
    """One pass over all sources of a run: a row of a later source may repeat an earlier one's."""

    def __init__(
        self,
        deduplicate: str = "none",
        evaluated: Iterable[str] = (),
        drop_evaluated: bool = False,
        rates: PassRates | None = None,
    ) -> None:
        """deduplicate: none | exact | normalised. `evaluated`: the questions of the evaluation
        files. `rates` choose among the prompts that rows become (`refusal`).
        """
        self._rates = rates
        self.deduplicate, self.drop_evaluated = deduplicate, drop_evaluated
        self.evaluated_rows = 0  # found in the evaluation data, dropped or not
        self._seen: dict[bytes, str] = {}
        self._whole: set[str] = set()
        self._windows: dict[str, list[str]] = {}
        for question in map(normalised, evaluated):
            self._whole.add(question)
            if len(question) >= _WINDOW:
                middle = (len(question) - _WINDOW) // 2
                self._windows.setdefault(question[middle : middle + _WINDOW], []).append(question)

    def kept(self, rows: Iterable[Row], dropped: Dropped) -> Iterator[Row]:
        """The rows to train on; the others are noted in `dropped`."""
        for row in rows:
            asked = (
                normalised(row.question) if self._whole or self.deduplicate == "normalised" else ""
            )
            reason = "" if self.deduplicate == "none" else self._duplicate(row, asked)
            if not reason and self._is_evaluated(asked):
                self.evaluated_rows += 1
                reason = EVALUATED if self.drop_evaluated else ""
            if reason:
                dropped.note(reason, row)
            else:
                yield row

    def refusal(self, prompt: Prompt) -> tuple[str, str]:
        """As of PassRates; empty without `rates`."""
        return self._rates.refusal(prompt) if self._rates else ("", "")

    def _duplicate(self, row: Row, asked: str) -> str:
        text = row.question if self.deduplicate == "exact" else asked
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key not in self._seen:
            self._seen[key] = row.label
            return ""
        return DUPLICATE if self._seen[key] == row.label else RELABELLED

    def _is_evaluated(self, asked: str) -> bool:
        """Whether an evaluation file asks this, or a part of it letter for letter."""
        if asked in self._whole:
            return True
        if not self._windows:
            return False
        return any(
            question in asked
            for start in range(len(asked) - _WINDOW + 1)
            for question in self._windows.get(asked[start : start + _WINDOW], ())
        )
