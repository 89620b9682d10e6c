"""The math verifier on real labels: itself in many written forms, never anything else;
and hostile responses.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest

from megatron_stare.scoring.mathematics.answers import equal, math
from megatron_stare.scoring.pool import VerifierPool
from megatron_stare.scoring.verdict import Sample
from tests.scoring.mathematics.hostile import EXPLOSIVE, hostile_responses
from tests.scoring.mathematics.labels import (
    bare,
    ground_truths,
    needs_math_data,
    perturbed,
    rational,
    written_forms,
)

SPECS = {"math": ("megatron_stare.scoring.mathematics.answers.math", {})}


@needs_math_data
def test_every_ground_truth_verifies_in_every_written_form() -> None:
    """All files, all forms: it takes seconds, so nothing is sampled."""
    labels, seen = ground_truths(), Counter[str]()
    assert len(labels) > 1000
    for label in labels:
        responses = written_forms(label)
        assert len(responses) >= 7
        for form, response in responses.items():
            seen[form] += 1
            verdict = math(response, label, {})
            assert verdict.verdict == "correct", (form, label, response, verdict)
    assert all(
        seen[form] > 500
        for form in ("boxed", "text around", "spaces", "dfrac", "tfrac", "fraction", "decimal")
    )


def _assert_perturbed_are_wrong(labels: list[str]) -> int:
    seen = Counter[str]()
    for label in labels:
        for change, answer in perturbed(label).items():
            seen[change] += 1
            verdict = math(f"\\boxed{{{answer}}}", label, {})
            assert verdict.verdict == "wrong", (change, label, answer, verdict)
    return len(seen)


@needs_math_data
def test_no_perturbed_answer_verifies() -> None:
    """Every label that is more than an integer, and some of those that are."""
    labels = ground_truths()
    plain = [label for label in labels if bare(label).lstrip("-").isdigit()]
    others = [label for label in labels if label not in set(plain)]
    assert _assert_perturbed_are_wrong(others[::3] + plain[::20]) >= 12


@needs_math_data
@pytest.mark.slow
def test_no_perturbed_answer_of_any_label_verifies() -> None:
    _assert_perturbed_are_wrong(ground_truths())


@needs_math_data
@pytest.mark.slow
def test_no_label_verifies_as_another() -> None:
    """Each label with an answer of equal kind but another value:
    its neighbours in the list of all.
    """
    labels = [bare(label) for label in ground_truths()]
    for number, label in enumerate(labels):
        for other in labels[number + 1 : number + 4]:
            one, two = rational(label), rational(other)
            if label.replace(" ", "") == other.replace(" ", "") or (one is not None and one == two):
                continue
            assert math(f"\\boxed{{{other}}}", label, {}).verdict == "wrong", (label, other)


EQUAL = [
    ("1/3", "0.333333"),
    ("1/6", "0.166667"),
    ("\\frac{1}{2}", "0.5"),
    ("\\frac{1}{2}", ".50"),
    ("50\\%", "\\frac12"),
    ("50", "50\\%"),
    ("1\\frac{4}{5}", "9/5"),
    ("137 \\frac{1}{2}", "137.5"),
    ("2,125", "2125"),
    ("10,\\!080", "10080"),
    ("\\$32,\\!348", "32348"),
    ("90^\\circ", "90"),
    ("90^\\circ", "90 \\text{ degrees}"),
    ("5.4 \\text{ cents}", "5.4"),
    ("864 \\mbox{ inches}^2", "864"),
    ("52_8", "52_{8}"),
    ("\\text{(C)}", "C"),
    ("\\text{east}", "East"),
    ("x=5", "5"),
    ("y = 2x + 3", "2x+3"),
    ("1,-2", "-2, 1"),
    ("1,-2", "1 \\text{ and } -2"),
    ("1,-2", "x = 1, x = -2"),
    ("1 \\pm \\sqrt{19}", "1 - \\sqrt{19}, 1 + \\sqrt{19}"),
    ("\\{1\\pm\\sqrt{5},-2\\}", "\\{-2, 1+\\sqrt5, 1-\\sqrt5\\}"),
    ("(3,4]", "\\left(3, 4\\right]"),
    ("(-\\infty, 2) \\cup (3, \\infty)", "(3,\\infty)\\cup(-\\infty,2)"),
    (
        "\\begin{pmatrix} -1/3 \\\\ 2/3 \\end{pmatrix}",
        "\\begin{bmatrix} -\\frac13 \\\\ \\frac23 \\end{bmatrix}",
    ),
    ("(a+5)(b+2)", "(b+2)(a+5)"),
    ("6r^2-4r-24", "2(3r^2 - 2r - 12)"),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt3}"),
    ("3\\sqrt{13}", "10.81665382639"),
    (".0000672", "6.72 \\times 10^{-5}"),
    ("\u03c0/2", "\\frac{\\pi}{2}"),
    ("6 - 5i", "-5i + 6"),
]
DIFFERENT = [
    (".0000672", ".0000673"),
    ("1000000", "1000001"),
    ("1/3", "0.33"),
    ("1/3", "0.333334"),
    ("52_8", "52_9"),
    ("52_8", "53_8"),
    ("\\text{east}", "seat"),
    ("\\text{east}", "\\text{seat}"),
    ("(8,-2)", "(9,-3)"),
    ("(8,-2)", "(-2,8)"),
    ("(3,4]", "[3,4]"),
    ("(2,4)", "[2,4]"),
    ("1,-2", "1"),
    ("1", "1, -2"),
    ("1,-2", "1, 2, -2"),
    ("2k", "2m"),
    ("p - q", "q - p"),
    ("x=5", "x=6"),
    ("x=5", "y=5"),
    ("y = 2x + 3", "2x - 3"),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
    ("\\cot x", "\\tan x"),
    ("6+9i", "6-9i"),
    ("3\\sqrt{13}", "10.8"),
    ("\\pi", "3.14"),
    ("5", ""),
    ("5", "}{"),
    ("5", "\\frac{5}{0}"),
    ("\\frac{1}{2}", "\\frac{1}{" * 50 + "3" + "}" * 50),
]


@pytest.mark.parametrize(("label", "answer"), EQUAL)
def test_equal(label: str, answer: str) -> None:
    assert equal(answer, label)


@pytest.mark.parametrize(("label", "answer"), DIFFERENT)
def test_different(label: str, answer: str) -> None:
    assert not equal(answer, label)
    assert not equal(label, answer) if answer.strip("}{") and "{0}" not in answer else True


def test_the_tolerance_is_relative_and_for_decimals_only() -> None:
    assert equal("100.5", "100", 0.01) and not equal("102", "100.0", 0.01)
    assert not equal("101", "100", 0.1)
    assert not equal("0.333333", "0.333334", 0.0) and equal("0.333333", "1/3", 0.0)
    assert equal("1.4", "\\sqrt{2}", 0.02) and not equal("1.4", "\\sqrt{2}")


def test_a_label_that_cannot_be_read_makes_no_answer_wrong_but_for_none() -> None:
    label = "3x + = \\frac{"
    assert math(f"Answer: {label}", label, {}).verdict == "correct"
    found = math("\\boxed{7}", label, {})
    assert (found.verdict, found.value, found.extracted) == ("unverifiable", None, "7")
    assert math("I do not know", label, {}).verdict == "wrong"


def test_running_out_of_stack_is_unverifiable_even_where_it_is_swallowed() -> None:
    found = math("\\boxed{" + "\\frac{1}{" * 150 + "2" + "}" * 150 + "}", "2", {})
    assert found.verdict == "unverifiable" and "RecursionError" in found.reason


@pytest.mark.parametrize(
    ("count", "explosive"), [(300, 4), pytest.param(2000, len(EXPLOSIVE), marks=pytest.mark.slow)]
)
def test_hostile_responses_are_answered_within_the_deadline(count: int, explosive: int) -> None:
    """Each gets a verdict, in order; what has no value says why;
    the honest ones between them are right.
    """
    deadline = 5.0
    responses = hostile_responses(count, explosive)
    samples = [Sample(response, "4") for response in responses]
    honest = Sample("So it is \\boxed{4}.", "4")
    mixed = [sample for hostile in samples for sample in (hostile, honest)]
    random.Random(0).shuffle(mixed)
    with contextlib.closing(VerifierPool(SPECS, 2, deadline, 2048)) as pool:
        verdicts = pool.judge("math", mixed)
    assert len(verdicts) == len(mixed) == 2 * count
    for sample, verdict in zip(mixed, verdicts, strict=True):
        if sample is honest:
            assert verdict.verdict == "correct"
        elif verdict.value is None:
            assert verdict.verdict == "unverifiable" and verdict.reason
        else:  # a verdict was reached: right or wrong, about an answer or about there being none
            assert verdict.verdict == ("correct" if verdict.value else "wrong")
            assert verdict.value == 0.0 or sample.response.count("4") == 1, sample
    assert any(verdict.kills for verdict in verdicts)
