"""The variance of the surprisal under the policy, and the z statistic that it normalises."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_stare.numerics.fused_loss import fused_loss
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from tests import reference
from tests.numerics.head_cases import WAYS, example, relative


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workspace_bytes", [64 << 20, 1 << 10])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_equals_the_twin(
    way: str, workspace_bytes: int, dtype: torch.dtype, tolerance: float
) -> None:
    data = example(23, 16, 120, 113, dtype)
    temperature = data["temperature"]
    want_N = reference.token_statistics(
        data["hidden"], data["weight"][:113], data["target"], temperature
    )["variance"]
    shard = VocabShard(data["weight"], None, 113)
    call = (data["hidden"], shard, data["target"])
    options = {"temperature": temperature, "workspace_bytes": workspace_bytes}
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            if way == "fused":
                variance_N = fused_loss(*call, lambda s, h, rows: s, **options)[3]
            else:
                stats = token_stats(*call, way=way, collision=not recorded, **options)
                variance_N = stats.variance_N
        assert not variance_N.requires_grad
        assert relative(variance_N, want_N) < tolerance


def test_by_hand_and_at_the_edges() -> None:
    """Two equal probabilities have variance 0; (0.8, 0.2) has 0.16 ln(4)^2; a certain token 0."""
    rows = [[0.5, 0.5, 0.0], [0.8, 0.2, 0.0], [1.0, 0.0, 0.0]]
    for dtype in (torch.float64, torch.float32):
        logits_NV = torch.tensor(rows, dtype=dtype).log()
        for offset in (0.0, 1e4):  # the logits' common level is subtracted first
            moved_NV = torch.nan_to_num(logits_NV, neginf=-math.inf) + offset
            hidden_NH = torch.eye(3, dtype=dtype)
            weight_VH = torch.where(torch.isinf(moved_NV), -1e30, moved_NV).t().contiguous()
            stats = token_stats(
                hidden_NH, VocabShard(weight_VH, None, 3), torch.zeros(3, dtype=torch.long)
            )
            want = [0.0, 0.16 * math.log(4) ** 2, 0.0]
            bound = 1e-12 if dtype == torch.float64 and not offset else 1e-3
            assert stats.variance_N.tolist() == pytest.approx(want, abs=bound)
            assert (stats.variance_N >= 0).all()


def test_a_nearly_uniform_row_keeps_its_variance() -> None:
    """fp32 sums of squares around the maximum: 1e-4 of 150,000 columns is kept to a hundredth."""
    generator = torch.Generator().manual_seed(0)
    weight_VH = torch.randn(150_000, 1, generator=generator) * 0.01
    hidden_NH, target_N = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
    want = float(reference.token_statistics(hidden_NH, weight_VH, target_N)["variance"])
    stats = token_stats(hidden_NH, VocabShard(weight_VH, None, 150_000), target_N)
    assert float(stats.variance_N) == pytest.approx(want, rel=1e-2)
