"""Extraction, multiple choice, format, language, the overlong penalty."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.config.run import settings as config_settings
from megatron_stare.scoring.judge import soft_overlong_penalty
from megatron_stare.scoring.verdict import Verdict, as_verdict
from megatron_stare.scoring.verifiers import (
    SCRIPTS,
    extract,
    language,
    multiple_choice,
    response_format,
)

TEXT = "\\boxed{1} then <answer> 2 </answer>\nAnswer: 3\nand \\boxed{\\frac{4}{5}} is it"


@pytest.mark.parametrize(
    ("extraction", "response", "answer"),
    [
        ("boxed", TEXT, "\\frac{4}{5}"),
        ("answer", TEXT, "3"),
        ("tag", TEXT, "2"),
        ("any", TEXT, "\\frac{4}{5}"),
        ("any", "<answer>2</answer>\nAnswer: 3", "2"),
        ("any", "Final answer: 3.", "3"),
        ("any", "nothing is marked", None),
        ("boxed", "\\boxed{a_{1}} \\boxed{unclosed", "a_{1}"),
        ("boxed", "\\boxed{x \\} y}", "x \\} y"),
        ("boxed", "\\boxed 7", "7"),
        ("boxed", "so $\\boxed 18$.", "18"),
        ("boxed", "\\boxed -1,234.5.", "-1,234.5"),
        ("boxed", "\\boxed x+1", "x"),
        ("boxed", "\\fbox{8}", "8"),
        ("answer", "Answer: \\boxed{}", None),
        ("boxed", "\\boxed{\\boxed{9}}", "9"),
        ("boxed", "\\boxed{" * 2000 + "9" + "}" * 2000, "9"),
        ("boxed", "$\\boxed{1}$ and $\\boxed{2}$", "1, 2"),
        ("boxed", "\\boxed{1}, \\boxed{2}", "1, 2"),
        ("boxed", "\\boxed{1}. Wait, \\boxed{2}", "2"),
        ("boxed", "\\boxed{1}\n\n\\boxed{2}", "2"),
        ("boxed", "\\boxed{}", None),
        ("boxed", "\\boxed", None),
        ("answer", "**Answer:** 12", "12"),
        ("answer", "Answer: no\nThe final answer is: $\\boxed{12}$.", "12"),
        ("answer", "answer\uff1a 12", "12"),
        ("answer", "I answered: 12", None),
        ("answer", "Answer:\n12", None),
        ("answer", "The answer " + "_ " * 100_000, None),  # hours, if blanks were divided in two
        ("answer", "The answer __is__ **: 12**", "12"),
        ("any", "Final Answer: The final answer is $12$. I hope it is correct.", "$12$"),
        ("answer", "Answer: the answer is 3.5.", "3.5"),
        ("tag", "<answer>1</answer> <answer>2", "1"),
        ("tag", "</answer><answer>", None),
    ],
)
def test_extraction(extraction: str, response: str, answer: str | None) -> None:
    assert extract(response, extraction) == answer


def test_the_tag_has_a_name() -> None:
    assert extract("<answer>1</answer><final>2</final>", "tag", "final") == "2"


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["\\boxed", *"{}\\a\n$", "<answer>", "</answer>", "Answer:"])).map(
        "".join
    )
)
def test_no_text_breaks_extraction(text: str) -> None:
    for extraction in config_settings()["scoring.extraction"].choices:
        found = extract(text, extraction)
        assert found is None or found.strip()


@pytest.mark.parametrize(
    ("response", "label", "verdict"),
    [
        ("\\boxed{C}", "C", "correct"),
        ("\\boxed{\\text{(C)}}", "C", "correct"),
        ("Answer: C. 12 cm", "(C)", "correct"),
        ("so the answer is (b).", "B", "correct"),
        ("I would choose option D", "D", "correct"),
        ("the answer is A because 2 < 3", "A", "correct"),
        ("The answer is **C**", "C", "correct"),
        ("I choose option b, for it is larger", "B", "correct"),
        ("Answer: B since it is larger", "B", "correct"),
        ("The answer is C, a mystery", "C", "correct"),
        ("the answer is a mystery", "A", "wrong"),
        ("Answer: a mystery", "A", "wrong"),
        ("\\boxed{A mystery}", "A", "wrong"),
        ("The answer is I think unknown", "I", "wrong"),
        ("there is no choice a person could make", "A", "wrong"),
        ("I cannot answer a question like this", "A", "wrong"),
        ("\\boxed{B}", "C", "wrong"),
        ("\\boxed{Cat}", "C", "wrong"),
        ("\\boxed{12}", "C", "wrong"),
        ("no idea", "C", "wrong"),
        ("\\boxed{C}", "12", "unverifiable"),
        ("\\boxed{A}", "A, C", "wrong"),
        ("\\boxed{C, A}", "A, C", "correct"),
        ("\\boxed{A and C}", "AC", "correct"),
        ("\\boxed{AC}", "A, B", "wrong"),
        ("\\boxed{A, C}", "A", "wrong"),
        ("\\boxed{A/B}", "A", "wrong"),
        ("\\boxed{B or C}", "B", "wrong"),
        ("\\boxed{B. no, C}", "B", "wrong"),
        ("\\boxed{(A) (B) (C) (D)}", "A", "wrong"),
        ("\\boxed{C. both A and B}", "C", "correct"),
        ("\\boxed{C. $x^2$}", "C", "correct"),
        ("\\boxed{Option C}", "C", "correct"),
        ("Answer: The correct answer is C", "C", "correct"),
        ("\\boxed{C. The answer is B}", "B", "wrong"),
        ("C", "C", "correct"),
        ("Paris is in France.\n\n**(C)**\n", "C", "correct"),
        ("C is wrong", "C", "wrong"),
        ("C\nor something else", "C", "wrong"),
    ],
)
def test_multiple_choice(response: str, label: str, verdict: str) -> None:
    assert multiple_choice(response, label, {}).verdict == verdict


def test_format() -> None:
    pattern = "^<think>.*</think>.*$"
    assert response_format("<think>a\nb</think> c", "", {}, pattern).value == 1.0
    assert response_format("a</think>", "", {}, pattern).value == 0.0


@pytest.mark.parametrize(
    ("response", "script", "share"),
    [
        ("plain English", "latin", 1.0),
        ("\u4e2d\u6587 ab", "han", 0.5),
        ("\u4e2d\u6587 $\\alpha x y z$ \\frac", "han", 1.0),
        ("\u043f\u0440\u0438\u0432\u0435\u0442", "latin", 0.0),
        ("\u043f\u0440\u0438\u0432\u0435\u0442", "cyrillic", 1.0),
        ("```python\nabc```\u4e2d", "han", 1.0),
        ("12 + 3", "han", 1.0),
        ("\u3042\u30a2\u6f22", "japanese", 1.0),
    ],
)
def test_language(response: str, script: str, share: float) -> None:
    found = language(response, "", {}, script)
    assert found.value == pytest.approx(share)
    assert found.verdict == ("correct" if share > 0.5 else "wrong")


def test_the_config_knows_every_script() -> None:
    assert set(config_settings()["scoring.language"].choices) == set(SCRIPTS)


def test_the_overlong_penalty_equals_that_of_dapo() -> None:
    lengths = {0: 0.0, 16384: 0.0, 17408: -0.25, 18432: -0.5, 20480: -1.0, 30000: -1.0}
    for length, penalty in lengths.items():
        assert soft_overlong_penalty(length, 20480, 4096) == penalty
        assert soft_overlong_penalty(length, 20480, 4096, 0.5) == penalty / 2
    with pytest.raises(ValueError, match="buffer=0"):
        soft_overlong_penalty(1, 2, 0)


@pytest.mark.parametrize(
    ("result", "value", "word"),
    [
        (1, 1.0, "correct"),
        (True, 1.0, "correct"),
        (0.0, 0.0, "wrong"),
        (-1, -1.0, "wrong"),
        ("0.5", 0.5, "correct"),
    ],
)
def test_a_number_is_a_verdict(result: object, value: float, word: str) -> None:
    assert (as_verdict(result).value, as_verdict(result).verdict) == (value, word)


class Unready:
    """A number of a library that cannot be read."""

    def __float__(self) -> float:
        raise RuntimeError("not computed")


@pytest.mark.parametrize(
    "result", [None, float("nan"), float("inf"), "yes", [1], 10**400, Unready()]
)
def test_a_reward_that_is_not_a_number_is_unverifiable(result: object) -> None:
    assert as_verdict(result).verdict == "unverifiable" and as_verdict(result).reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "yes"])
def test_a_verdict_whose_value_is_not_a_number_is_unverifiable(value: Any) -> None:
    """Else one reward of NaN ends the run: every advantage of its group is NaN."""
    found = as_verdict(Verdict(value, "correct"))
    assert found.value is None and found.verdict == "unverifiable" and found.reason


@pytest.mark.parametrize("unit", ["\\[", "\\(", "\\[x\\(", "$", "$$", "`", "```", "\\[a\\]"])
def test_language_takes_linear_time(unit: str) -> None:
    """It runs in the trainer's process. Four times the text, about four times the time."""

    def seconds(length: int) -> float:
        times = []
        for _ in range(3):
            began = time.process_time()
            language(unit * (length // len(unit)), "", {}, "latin")
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(80_000) < 10 * seconds(20_000) + 0.05
