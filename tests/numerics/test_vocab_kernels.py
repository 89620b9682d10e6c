"""The Triton kernels against the torch path:
in Triton's CPU interpreter (a subprocess), and on a GPU where one is.
"""

from __future__ import annotations

import pytest
import torch

from megatron_stare.numerics import vocab_statistics
from megatron_stare.numerics.token_stats import VocabShard, token_stats
from tests.numerics.interpreted import interpreted


def compare_with_torch(device: str) -> int:
    """Run every variant of both kernels against the torch path on the same tile;
    returns the number of variants.
    """
    from megatron_stare.numerics import vocab_kernels

    generator = torch.Generator().manual_seed(0)
    variants = 0
    for columns in (5, 64, 2500):
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
            for tempered in (False, True):
                for collision in (False, True):
                    _compare_one(
                        vocab_kernels,
                        generator,
                        device,
                        columns,
                        dtype,
                        tolerance,
                        tempered,
                        collision,
                    )
                    variants += 1
    return variants


def _compare_one(
    vocab_kernels, generator, device, columns, dtype, tolerance, tempered, collision
) -> None:
    rows, first_column = 4, 7
    tile_nv = (torch.randn(rows, columns, generator=generator) * 4).to(dtype)
    tile_nv[1, 0] = float("-inf")
    tile_nv[2, :] = float("-inf")
    target_n = torch.tensor([first_column, first_column + columns - 1, 3, first_column + columns])
    inverse_n = torch.rand(rows, generator=generator) + 0.5 if tempered else None
    earlier_nF = vocab_statistics.empty_partials(
        rows, collision, torch.float32, torch.device("cpu")
    )
    vocab_statistics.add_tile_(
        earlier_nF, torch.randn(rows, 6, generator=generator), 0, target_n, inverse_n
    )
    want_nF, got_nF = earlier_nF.clone(), earlier_nF.clone().to(device)
    vocab_statistics.add_tile_(want_nF, tile_nv, first_column, target_n, inverse_n)
    on_device = [
        None if tensor is None else tensor.to(device) for tensor in (tile_nv, target_n, inverse_n)
    ]
    vocab_kernels.add_tile_(got_nF, on_device[0], first_column, on_device[1], on_device[2])
    torch.testing.assert_close(got_nF.cpu(), want_nF, rtol=2e-6, atol=2e-6)

    moments = vocab_statistics.RowMoments(
        want_nF[:, 0].clone(), want_nF[:, 1].clone(), want_nF[:, 2] / want_nF[:, 1]
    )
    slope_n, entropy_slope_n = torch.randn(2, rows, generator=generator)
    for grad_entropy_n in (None, entropy_slope_n):
        want_nv, got_nv = tile_nv.clone(), tile_nv.clone().to(device)
        vocab_statistics.write_gradient_(
            want_nv, first_column, target_n, inverse_n, moments, slope_n, grad_entropy_n
        )
        vocab_kernels.write_gradient_(
            got_nv,
            first_column,
            on_device[1],
            on_device[2],
            vocab_statistics.RowMoments(*(part.to(device) for part in moments)),
            slope_n.to(device),
            None if grad_entropy_n is None else grad_entropy_n.to(device),
        )
        assert want_nv.abs().max() > 1e-3
        torch.testing.assert_close(got_nv.cpu(), want_nv, rtol=tolerance, atol=2e-6)


def test_kernels_equal_the_torch_path_in_the_interpreter() -> None:
    assert interpreted(__name__, "compare_with_torch") == "24"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_kernels_equal_the_torch_path_on_a_gpu() -> None:
    assert compare_with_torch("cuda") == 24


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("way", ["logits", "recompute"])
def test_head_on_a_gpu_equals_the_head_on_the_cpu(way: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(70, 64, generator=generator)
    weight_VH = torch.randn(3000, 64, generator=generator) * 0.2
    target_N = torch.randint(0, 2990, (70,), generator=generator)
    results = []
    for device in ("cpu", "cuda"):
        hidden = hidden_NH.to(device, torch.bfloat16).requires_grad_()
        weight = weight_VH.to(device, torch.bfloat16).requires_grad_()
        weight.main_grad = torch.zeros(weight.shape, device=device)
        stats = token_stats(
            hidden,
            VocabShard(weight, None, 2990),
            target_N.to(device),
            way=way,
            workspace_bytes=1 << 17,
        )
        (stats.surprisal_N.sum() + stats.entropy_N.sum()).backward()
        results.append((stats.surprisal_N, stats.entropy_N, hidden.grad, weight.main_grad))
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.nullcuda
def test_more_rows_than_a_grids_second_axis_has() -> None:
    """A chunk of a small vocabulary's rows passes 65,535."""
    from megatron_stare.numerics import vocab_kernels
    from megatron_stare.numerics.vocab_shard import FIELDS, RowMoments
    from tools.nullcuda.counters import counting

    rows = 65_536
    tile_nv = torch.zeros(rows, 8, dtype=torch.bfloat16, device="cuda")
    value_n = torch.zeros(rows, device="cuda")
    target_n = torch.zeros(rows, dtype=torch.long, device="cuda")
    moments = RowMoments(value_n, value_n, value_n)
    with counting() as counts:
        vocab_kernels.write_gradient_(tile_nv, 0, target_n, None, moments, value_n, None)
        vocab_kernels.add_tile_(value_n.new_zeros(rows, FIELDS), tile_nv, 0, target_n, None)
    assert counts.bad_launches == 0 and counts.launches >= 2
