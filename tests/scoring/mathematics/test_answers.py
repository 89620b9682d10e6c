"""The math verifier on real labels: itself in many written forms, never anything else;
and hostile responses.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest

from megatron_stare.scoring.mathematics.answers import equal, math
from megatron_stare.scoring.verdict import Sample
from megatron_stare.scoring.verifier_pool import VerifierPool
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
EQUAL += [
    *(("4.5e33", form) for form in ("4.5E33", "4.5 \\times 10^{33}", "4.5\\cdot10^{33}", "45e32")),
    *(("1.2e-5", form) for form in ("0.000012", "1.2 \\times 10^{-5}", "12 \\cdot 10^{-6}")),
    ("2000000", "2 \\times 10^6"),
    ("4.5e33", "4.5 \\times 10^{33} \\mathrm{~erg} \\mathrm{~s}^{-1}"),
    ("(2,4.5e33)", "(2, 4.5\\times 10^{33})"),
    ("(2,\\infty)", "(2, +\\infty)"),
    *(
        ("(2,\\infty)", form)
        for form in ("x>2", "2 < x", "x \\in (2, +\\infty)", "\\{x \\mid x > 2\\}")
    ),
    ("(3,4]", "3 < x \\leq 4"),
    ("(3,4]", "4 \\ge x > 3"),
    ("x \\geq \\frac{1}{2}", "[0.5, \\infty)"),
    ("(-\\infty,2)\\cup(3,\\infty)", "x < 2 \\text{ or } x > 3"),
    ("(-\\infty,\\infty)", "\\mathbb{R}"),
    ("\\emptyset", "\\varnothing"),
    ("\\varnothing", "\\{\\}"),
    ("2125", "N = 2,125"),
    ("(1,2)", "(x,y) = (1,2)"),
    ("12", "\\boldsymbol{12}"),
    ("\\frac{1}{2}", "\\boldsymbol{\\dfrac{1}{2}}"),
    ("3.14", "\\approx 3.14"),
    ("3.14", "x \\approx 3.14"),
    ("\\frac{22}{7}", "\\frac{22}{7} \\approx 3.143"),
    ("1/3", "0.\\overline{3}"),
    ("\\frac{7}{6}", "1.1\\bar{6}"),
    *(("12", form) for form in ("(C) 12", "C. 12", "\\textbf{(C)}\\ 12", "\\text{(C) } 12")),
    ("\\text{(C)}", "(C) 12"),
    (".35625", "(C) .35625"),
    ("1024", "2^{10}"),
    ("2^{10}", "1024"),
    ("\\frac{3}{4}", "6/8"),
    ("2\\sqrt{3}", "\\sqrt{12}"),
    ("\\binom{10}{3}", "\\binom{10}{7}"),
    ("\\ln 4", "2\\ln 2"),
    ("10.81665382639", "3\\sqrt{13}"),
]
DIFFERENT = [
    ("4.5e33", "4.5e34"),
    ("4.5e33", "4.5 \\cdot e \\cdot 33"),
    ("(2,\\infty)", "(2,-\\infty)"),
    ("(2,\\infty)", "x \\ge 2"),
    ("x > 2", "y > 2"),
    ("(3,4]", "3 \\le x < 4"),
    ("\\emptyset", "0"),
    ("0.3", "0.\\overline{3}"),
    ("12", "(C) 13"),
    ("3.14", "\\approx 3.15"),
    ("2125", "N = 2,126"),
]
# An expression of the label's value that leaves the computing to the reader.
UNEVALUATED = [
    ("55", "\\sum_{k=1}^{10} k"),
    ("6", "\\gcd(12,18)"),
    ("6", "\\operatorname{gcd}(12,18)"),
    ("10", "\\binom{5}{2}"),
    ("120", "5!"),
    ("\\frac{1}{3}", "\\int_0^1 x^2 dx"),
    ("7", "3 + 4"),
    ("12", "3 \\cdot 4"),
    ("12", "3 \\times 4"),
    ("4", "\\sqrt{16}"),
    ("3", "\\log_2 8"),
    ("\\frac{\\sqrt{3}}{2}", "\\sin \\frac{\\pi}{3}"),
    ("6+9i", "6(1+2i)-3i"),
    ("5", "x - x + 5"),
    ("1.75", "0.5 + 1.25"),
    ("(6, 1)", "(\\gcd(12,18), 1)"),
]
DIFFERENT += [
    (".0000672", ".0000673"),
    ("1000000", "1000001"),
    ("1/3", "0.33"),
    ("1/3", "0.333334"),
    ("52_8", "52_9"),
    ("52_8", "53_8"),
    ("\\text{east}", "eats"),
    ("\\text{east}", "\\text{eats}"),
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


@pytest.mark.parametrize(("label", "answer"), UNEVALUATED)
def test_an_unevaluated_expression_is_wrong_unless_allowed(label: str, answer: str) -> None:
    assert not equal(answer, label)
    assert not equal(answer, label, require_evaluated="always")
    assert equal(answer, label, require_evaluated="never")


def test_a_label_that_is_not_a_number_allows_operations() -> None:
    label, answer = "\\frac{n(n+1)}{2}", "\\frac{n(n+1)}{2} + \\gcd(2,4) - 2"
    assert not equal(answer, label, require_evaluated="always")
    assert equal("\\frac{n^2+n}{2}", label, require_evaluated="always")


@pytest.mark.parametrize(("label", "answer"), DIFFERENT)
def test_different(label: str, answer: str) -> None:
    assert not equal(answer, label)
    assert not equal(label, answer) if answer.strip("}{") and "{0}" not in answer else True


def test_the_tolerance_is_relative_and_for_decimals_only() -> None:
    assert equal("100.5", "100.0", 0.01) and not equal("102", "100.0", 0.01)
    for answer in ("203.9999", "204.0001", "203.99999999", "\\sqrt{41615.9999}"):
        assert not equal(answer, "204"), "an integer label wants an exact value"
        assert not equal(answer, "204", require_evaluated="never")
    assert equal("204.0", "204") and equal("204", "203.9999")
    assert (
        not equal("12 \\approx 99", "12")
        and not equal("(3)(4)", "12")
        and not equal("12 \\approx 99", "99")
    )
    assert not equal("101", "100", 0.1)
    assert not equal("0.333333", "0.333334", 0.0) and equal("0.333333", "1/3", 0.0)
    assert equal("1.4", "\\sqrt{2}", 0.02) and not equal("1.4", "\\sqrt{2}")


def test_a_label_that_cannot_be_read_makes_no_answer_wrong_but_for_none() -> None:
    label = "3x + = \\frac{"
    assert math(f"Answer: {label}", label, {}).verdict == "correct"
    found = math("\\boxed{7}", label, {})
    assert (found.verdict, found.value, found.extracted) == ("unverifiable", None, "7")
    assert math("I do not know", label, {}).verdict == "wrong"


def test_an_answer_that_takes_all_the_stack_is_wrong_and_a_label_that_does_is_unverifiable() -> (
    None
):
    deep = "\\frac{x}{" * 150 + "2" + "}" * 150
    found = math(f"\\boxed{{{deep}}}", "x+2", {})
    assert found.verdict == "wrong" and "RecursionError" in found.reason
    found = math("\\boxed{x+2}", deep, {})
    assert found.verdict == "unverifiable"


def test_an_answer_too_long_to_be_read_is_wrong_and_says_so() -> None:
    found = math("\\boxed{" + "+".join(["1"] * 4000) + "}", "4", {})
    assert (found.verdict, found.value) == ("wrong", 0.0) and "characters" in found.reason


def test_a_bomb_is_wrong_at_the_first_kill_and_mostly_not_computed_at_all() -> None:
    bombs = [Sample("\\boxed{9^{9^{9^9}}}", label) for label in ("4", "x+2")]
    with contextlib.closing(VerifierPool(SPECS, 1, 5.0, 2048)) as pool:
        plain, formula = pool.judge("math", bombs)
    assert (plain.verdict, plain.kills) == ("wrong", 0)
    assert formula.verdict == "wrong" and formula.kills <= 1 and formula.reason


@pytest.mark.usefixtures("ahead")
def test_a_long_answer_gains_nothing_by_the_time_that_its_spelling_takes() -> None:
    """Without a verdict it would leave the loss."""
    with contextlib.closing(VerifierPool(SPECS, 2, 3.0, 2048)) as pool:
        answers = [" " * 100_000 + "!", "~ " * 100_000 + "!"]
        blanks, ties = pool.judge("math", [Sample(f"\\boxed{{4{one}}}", "4") for one in answers])
    assert (blanks.verdict, blanks.kills) == ("wrong", 0)
    assert (ties.verdict, ties.kills) == ("wrong", 1)


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
    assert sum(verdict.kills for verdict in verdicts) <= explosive, "one process a bomb at most"
