"""Which answers of a problem are the same answer: what majority@k votes on.

All answers that were judged correct are one: they equal the label. Others are one where their texts
agree except for white space, or where the verifier, given one of them as the label, judges the
other correct. That is asked only of verifiers that compare two answers, and only where a problem
has a correct response: else no vote can be right.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_stare.config import ScoringConfig
from megatron_stare.scoring.judge import Judge
from megatron_stare.scoring.verdict import Sample, Verdict

# Verifiers whose label is an answer of the kind that they extract.
COMPARING = ("math", "multiple_choice")


def answer_classes(
    problems: Sequence[Sequence[Verdict]], judge: Judge, scoring: ScoringConfig
) -> list[tuple[list[str], list[int | None]]]:
    """For each problem, from the verdicts of its responses:
    its answers, and which of them each response gave.
    """
    right = [
        {_key(v.extracted) for v in verdicts if v.verdict == "correct"} - {None}
        for verdicts in problems
    ]
    merged: list[dict[str, str]] = [
        {} for _ in problems
    ]  # key of an answer -> key of the one that it equals
    if scoring.reward in COMPARING:
        merged = _compared(problems, right, judge, scoring)
    return [_numbered(*parts) for parts in zip(problems, right, merged, strict=True)]


def _key(answer: str | None) -> str | None:
    return None if answer is None else "".join(answer.split())


def _numbered(
    verdicts: Sequence[Verdict], right: set[str | None], merged: dict[str, str]
) -> tuple[list[str], list[int | None]]:
    """Answers in the order in which they first came."""
    numbers: dict[str, int] = {}
    answers: list[str] = []
    given: list[int | None] = []
    for verdict in verdicts:
        key = _key(verdict.extracted)
        if key is None or verdict.extracted is None:
            given.append(None)
            continue
        shared = "correct" if key in right else "other " + merged.get(key, key)
        if shared not in numbers:
            numbers[shared] = len(numbers)
            answers.append(verdict.extracted)
        given.append(numbers[shared])
    return answers, given


def _compared(
    problems: Sequence[Sequence[Verdict]],
    right: Sequence[set[str | None]],
    judge: Judge,
    scoring: ScoringConfig,
) -> list[dict[str, str]]:
    """In rounds over all problems: the first answer left of each is the label,
    those that equal it leave with it.
    """
    left: dict[int, dict[str, str]] = {}  # problem -> key -> answer as written
    for place, verdicts in enumerate(problems):
        written = {
            key: v.extracted
            for v in verdicts
            if v.extracted is not None and (key := _key(v.extracted))
        }
        if right[place]:
            left[place] = {key: text for key, text in written.items() if key not in right[place]}
    merged: list[dict[str, str]] = [{} for _ in problems]
    while left := {place: answers for place, answers in left.items() if len(answers) > 1}:
        pairs, samples = [], []
        for place, answers in left.items():
            label, *others = answers
            pairs += [(place, label, other) for other in others]
            samples += [
                Sample(_response(answers[other], scoring), answers[label]) for other in others
            ]
            left[place] = {key: answers[key] for key in others}
        for (place, label, other), verdict in zip(
            pairs, judge.backends[scoring.reward].judge(samples), strict=True
        ):
            if verdict.verdict == "correct":
                merged[place][other] = label
                del left[place][other]
    return merged


def _response(answer: str, scoring: ScoringConfig) -> str:
    """A response that gives this answer, in the form that scoring.extraction reads."""
    if scoring.extraction == "answer":
        return f"Answer: {answer}"
    if scoring.extraction == "tag":
        return f"<{scoring.answer_tag}>{answer}</{scoring.answer_tag}>"
    return f"\\boxed{{{answer}}}"
