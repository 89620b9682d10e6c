"""Scans along whole sequences against loops in float64: on one process by hand, and divided over
ranks in the zigzag of context parallelism, where every bit must be the same.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.numerics.sequences import (
    kalman_gains,
    kalman_mean,
    preceding_minimum,
    sequence_scan,
)
from tests import reference
from tests.distributed import run_distributed

# Place in the response of each loss token, of five sequences: gaps are tool output.
POSITIONS = ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 5, 6, 9], [3], [], list(range(40)))
WORLD = 2
KALMAN = functools.partial(kalman_mean, process_noise=0.3, measurement_noise=0.7)
SCANS = {
    "minimum": (preceding_minimum, False),
    "kalman": (KALMAN, False),
    "kalman by position": (KALMAN, True),
}


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """value, sequence and position of all tokens, in an order of no meaning."""
    sequence = torch.tensor([n for n, places in enumerate(POSITIONS) for _ in places])
    position = torch.tensor([place for places in POSITIONS for place in places])
    dice = torch.Generator().manual_seed(0)
    value = torch.exp(0.5 * torch.randn(len(sequence), generator=dice, dtype=torch.float64))
    order = torch.randperm(len(sequence), generator=dice)
    return value[order], sequence[order], position[order]


def scanned(rows: Tensor, group: object = None) -> dict[str, Tensor]:
    value, sequence, position = (column[rows] for column in tokens())
    place = {"sequence_N": sequence, "position_N": position, "count": len(POSITIONS)}
    return {
        f"{name} {dtype}": sequence_scan(
            scan, value.to(dtype), **place, group=group, every_position=every
        )
        for name, (scan, every) in SCANS.items()
        for dtype in (torch.float64, torch.float32)
    }


def share(rank: int, longest: int) -> Tensor:
    """The tokens of a rank: chunks of two positions go round the ranks and back. Of sequences cut
    at `longest` = 2 the second rank has none.
    """
    _, _, position = tokens()
    turn = torch.tensor([0, 1, 1, 0])[position // 2 % 4]
    return ((turn == rank) & (position < longest)).nonzero().flatten()


def in_shares(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    return [scanned(share(rank, longest), dist.group.WORLD) for longest in (40, 2)]


def test_ranks_get_the_bits_of_one_process() -> None:
    ranks = run_distributed(in_shares, WORLD)
    for case, longest in enumerate((40, 2)):
        rows = (tokens()[2] < longest).nonzero().flatten()
        whole, seen = scanned(rows), 0
        for rank, found in enumerate(ranks):
            own = torch.isin(rows, share(rank, longest))
            seen += int(own.sum())
            for name, result in found[case].items():
                assert torch.equal(result, whole[name][own]), (name, rank)
        assert seen == len(rows), "every token lies somewhere"


def test_one_process_equals_the_loops() -> None:
    value, sequence, position = tokens()
    found = scanned(torch.arange(len(value)))
    for number in range(len(POSITIONS)):
        rows = (sequence == number).nonzero().flatten()
        rows = rows[torch.argsort(position[rows])]
        row, places = value[rows].tolist(), position[rows].tolist()
        expected = {
            "minimum": reference.preceding_minimum(row),
            "kalman": reference.kalman_mean(row, range(len(row)), 0.3, 0.7),
            "kalman by position": reference.kalman_mean(row, places, 0.3, 0.7),
        }
        for name, wanted in expected.items():
            exact, narrow = found[f"{name} torch.float64"], found[f"{name} torch.float32"]
            assert exact[rows].tolist() == pytest.approx(wanted, rel=1e-13)
            assert narrow[rows].tolist() == pytest.approx(wanted, rel=1e-6)
            assert narrow.dtype == torch.float32


def test_by_hand() -> None:
    """Q = 1, R = 2: K_1 = 1/3, P_1 = 2/3; K_2 = (5/3)/(11/3) = 5/11, P_2 = 10/11.

    z = [3, 1]: x_1 = 1; x_2 = 6/11 * 1 + 5/11 * 1 = 1. With nothing in between at position 1 and
    the second at 2, K_3 = (21/11)/(43/11) = 21/43: x_2 = 6/11, x_3 = 22/43 * 6/11 + 21/43 = 33/43.
    """
    assert kalman_gains(3, 1.0, 2.0) == pytest.approx([1 / 3, 5 / 11, 21 / 43])
    z = torch.tensor([3.0, 1.0], dtype=torch.float64)
    one = {"sequence_N": torch.zeros(2, dtype=torch.long), "count": 1}
    scan = functools.partial(kalman_mean, process_noise=1.0, measurement_noise=2.0)
    gap = torch.tensor([0, 2])
    assert sequence_scan(scan, z, position_N=gap, **one).tolist() == pytest.approx([1.0, 1.0])
    found = sequence_scan(scan, z, position_N=gap, every_position=True, **one)
    assert found.tolist() == pytest.approx([1.0, 33 / 43])
    assert preceding_minimum(torch.tensor([[2.0, 0.5, 3.0, 0.25]])).tolist() == [[1, 2, 0.5, 0.5]]


def test_the_gains_of_kpo() -> None:
    """Q = 1e-6, R = 1: K_1 near 1e-6, K_100 near 1e-4, K_1000 near 7.6e-4 (the sheet's figures)."""
    gains = kalman_gains(1000, 1e-6, 1.0)
    assert gains[0] == pytest.approx(1e-6, rel=1e-5)
    assert gains[99] == pytest.approx(1e-4, rel=0.01)
    assert gains[999] == pytest.approx(7.6e-4, rel=0.01)


def test_limits() -> None:
    z = torch.randn(2, 5, dtype=torch.float64)
    assert torch.equal(kalman_mean(z, 1.0, 0.0), z), "without measurement noise K = 1"
    assert torch.equal(kalman_mean(z, 0.0, 1.0), torch.zeros_like(z)), "without process noise K = 0"
    long = torch.ones(1, 3000, dtype=torch.float64)
    assert kalman_mean(long, 1.0, 1.0)[0, -1] == pytest.approx(1.0, rel=1e-12)
    assert preceding_minimum(torch.full((1, 1), 0.1)).tolist() == [[1.0]]
    empty, no = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    found = sequence_scan(preceding_minimum, empty, sequence_N=no, position_N=no, count=0)
    assert found.shape == (0,)
    live = torch.ones(2, requires_grad=True)
    place = {"sequence_N": torch.zeros(2, dtype=torch.long), "position_N": torch.arange(2)}
    assert not sequence_scan(KALMAN, live, count=1, **place).requires_grad


def test_refused() -> None:
    no = torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="equally long vectors"):
        sequence_scan(KALMAN, torch.ones(3), sequence_N=no, position_N=no, count=1)
