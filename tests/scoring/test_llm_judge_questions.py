"""A judge's questions, and how its answers are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stare.config import JudgeConfig, UserError
from megatron_stare.scoring.judge_client import BadAnswer, object_in
from megatron_stare.scoring.llm_judge import Questions, criteria_of
from megatron_stare.scoring.verdict import Sample

SAMPLE = Sample("It is {prompt} 42.", "42", {}, "6*7?")
RUBRIC = [
    {"criterion": "is right", "weight": 3},
    {"criterion": "is clear", "choices": ["bad", "fair", "good"]},
]


def read(settings: JudgeConfig, answer: str, sample: Sample = SAMPLE) -> float:
    ((question, _),) = Questions(settings).of(sample)
    return question.read(object_in(answer))


@pytest.mark.parametrize(
    ("kind", "answer", "value"),
    [
        ("score", '{"score": 7}', 0.7),
        ("score", 'As {"score": 1} says: {"score": 2.5} is fair.', 0.25),
        ("score", '<think>{"score": 9}</think>```json\n{"score": 0}\n```', 0.0),
        ("reference", '{"correct": true}', 1.0),
        ("reference", '{"correct": false, "why": {"a": 1}}', 0.0),
        ("rubric", '{"verdicts": ["yes", "fair"]}', (3 * 1 + 1 * 0.5) / 4),
        ("rubric", '{"verdicts": ["No ", "GOOD"]}', 1 / 4),
    ],
)
def test_an_answer_has_a_value(kind: Any, answer: str, value: float):
    sample = Sample("a", "42", {"rubric": RUBRIC}, "p")
    assert read(JudgeConfig(kind=kind), answer, sample) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("score", "7"),
        ("score", ""),
        ("score", "a score of {7}"),
        ("score", '{"score": 11}'),
        ("score", '{"score": -1}'),
        ("score", '{"score": true}'),
        ("score", '{"score": "7"}'),
        ("score", '{"score": NaN}'),
        ("score", '{"score": 7'),
        ("score", '<think>so {"score": 7}'),
        ("score", '{"score": 7} or rather {"rating": 3}'),
        ("reference", '{"correct": 1}'),
        ("reference", '{"correct": "yes"}'),
        ("rubric", '{"verdicts": ["yes"]}'),
        ("rubric", '{"verdicts": ["yes", "superb"]}'),
        ("rubric", '{"verdicts": "yes"}'),
    ],
)
def test_an_answer_of_another_form_has_no_value(kind: Any, answer: str):
    with pytest.raises(BadAnswer):
        read(JudgeConfig(kind=kind), answer, Sample("a", "42", {"rubric": RUBRIC}, "p"))


@pytest.mark.parametrize(("better", "value"), [("A", 1.0), ("b", 0.0), ("Tie", 0.5)])
def test_a_comparison_has_a_value(better: str, value: float):
    question = Questions(JudgeConfig(kind="pairwise")).between("p", "one", "other")
    assert question.read({"better": better}) == value
    assert question.text.index("one") < question.text.index("other")
    with pytest.raises(BadAnswer):
        question.read({"better": "C"})


@given(st.text(alphabet="{}promtesk<>/ \n", max_size=60))
def test_a_response_stays_as_it_is_between_marks_that_it_cannot_close(response: str):
    ((question, _),) = Questions(JudgeConfig()).of(Sample(response, "", {}, "p"))
    mark = question.text.partition("<response ")[2].partition(">")[0]
    assert len(mark) == 12 and mark not in response
    assert f"<response {mark}>\n{response}\n</response {mark}>" in question.text


def test_each_criterion_may_have_a_question_of_its_own(tmp_path: Path):
    path = tmp_path / "rubric.json"
    path.write_text(json.dumps(RUBRIC))
    settings = JudgeConfig(kind="rubric", rubric=str(path), rubric_calls="each")
    found = Questions(settings).of(SAMPLE)
    assert [weight for _, weight in found] == [3, 1]
    assert "is right" in found[0][0].text and "is clear" not in found[0][0].text
    assert found[1][0].read({"verdicts": ["fair"]}) == 0.5


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "list of criteria"),
        ([], "list of criteria"),
        ([3], "must be a text"),
        ([{"criterion": "a", "weight": 0}], "weight=0"),
        ([{"criterion": "a", "weight": float("nan")}], "weight=nan"),
        ([{"criterion": "a", "choices": ["yes"]}], "choices="),
        ([{"criterion": "a", "choices": ["yes", "Yes"]}], "choices="),
    ],
)
def test_an_invalid_rubric_is_refused(rows: Any, message: str):
    with pytest.raises(ValueError, match=message):
        criteria_of(rows)


def test_a_users_template_is_filled(tmp_path: Path):
    path = tmp_path / "template.txt"
    path.write_text('Rate {response} of {prompt} up to {scale}; say {"score": 1} {other}')
    settings = JudgeConfig(template=str(path), scale=5)
    ((question, _),) = Questions(settings).of(SAMPLE)
    assert question.text == 'Rate It is {prompt} 42. of 6*7? up to 5; say {"score": 1} {other}'
    for kind, field in (("reference", "reference"), ("rubric", "criteria"), ("pairwise", "first")):
        with pytest.raises(UserError, match=f"has no {{{field}}}"):
            Questions(JudgeConfig(kind=kind, template=str(path)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot be read"):
        Questions(JudgeConfig(template=str(tmp_path / "missing")))
