"""pass@k, majority@k and their intervals against all subsets of small cases;
what a set's numbers count.
"""

import itertools
import re
import statistics
import tracemalloc
from fractions import Fraction

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_stare.reporting.problem_scores import (
    Problem,
    Response,
    avg_at_k,
    bootstrap_interval,
    count_reflections,
    ks,
    majority_at_k,
    pass_at_k,
    problem_row,
    set_metrics,
)


def by_enumeration(votes, silent, k):
    """majority@k over all subsets, by the definition."""
    voters = [place for place, (count, _) in enumerate(votes) for _ in range(count)] + [
        None
    ] * silent
    scores = []
    for drawn in itertools.combinations(voters, k):
        given = [answer for answer in drawn if answer is not None]
        most = max((given.count(answer) for answer in given), default=0)
        winners = {answer for answer in given if given.count(answer) == most}
        scores.append(Fraction(sum(votes[answer][1] for answer in winners), max(1, len(winners))))
    return sum(scores) / len(scores)


CASES = [
    ((), 3),
    (((3, True),), 0),
    (((3, False),), 2),
    (((2, True), (2, False)), 0),
    (((2, True), (2, False), (1, False)), 1),
    (((1, True), (1, False), (1, False), (1, False)), 2),
    (((3, False), (2, True), (2, True)), 1),
    (((4, True), (3, False), (1, False)), 1),
    (((1, False), (4, False), (2, True), (1, True)), 0),
]


@pytest.mark.parametrize(("votes", "silent"), CASES)
def test_majority_at_k_agrees_with_enumeration(votes, silent):
    samples = sum(count for count, _ in votes) + silent
    for k in range(1, samples + 1):
        assert majority_at_k(votes, silent, k) == pytest.approx(
            float(by_enumeration(votes, silent, k)), abs=1e-12
        )


def test_majority_at_one_is_the_share_of_right_responses():
    votes = ((11, True), (9, False), (7, False), (30, False))
    assert majority_at_k(votes, 7, 1) == pytest.approx(11 / 64)


def test_majority_at_the_largest_subsets_stays_exact():
    half = ((32, True), (32, False))
    assert all(
        majority_at_k(half, 0, k) == pytest.approx(0.5, abs=1e-12) for k in (1, 2, 31, 32, 63, 64)
    )
    one_each = tuple((1, place == 0) for place in range(64))
    assert all(
        majority_at_k(one_each, 0, k) == pytest.approx(1 / 64, abs=1e-12)
        for k in (1, 2, 32, 63, 64)
    )


def test_a_vote_includes_all_responses():
    votes = ((60, True), (50, False))
    assert majority_at_k(votes, 0, 110) == 1.0
    with pytest.raises(ValueError, match="k=8 with 110"):
        majority_at_k(votes, 0, 8)
    for k in (0, 111):
        with pytest.raises(ValueError, match="majority@k"):
            majority_at_k(votes, 0, k)


def test_the_values_of_k_follow_the_sample_count():
    assert [ks(samples) for samples in (1, 2, 4, 6, 32)] == [
        [1],
        [1, 2],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16, 32],
    ]


def test_the_bootstrap_interval_covers_the_true_mean():
    random = statistics.NormalDist(0.4, 0.3)
    inside = 0
    for trial in range(100):
        low, high = bootstrap_interval(random.samples(60, seed=trial), seed=0)
        inside += low <= 0.4 <= high
    assert 88 <= inside <= 99
    assert bootstrap_interval([0.0, 1.0] * 20, 3) == bootstrap_interval([0.0, 1.0] * 20, 3)
    low, high = bootstrap_interval([0.0, 1.0] * 200, 3)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.1)
    assert bootstrap_interval([0.5] * 9) == (0.5, 0.5)
    assert bootstrap_interval([0.5]) is None


def test_the_interval_of_a_large_set_takes_little_memory():
    values = numpy.random.default_rng(0).random(5000)
    tracemalloc.start()
    found = bootstrap_interval(values, 3)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    drawn = numpy.random.default_rng((3, 5000)).integers(5000, size=(2000, 5000))
    assert found == tuple(numpy.percentile(values[drawn].mean(axis=1), [2.5, 97.5]))
    assert most < drawn.nbytes / 20


