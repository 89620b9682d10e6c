"""The share of weights that changed, counted and sampled."""

from __future__ import annotations

import torch

from megatron_stare.sync.weight_sync import ALL_UP_TO, ChangedFraction, ChangeSampler


def test_a_version_that_passes_twice_counts_once() -> None:
    fraction = ChangedFraction()
    fraction.end("run-0", 0, 100)
    assert fraction.metrics() == {}, "there is nothing to compare the first with"
    fraction.end("run-1", 5, 100)
    fraction.end("run-1", 0, 100)  # a server came late
    assert fraction.metrics() == {"changed_fraction": 0.05}
    fraction.end("run-2", 0, 100)
    assert fraction.metrics() == {"changed_fraction": 0.0}


def test_small_tensors_are_counted_and_large_ones_sampled() -> None:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(64, 1 << 12, generator=generator).bfloat16()
    small, sample = torch.zeros(10), ChangeSampler()
    assert small.numel() <= ALL_UP_TO < large.numel()
    bucket = [("large", large), ("small", small)]
    sample.note(bucket)
    sample.end("run-0")
    small[3] = -0.0  # another bit, and so a change
    sample.note(bucket[1:])  # a pass that broke off
    share = 0.1
    large[torch.rand(large.shape, generator=generator) < share] += 1.0
    sample.note(bucket)
    sample.end("run-1")
    found = sample.fraction.metrics()["changed_fraction"]
    deviation = (share * (1 - share) / (large.numel() / 61)) ** 0.5
    assert abs(found - share) < 5 * deviation


def test_sampled_columns_are_scaled_to_the_whole() -> None:
    """One column of a matrix with 61 * 2^k rows' worth of elements: about its share is found."""
    matrix, sample = torch.zeros(1024, 1024), ChangeSampler()
    sample.note([("matrix", matrix)])
    sample.end("run-0")
    matrix[:, 7] = 1.0
    sample.note([("matrix", matrix)])
    sample.end("run-1")
    assert 0.5 / 1024 < sample.fraction.metrics()["changed_fraction"] < 2 / 1024
