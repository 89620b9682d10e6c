"""The key-value cache of the embedded engine: rows leave, repeat and stay in place."""

from __future__ import annotations

import random

import torch

from megatron_stare.rollout.decode_attention import GROWTH, GrowingLayer
from megatron_stare.rollout.embedded import _filled


def states(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, 2, length, 4)


def test_the_cache_equals_copies_of_whole_rows_while_sequences_end() -> None:
    torch.manual_seed(0)
    rng, layer = random.Random(0), GrowingLayer()
    keys, values = states(3, 5), states(3, 5)
    layer.update(keys, values)
    repeated = torch.tensor([0, 0, 1, 2, 2, 2, 1])
    layer.batch_select_indices(repeated)
    keys, values = keys[repeated], values[repeated]
    for _ in range(GROWTH + 9):
        more = states(len(keys), 1), states(len(keys), 1)
        keys, values = torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2)
        found = layer.update(*more)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
        if rng.random() < 0.1 and len(keys) > 1:
            rows = torch.tensor(_filled([rng.random() < 0.7 for _ in keys]), dtype=torch.long)
            if len(rows):
                layer.batch_select_indices(rows)
                keys, values = keys[rows], values[rows]
    assert 1 <= len(keys) < 7


def test_places_of_ended_rows_are_filled_from_the_end() -> None:
    assert _filled([True, False, True, False, True, True]) == [0, 4, 2, 5]
    assert _filled([True, True, False]) == [0, 1]
    assert _filled([False, False, True]) == [2]
    assert _filled([False]) == []
