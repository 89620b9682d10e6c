"""`Across` against naive twins:
in one process (hypothesis) and over real gloo ranks.
"""

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
from tests import reference
from tests.distributed import run_distributed

TIED = st.sampled_from(
    [-math.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 1.5, 1.5000001192092896, 7.0, math.inf]
)
ANY_FLOAT = st.floats(allow_nan=False, width=32)
DTYPES = st.sampled_from([torch.float32, torch.float64])


def chosen_indices(mask_T: Tensor, index_T: Tensor) -> set[int]:
    return set(index_T[mask_T].tolist())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(TIED, ANY_FLOAT), max_size=40), st.integers(-2, 45), DTYPES, st.randoms())
def test_top_k_is_exact_with_ties_and_infinities(
    values: list[float], k: int, dtype: torch.dtype, random: Any
) -> None:
    indices = random.sample(range(-(2**61), 2**61), len(values))
    value_T, index_T = torch.tensor(values, dtype=dtype), torch.tensor(indices, dtype=torch.int64)
    got = chosen_indices(Across().top_k(value_T, index_T, k), index_T)
    assert got == reference.top_k(value_T.tolist(), indices, k)


@pytest.mark.parametrize("n", [0, 1, 9, 10, 11, 1001])
def test_top_k_of_equal_values_takes_the_smallest_indices(n: int) -> None:
    index_T = torch.randperm(n, generator=torch.Generator().manual_seed(0)) + 5
    k = math.ceil(n * 0.1)
    assert k == {0: 0, 1: 1, 9: 1, 10: 1, 11: 2, 1001: 101}[n]
    assert chosen_indices(Across().top_k(torch.full((n,), 0.25), index_T, k), index_T) == set(
        range(5, 5 + k)
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY_FLOAT.filter(math.isfinite), min_size=1, max_size=60), st.floats(0, 1), DTYPES)
def test_quantile_equals_torch_in_fp64(values: list[float], q: float, dtype: torch.dtype) -> None:
    value_T = torch.tensor(values, dtype=dtype)
    expected = reference.quantile(value_T.tolist(), q)
    scale = max(abs(value) for value in values) or 1.0
    assert Across().quantile(value_T, q) == pytest.approx(expected, rel=1e-12, abs=1e-12 * scale)
    assert float(torch.quantile(value_T.double(), q)) == pytest.approx(
        expected, rel=1e-9, abs=1e-9 * scale
    )


def test_quantile_next_to_an_infinity() -> None:
    assert Across().quantile(torch.tensor([1.0, math.inf]), 0.0) == 1.0
    assert Across().quantile(torch.tensor([1.0, math.inf]), 0.5) == math.inf
    assert Across().quantile(torch.tensor([-math.inf, 1.0]), 0.5) == -math.inf


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(-1e150, 1e150), max_size=60))
def test_sum_is_correctly_rounded(values: list[float]) -> None:
    assert Across().sum(torch.tensor(values, dtype=torch.float64)) == math.fsum(values)


def test_sum_covers_the_whole_range_of_exponents() -> None:
    values = [5e-324, 1e-310, 1.0, -1.0, 1e308, -1e308, 2.0**-1074]
    assert Across().sum(torch.tensor(values, dtype=torch.float64)) == math.fsum(values) != 0.0


def test_mean_spread_and_extrema() -> None:
    value_T = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 3 + 100
    across = Across()
    assert across.mean(value_T) == pytest.approx(float(value_T.double().mean()), rel=1e-14)
    expected = float(value_T.double().std(unbiased=False))
    assert across.std(value_T) == pytest.approx(expected, rel=1e-13)
    assert (across.minimum(value_T), across.maximum(value_T)) == (
        float(value_T.min()),
        float(value_T.max()),
    )
    assert across.count(value_T > 100) == int((value_T > 100).sum()) and across.count(7) == 7


