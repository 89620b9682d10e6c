"""Columns of log-probs against a naive twin in fp64, and what is printed of them."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stare.reporting.logprob_table import Parity, difference, text

VALUE = st.one_of(st.just(math.nan), st.floats(-30, 0, width=32))
COLUMNS = st.lists(st.lists(st.tuples(VALUE, VALUE), max_size=40), min_size=1, max_size=4)


def bin_of(position: int) -> int:
    begin = 1
    if position == 0:
        return 0
    while begin * 2 <= position:
        begin *= 2
    return begin


@settings(deadline=None)
@given(COLUMNS)
def test_differences_equal_the_naive_twin(rows):
    one = [numpy.array([pair[0] for pair in row], numpy.float32) for row in rows]
    other = [numpy.array([pair[1] for pair in row], numpy.float64) for row in rows]
    sizes, first = {}, None
    for number, row in enumerate(rows):
        for position, (mine, theirs) in enumerate(row):
            if math.isnan(mine) or math.isnan(theirs):
                continue
            sizes[number, position] = abs(mine - theirs)
            if first is None and mine != theirs:
                first = number, position
    if not sizes:
        with pytest.raises(ValueError, match="no token"):
            difference("a - b", one, other)
        return
    found = difference("a - b", one, other)
    values = list(sizes.values())
    assert found.tokens == len(values) and found.first == first
    assert found.mean == pytest.approx(math.fsum(values) / len(values), abs=1e-12)
    assert found.largest == max(values)
    assert found.equal == pytest.approx(sum(value == 0 for value in values) / len(values))
    assert found.high == pytest.approx(numpy.quantile(values, 0.99))
    bins: dict[int, list[float]] = {}
    for (_, position), value in sizes.items():
        bins.setdefault(bin_of(position), []).append(value)
    assert found.by_position == pytest.approx(
        {begin: math.fsum(bins[begin]) / len(bins[begin]) for begin in sorted(bins)}, abs=1e-12
    )


def test_columns_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match="not of the same tokens"):
        difference("a - b", [numpy.zeros(3)], [numpy.zeros(4)])


def test_the_text_names_the_first_token_that_differs():
    one = [numpy.zeros(3), numpy.array([0.0, -1.0, -2.0])]
    other = [numpy.zeros(3), numpy.array([0.0, -1.0, -2.5])]
    columns = {"decode": one, "trainer": other}
    responses = [numpy.array([7, 7, 7]), numpy.array([7, 8, 9])]
    pairs = [("decode", "trainer"), ("decode", "decode")]
    parity = Parity(columns, responses, pairs, {"prefill": 0.25}, ["a line of operations"])
    shown = text(parity, lambda token: f"<{token}>")
    assert "decode - trainer: first apart at response 1, position 2, id 9 '<9>'" in shown
    assert "decode - decode: bitwise equal everywhere" in shown
    assert "likeliest token, prefill and trainer: another at 25.00% of the positions" in shown
    assert "83.3%" in shown and "0.083" in shown and "a line of operations" in shown
