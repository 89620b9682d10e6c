"""Sums over sequences on several ranks against one process in float64: values, gradients,
second derivatives, ranks without a token.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.numerics.sequences import sequence_sum
from tests.distributed import run_distributed

# Of each pair of ranks; the second has none of sequence 0, and in the last case no token at all.
CASES = (([0, 0, 1, 3], [3, 1, 1]), ([2], [2, 2, 0, 2, 0]), ([1, 0], []))
COUNT = 4  # sequence 2 or 3 of some cases has no loss token


def objective(value: Tensor, total: Tensor) -> Tensor:
    """A loss that reads the sums in another way at each token, so that no symmetry hides a fault.

    The sums are taken twice, once of what depends on a sum.
    """
    place = torch.arange(1, value.numel() + 1, dtype=value.dtype)
    return (torch.sin(total) * place * value.square()).sum()


def values(count: int, seed: int) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=dice, dtype=torch.float64)


def in_pairs(rank: int, world_size: int) -> list[list[dict[str, Any]]]:
    """Each case in each dtype, in the pair of this rank."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, place = pairs[rank // 2], rank % 2
    found = []
    for number, case in enumerate(CASES):
        found.append([])
        for dtype in (torch.float64, torch.float32):
            parts = values(len(case[0]) + len(case[1]), 10 * number + rank // 2)
            mine = parts.split([len(case[0]), len(case[1])])[place].to(dtype)
            mine = mine.clone().requires_grad_()
            sequence = torch.tensor(case[place], dtype=torch.long)
            total = sequence_sum(mine, sequence, COUNT, group)
            again = sequence_sum(torch.cos(total) * mine, sequence, COUNT, group)
            (gradient,) = torch.autograd.grad(objective(mine, again), mine, create_graph=True)
            (second,) = torch.autograd.grad(gradient.square().sum(), mine)
            found[-1].append(
                {"total": total.detach(), "again": again.detach(), "second": second}
                | {"gradient": gradient.detach()}
            )
    return found


def twin(case: tuple[list[int], list[int]], seed: int) -> dict[str, Tensor]:
    """The same in one process, the sums by a loop over all tokens of both ranks."""
    sequence = case[0] + case[1]
    value = values(len(sequence), seed).requires_grad_()

    def summed(column: Tensor) -> Tensor:
        return torch.stack(
            [sum(column[i] for i, other in enumerate(sequence) if other == own) for own in sequence]
        )

    total = summed(value)
    again = summed(torch.cos(total) * value)
    cut = len(case[0])
    loss = objective(value[:cut], again[:cut]) + objective(value[cut:], again[cut:])
    (gradient,) = torch.autograd.grad(loss, value, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), value)
    return {
        "total": total.detach(),
        "again": again.detach(),
        "gradient": gradient.detach(),
        "second": second,
    }


def test_two_pairs_of_ranks_equal_one_process() -> None:
    ranks = run_distributed(in_pairs, 4)
    for rank, found in enumerate(ranks):
        for number, case in enumerate(CASES):
            expected = twin(case, 10 * number + rank // 2)
            cut = len(case[0])
            mine = slice(cut, None) if rank % 2 else slice(cut)
            for result, tolerance in zip(found[number], (1e-12, 2e-5), strict=True):
                for name, tensor in result.items():
                    torch.testing.assert_close(
                        tensor.double(), expected[name][mine], rtol=tolerance, atol=tolerance
                    )


def test_on_one_rank_the_sum_and_its_gradient_pass_gradcheck() -> None:
    sequence = torch.tensor([2, 0, 2, 2, 0])
    value = values(5, 3).requires_grad_()
    found = sequence_sum(value, sequence, 3)
    assert torch.equal(found[[0, 1]], torch.stack([value[[0, 2, 3]].sum(), value[[1, 4]].sum()]))
    assert torch.autograd.gradcheck(lambda x: sequence_sum(x, sequence, 3), value)
    assert torch.autograd.gradgradcheck(lambda x: sequence_sum(x, sequence, 3).square(), value)


def test_a_batch_without_sequences_has_no_sum() -> None:
    empty = torch.zeros(0, requires_grad=True)
    found = sequence_sum(empty, torch.zeros(0, dtype=torch.long), 0)
    found.sum().backward()
    assert found.shape == (0,) and empty.grad is not None


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.ones(3, dtype=torch.long), torch.ones(1, 3)]
)
def test_a_tensor_of_another_length_is_refused(value: Tensor) -> None:
    with pytest.raises(ValueError, match="one floating-point value per token"):
        sequence_sum(value, torch.zeros(3, dtype=torch.long), 1)
