"""Order statistics inside sequences that lie on several ranks against sorting in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_stare.numerics.selection import Across
from megatron_stare.numerics.sequences import largest_per_sequence, sequence_quantile
from tests import reference
from tests.distributed import run_distributed

LENGTHS = (1, 2, 7, 0, 40, 33)
QUANTILES = (0.0, 0.3, 0.8, 1.0)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def fifth(n: int) -> int:
    return max(1, math.ceil(0.2 * n))


def half(n: int) -> int:
    return n // 2  # of a single token none


def tokens(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """value, index and sequence in an order of no meaning; many ties, both zeros, both signs."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    dice = torch.Generator().manual_seed(1)
    value = torch.randn(len(sequence), generator=dice, dtype=torch.float64)
    value[sequence == 4] = (value[sequence == 4] * 2).round() * 0.5 * -1.0
    index = (sequence << 32) + torch.arange(len(sequence))
    order = torch.randperm(len(sequence), generator=dice)
    return value[order].to(dtype), index[order], sequence[order]


def statistics(rows: Tensor, across: Across) -> dict[Any, Tensor]:
    found = {}
    for dtype in DTYPES:
        value, index, sequence = (column[rows] for column in tokens(dtype))
        size = len(LENGTHS)
        for q in QUANTILES:
            found[dtype, q] = sequence_quantile(value, sequence, q, size, across)
        for k_of in (fifth, half):
            for sign in (1, -1):
                found[dtype, k_of.__name__, sign] = largest_per_sequence(
                    sign * value, index, sequence, size, k_of, across
                )
    return found


def share(rank: int) -> Tensor:
    """The rank's tokens: one of the sequence of two, a part of the long ones, none of the single
    one.
    """
    return torch.arange(sum(LENGTHS))[rank::2]


def on_two_ranks(rank: int, world_size: int) -> tuple[dict[Any, Tensor], list[str]]:
    across = Across(dist.group.WORLD)
    errors = []
    for bad in (math.nan, math.inf):
        value = torch.tensor([0.0, bad if rank else 1.0])
        zero = torch.zeros(2, dtype=torch.long)
        try:
            sequence_quantile(value, zero, 0.5, 1, across)
        except ValueError as error:
            errors.append(str(error))
    return statistics(share(rank), across), errors


def test_two_ranks_agree_with_one() -> None:
    whole = statistics(torch.arange(sum(LENGTHS)), Across())
    for rank, (found, errors) in enumerate(run_distributed(on_two_ranks, 2)):
        for name, result in found.items():
            assert torch.equal(result, whole[name][share(rank)]), (name, rank)
        assert len(errors) == 2 and all("1 tokens" in error for error in errors)


def test_one_process_equals_sorting() -> None:
    found = statistics(torch.arange(sum(LENGTHS)), Across())
    for dtype in DTYPES:
        value, index, sequence = tokens(dtype)
        for number, length in enumerate(LENGTHS):
            rows = (sequence == number).nonzero().flatten()
            values, indices = value[rows].tolist(), index[rows].tolist()
            for q in QUANTILES if length else ():
                wanted = reference.quantile(values, q)
                assert found[dtype, q][rows].tolist() == pytest.approx([wanted] * length, rel=1e-15)
            for k_of in (fifth, half):
                for sign in (1, -1):
                    signed = [sign * one for one in values]
                    wanted = reference.top_k(signed, indices, k_of(length))
                    chosen = found[dtype, k_of.__name__, sign][rows].tolist()
                    assert {i for i, yes in zip(indices, chosen, strict=True) if yes} == wanted


def test_by_hand() -> None:
    """Position 0.8 * 4 = 3.2 of 0, 1, 2, 3, 5: 3 + 0.2 * 2. Ties of 1 go to the smallest index."""
    value = torch.tensor([5.0, 0.0, 2.0, 1.0, 3.0])
    one = torch.zeros(5, dtype=torch.long)
    assert sequence_quantile(value, one, 0.8, 1, Across()).tolist() == pytest.approx([3.4] * 5)
    tied = torch.tensor([1.0, 1.0, 2.0, 1.0, 0.0])
    index = torch.tensor([9, 3, 0, 5, 1])
    mask = largest_per_sequence(tied, index, one, 1, lambda n: 3, Across())
    assert mask.tolist() == [False, True, True, True, False]
    empty, no = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert sequence_quantile(empty, no, 0.5, 0, Across()).shape == (0,)
    assert largest_per_sequence(empty, no, no, 3, fifth, Across()).shape == (0,)


def test_refused() -> None:
    one = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="q must lie in"):
        sequence_quantile(torch.ones(2), one, 1.5, 1, Across())
    with pytest.raises(ValueError, match="largest_per_sequence: NaN among the values of 1 tokens"):
        largest_per_sequence(torch.tensor([1.0, math.nan]), one, one, 1, fifth, Across())


TIED = st.sampled_from([-math.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 1.5, 7.0, math.inf])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(TIED, st.integers(0, 5)), max_size=40),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.randoms(),
)
def test_the_largest_with_ties_and_infinities(
    pairs: list[tuple[float, int]], portion: float, random: Any
) -> None:
    values, sequences = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    indices = random.sample(range(1000), len(pairs))

    def k_of(n: int) -> int:
        return math.ceil(n * portion)

    index, value = torch.tensor(indices, dtype=torch.long), torch.tensor(values)
    sequence = torch.tensor(sequences, dtype=torch.long)
    mask = largest_per_sequence(value, index, sequence, 6, k_of, Across())
    expected = reference.top_k_per_segment(value.tolist(), indices, sequences, k_of)
    assert set(index[mask].tolist()) == expected
