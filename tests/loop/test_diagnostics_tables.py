"""Binned sums against loops in plain Python."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_stare.loop.diagnostics import (
    ADVANTAGE_EDGES,
    SURPRISAL_EDGES,
    position_edges,
    tables_of,
)
from megatron_stare.reporting.diagnostics import Tables
from tests.losses.batches import ALONE


def values(count: int = 500, vocabulary: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator)

    surprisal = normal(4.0).abs()
    surprisal[:3] = torch.tensor([0.0, 0.5, 60.0])  # an edge belongs to the bin above it
    return {
        "surprisal": surprisal,
        "advantage": normal(2.0),
        "sensitivity": normal(0.3),
        "entropy": normal(1.0).abs(),
        "gap": normal(0.5),
        "variance": normal(1.0).abs(),
        "change": normal(1e-3).double(),
        "plain_change": normal(1e-3).double(),
        "chosen": torch.randint(-1, 2, (count,), generator=generator, dtype=torch.int8),
        "id": torch.randint(vocabulary, (count,), generator=generator),
        "token_index": torch.randint(100, (count,), generator=generator) + (7 << 32),
    }


def place(value: float, edges: tuple[float, ...]) -> int:
    return max(0, min(sum(edge <= value for edge in edges) - 1, len(edges) - 2))


def tables(chooses: bool) -> tuple[Tables, list[dict[str, float]]]:
    """The tables, and the tokens that they are of, one by one."""
    given = values()
    found = tables_of(
        given, ALONE, longest=100, vocabulary=40, rows=6, text_of=chr, chooses=chooses
    )
    columns = [value.tolist() for value in given.values()]
    return found, [dict(zip(given, row, strict=True)) for row in zip(*columns, strict=True)]


def total(rows: list[dict[str, float]], name: str) -> object:
    return pytest.approx(sum(row[name] for row in rows))


def test_bins_are_those_of_plain_loops():
    found, rows = tables(True)
    density = [[0] * (len(ADVANTAGE_EDGES) - 1) for _ in SURPRISAL_EDGES[1:]]
    for row in rows:
        across = place(row["advantage"], ADVANTAGE_EDGES)
        density[place(row["surprisal"], SURPRISAL_EDGES)][across] += 1
    assert found.density.count == density
    sides = ((found.surprisal_bins.positive, 1), (found.surprisal_bins.negative, -1))
    for number, (tally, sign) in itertools.product(range(len(SURPRISAL_EDGES) - 1), sides):
        inside = [
            row
            for row in rows
            if place(row["surprisal"], SURPRISAL_EDGES) == number and row["advantage"] * sign > 0
        ]
        assert tally.count[number] == len(inside)
        assert tally.change[number] == total(inside, "change")
    assert found.change == total(rows, "change")
    inside = [row for row in rows if row["advantage"] < 0 and row["sensitivity"] <= 0]
    quadrant = found.quadrants["negative_falling"]
    assert quadrant.count == len(inside)
    assert quadrant.plain_change == total(inside, "plain_change")


def test_positions_are_in_stretches_of_one_length():
    found, rows = tables(True)
    edges = position_edges(100)
    assert edges[0] == 0 and edges[-1] >= 100
    assert len({b - a for a, b in itertools.pairwise(edges)}) == 1
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        inside = [row for row in rows if first <= row["token_index"] % 2**32 < last]
        assert found.position_bins.count[number] == len(inside)
        mean = found.position_bins.entropy[number]
        if inside:
            assert mean is not None and mean * len(inside) == total(inside, "entropy")
        else:
            assert mean is None


@pytest.mark.parametrize("chooses", [True, False])
def test_tables_of_tokens_are_those_of_plain_loops(chooses):
    found, rows = tables(chooses)
    chosen = {
        "chosen_positive": lambda row: row["chosen"] > 0,
        "chosen_negative": lambda row: row["chosen"] < 0,
    }
    others = {
        "rising": lambda row: row["sensitivity"] > 0,
        "falling": lambda row: row["sensitivity"] <= 0,
    }
    expected = chosen if chooses else others
    assert found.tokens.keys() == expected.keys()
    for name, belongs in expected.items():
        table = found.tokens[name]
        counts = [row.count for row in table]
        assert len(table) == 6 and counts == sorted(counts, reverse=True)
        for row in table:
            inside = [each for each in rows if belongs(each) and each["id"] == row.id]
            assert (row.count, row.text) == (len(inside), chr(row.id))
            assert row.change == total(inside, "change")
            assert row.surprisal * len(inside) == total(inside, "surprisal")