@pytest.mark.parametrize("method", ["mean", "std", "minimum", "maximum", "quantile"])
def test_an_empty_selection_is_an_error_that_names_the_method(method: str) -> None:
    arguments = (torch.empty(0), 0.5) if method == "quantile" else (torch.empty(0),)
    with pytest.raises(ValueError, match=method):
        getattr(Across(), method)(*arguments)


def test_bad_input_is_named() -> None:
    index_T = torch.arange(3)
    with pytest.raises(ValueError, match="NaN: rank 0, position 1"):
        Across().top_k(torch.tensor([0.0, math.nan, 1.0]), index_T, 1)
    with pytest.raises(ValueError, match=r"infinity.*: rank 0, position 2"):
        Across().mean(torch.tensor([0.0, 1.0, math.inf]))
    with pytest.raises(ValueError, match="differ in length"):
        Across().top_k(torch.zeros(2), index_T, 1)
    with pytest.raises(ValueError, match="int64"):
        Across().top_k(torch.zeros(3), index_T.int(), 1)
    with pytest.raises(ValueError, match="floating-point"):
        Across().sum(index_T)
    with pytest.raises(ValueError, match="q must lie in"):
        Across().quantile(torch.zeros(3), 1.5)
    with pytest.raises(ValueError, match="index 4 occurs 2 times"):
        Across().top_k(torch.zeros(3), torch.tensor([4, 4, 5]), 1)


# ---- over real ranks: one spawn of four, groups of one, two and four ----

MANY = 1_000_000


def the_million() -> Tensor:
    """Rounded, so that there are thousands of ties at every threshold."""
    value_T = torch.randn(MANY, generator=torch.Generator().manual_seed(7))
    return (value_T * 200).round() / 200


def split_of(n: int, ranks: int, case: int) -> Tensor:
    """Which rank owns each value; case 1 leaves the last rank empty, case 2 gives all to rank 0."""
    owner_T = torch.randint(0, ranks, (n,), generator=torch.Generator().manual_seed(case))
    if case == 1:
        owner_T = owner_T.clamp(max=max(0, ranks - 2))
    return owner_T if case != 2 else torch.zeros(n, dtype=torch.int64)


def over_ranks(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"small": [], "errors": []}
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    for size, group in groups.items():
        if rank >= size:
            continue
        across = Across(group)
        for case in range(12):
            found["small"].append((size, case, _small_case(across, rank, size, case)))
        found["million", size] = _million_case(across, rank, size)
    found["errors"] = [
        _error_of(fault, rank)
        for fault in (_nan, _other_k, _short_index, _other_dtype, _empty, _clash)
    ]
    return found


def small_values(case: int) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(100 + case)
    n = (0, 1, 9, 10, 11, 50)[case % 6]
    dtype = torch.float64 if case % 2 else torch.float32
    return torch.randint(-2, 3, (n,), generator=generator).to(dtype) / 3, math.ceil(n * 0.3)


def _small_case(across: Across, rank: int, size: int, case: int) -> dict[str, Any]:
    value_T, k = small_values(case)
    index_T = (split_of(value_T.numel(), size, case % 3) == rank).nonzero().squeeze(1)
    mine_T = value_T[index_T]
    found = {
        "chosen": chosen_indices(across.top_k(mine_T, index_T, k), index_T),
        "sum": across.sum(mine_T),
    }
    if value_T.numel():
        found["quantile"] = across.quantile(mine_T, 0.8)
        found["std"] = across.std(mine_T)
        found["extrema"] = (across.minimum(mine_T), across.maximum(mine_T))
    found["count"] = across.count(mine_T > 0)
    return found


