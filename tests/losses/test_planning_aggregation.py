"""Reductions against naive sums."""

import pytest
import torch

from megatron_stare.losses.planning import batch_mean, coefficients
from tests.losses import reference_losses
from tests.losses.batches import ALONE, batch_of

AGGREGATIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_coefficients_equal_the_naive_reduction(aggregation):
    generator = torch.Generator().manual_seed(1)
    # the odd sequences have no loss token
    sequence = torch.randint(6, (200,), generator=generator) * 2
    losses = torch.randn(200, generator=generator)
    coefficient_T = coefficients(
        batch_of(losses, losses, sequence=sequence, sequences=12), aggregation, ALONE
    )
    expected = reference_losses.aggregate(losses.tolist(), sequence.tolist(), aggregation)
    assert float((coefficient_T.double() * losses).sum()) == pytest.approx(expected, rel=1e-6)
    assert batch_mean(losses, coefficient_T, ALONE) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_a_loss_token_divides_by_nothing(aggregation):
    empty = batch_of(torch.empty(0), torch.empty(0), sequences=3)
    assert coefficients(empty, aggregation, ALONE).shape == (0,)


def test_an_unknown_aggregation_is_an_error():
    with pytest.raises(ValueError, match="mean-of-means"):
        coefficients(batch_of([1.0], [1.0]), "mean-of-means", ALONE)