def test_reflections_are_whole_words_in_either_case():
    words = ["wait", "let me check", "hmm"]
    assert count_reflections("Wait, wait. Let me\n check: await the waiter; hmm? WAIT", words) == 5
    assert count_reflections("wait", []) == 0
    assert count_reflections("c++ is fun; c++!", ["c++"]) == 2
    assert count_reflections("stra\u00dfe wait \u0130 WAIT awaiting", words) == 2


@given(
    st.lists(
        st.sampled_from(["wait", "Wait", "ai", "let me", "check", " ", "\n", ",", "hmm", "\u00e9"])
    )
)
def test_reflections_are_the_matches_of_one_pattern(parts):
    text, words = "".join(parts), ["wait", "let me check", "hmm", "wait wait"]
    pattern = r"(?<!\w)(?:let\s+me\s+check|wait\s+wait|wait|hmm)(?!\w)"
    assert count_reflections(text, words) == len(re.findall(pattern, text, re.IGNORECASE))


def problem(verdicts, answers, given, index=0, tokens=10):
    responses = tuple(
        Response(verdict, answer, tokens + place, verdict == "wrong", place)
        for place, (verdict, answer) in enumerate(zip(verdicts, given, strict=True))
    )
    return Problem(index, "2 + 2?", "4", 3, tuple(answers), responses)


SOLVED = problem(["correct", "wrong", "correct", "correct"], ["4", "5"], [0, 1, 0, 0])
HARD = problem(["wrong", "unverifiable", "wrong", "correct"], ["5", "x", "4"], [0, 1, 0, 2], 1)


def test_the_numbers_of_a_set():
    numbers = set_metrics([SOLVED, HARD], seed=0)
    assert numbers["k"] == 4 and numbers["problems"] == 2
    assert (
        numbers["avg_at_k"]
        == numbers["pass_at_1"]
        == numbers["majority_at_1"]
        == (3 / 4 + 1 / 4) / 2
    )
    assert numbers["pass_at_k"] == numbers["pass_at_4"] == 1
    assert numbers["pass_at_2"] == pytest.approx((1 + 1 / 2) / 2)
    assert numbers["majority_at_k"] == numbers["majority_at_4"] == 0.5
    assert (numbers["majority_at_k_low"], numbers["majority_at_k_high"]) == (0, 1)
    assert numbers["response_length"] == 11.5
    assert numbers["response_length_correct"] == pytest.approx((10 + 12 + 13 + 13) / 4)
    assert numbers["truncated_fraction"] == 3 / 8
    assert numbers["reflections"] == 1.5
    assert numbers["unverifiable"] == 1
    assert numbers["no_answer_fraction"] == 0


def test_without_any_answer_there_is_no_vote():
    numbers = set_metrics([problem(["correct", "wrong"], [], [None, None])], seed=0)
    assert not [key for key in numbers if key.startswith(("majority", "no_answer"))]
    assert numbers["avg_at_k"] == 0.5 and "avg_at_k_low" not in numbers


def test_the_row_of_a_problem_has_its_scores():
    row = problem_row("aime", HARD)
    assert (row["set"], row["index"], row["copies"], row["label"]) == ("aime", 1, 3, "4")
    assert (row["correct"], row["wrong"], row["unverifiable"], row["k"]) == (1, 2, 1, 4)
    assert row["answers"] == [
        {"answer": "5", "responses": 2, "right": False},
        {"answer": "x", "responses": 1, "right": False},
        {"answer": "4", "responses": 1, "right": True},
    ]
    assert row["pass_at_k"] == {"1": 0.25, "2": 0.5, "4": 1.0}
    assert row["majority_at_k"] == 0


def test_pass_at_k_agrees_with_enumeration():
    for samples in range(1, 8):
        for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            draws = list(itertools.combinations([1] * correct + [0] * (samples - correct), k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)
        assert avg_at_k(samples, correct) == pass_at_k(samples, correct, 1)


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(8, 9, 1), (8, -1, 1), (8, 4, 0), (8, 4, 9), (0, 0, 1)]
)
def test_impossible_counts_raise(samples, correct, k):
    with pytest.raises(ValueError, match=r"pass@k|impossible"):
        pass_at_k(samples, correct, k)
