"""The figures of benchmarks/scale.py are of what it says: every token once, on every world."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest

from benchmarks import _exchanging_ranks as exchanging
from benchmarks import scale
from benchmarks._fake_rollouts import PHASES, requests
from tests.rollout.sglang.fake_server import Fake


def test_exponents_are_those_of_powers():
    assert scale.exponent([1, 2, 8], [3.0, 3 * 2**1.5, 3 * 8**1.5]) == pytest.approx(1.5)
    assert math.isnan(scale.exponent([4, 4], [1.0, 2.0]))


def test_every_second_round_is_in_reverse_order():
    asked: list[str] = []

    def measure(case: str) -> int:
        asked.append(case)
        return len(asked)

    assert scale._in_rounds(["a", "b"], 3, measure) == [[1, 4, 5], [2, 3, 6]]
    assert asked == list("abbaab")


def test_sampling_counts_every_token_of_every_answer(tmp_path: Path):
    options = argparse.Namespace(servers=2, tokens=300, stream_interval=64, rollouts=64, rounds=2)
    found = scale.sampling(tmp_path, [16, 32], options)
    fake = Fake(shortest=1, longest=300)
    lengths = [fake.end_of(request.prompt_ids[0]) for request in requests(32)]
    # After a prompt of three tokens the response ends at this place, or with its first token.
    tokens = [sum(max(1, last - 2) for last in lengths[:size]) for size in (16, 32, 16)]
    assert [row["tokens"] for row in found["rows"]] == tokens
    assert [row["streamed"] for row in found["rows"]] == [True, True, False]
    for row in found["rows"]:
        assert not row["faults"] and all(row["seconds"][phase] > 0 for phase in PHASES)
    assert set(scale.in_flight(tmp_path, options)) == {"new weights", "abort"}


def test_ranks_share_a_batch_whole():
    options = argparse.Namespace(tokens=300, worlds=[2], rounds=2)
    (row,) = scale.ranks([64], options)["rows"]
    assert row["tokens"] == exchanging.lengths(64, 300).sum()
    assert row["metadata sent"] > 0 and row["exchange sent"] > 0


def test_short_rollouts_are_packed_whole():
    found = scale.short(64, 256, rounds=2)
    assert found["tokens"] == exchanging.lengths(64, 256).sum()
    assert found["seconds"] > 0 and found["micro-batches"] == 1