def _million_case(across: Across, rank: int, size: int) -> dict[str, Any]:
    owner_T = split_of(MANY, size, case=0)
    index_T = (owner_T == rank).nonzero().squeeze(1)
    value_T = the_million()[index_T]
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append(tensor.numel() * tensor.element_size())
        return all_reduce(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        mask_T = across.top_k(value_T, index_T, MANY // 10)
    finally:
        dist.all_reduce = all_reduce
    return {
        "chosen": index_T[mask_T],
        "traffic": calls,
        "numbers": (
            across.sum(value_T),
            across.mean(value_T),
            across.std(value_T),
            across.quantile(value_T, 0.8),
        ),
    }


def _nan(rank: int, across: Across) -> None:
    value_T = torch.zeros(4)
    value_T[3] = math.nan if rank == 2 else 0.0
    across.top_k(value_T, torch.arange(4) + 4 * rank, 2)


def _other_k(rank: int, across: Across) -> None:
    across.top_k(torch.zeros(4), torch.arange(4) + 4 * rank, 2 + rank)


def _short_index(rank: int, across: Across) -> None:
    across.top_k(torch.zeros(4), torch.arange(3 if rank == 1 else 4) + 4 * rank, 2)


def _other_dtype(rank: int, across: Across) -> None:
    across.quantile(torch.zeros(4, dtype=torch.float64 if rank == 3 else torch.float32), 0.5)


def _empty(rank: int, across: Across) -> None:
    across.mean(torch.empty(0))


def _clash(rank: int, across: Across) -> None:
    across.top_k(torch.zeros(4), torch.arange(4) + 100, 6)


def _error_of(fault: Any, rank: int) -> str:
    try:
        fault(rank, Across(dist.group.WORLD))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(over_ranks, 4)


def test_every_layout_agrees_with_the_twin(ranks: list[dict[str, Any]]) -> None:
    checked = 0
    for size in (1, 2, 4):
        for case in range(12):
            value_T, k = small_values(case)
            values = value_T.tolist()
            answers = [
                dict_ for rank in ranks for (s, c, dict_) in rank["small"] if (s, c) == (size, case)
            ]
            assert len(answers) == size
            union = set().union(*(answer["chosen"] for answer in answers))
            assert union == reference.top_k(values, list(range(len(values))), k)
            assert sum(len(answer["chosen"]) for answer in answers) == k
            for answer in answers:
                assert answer["sum"] == math.fsum(values)
                assert answer["count"] == sum(value > 0 for value in values)
                if values:
                    assert answer["quantile"] == pytest.approx(
                        reference.quantile(values, 0.8), rel=1e-12
                    )
                    assert answer["std"] == pytest.approx(
                        float(value_T.double().std(unbiased=False)), abs=1e-12
                    )
                    assert answer["extrema"] == (min(values), max(values))
            checked += 1
    assert checked == 36


def test_a_million_values_over_four_ranks(ranks: list[dict[str, Any]]) -> None:
    value_T = the_million()
    expected = torch.sort(value_T, descending=True, stable=True).indices[: MANY // 10].sort().values
    for size in (1, 2, 4):
        chosen = torch.cat([rank["million", size]["chosen"] for rank in ranks[:size]]).sort().values
        assert torch.equal(chosen, expected)
    numbers = {rank["million", size]["numbers"] for size in (1, 2, 4) for rank in ranks[:size]}
    assert len(numbers) == 1, (
        "sum, mean, std and quantile must have the same bits under every layout"
    )
    assert next(iter(numbers))[0] == math.fsum(value_T.tolist())


def test_traffic_does_not_depend_on_the_number_of_values(ranks: list[dict[str, Any]]) -> None:
    traffic = ranks[0]["million", 4]["traffic"]
    assert len(traffic) <= 3 + 1 + 2
    assert sum(traffic) <= 6 * 2048 * 8


def test_every_rank_raises_the_same_error(ranks: list[dict[str, Any]]) -> None:
    patterns = [
        "NaN: rank 2, position 3",
        "rank 1 disagrees",
        "rank 1, position 3",
        "rank 3 disagrees",
        "mean",
        "occurs",
    ]
    for fault, pattern in enumerate(patterns):
        messages = {rank["errors"][fault] for rank in ranks}
        assert len(messages) == 1 and pattern in messages.pop()
