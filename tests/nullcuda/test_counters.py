"""The device itself: memory, counts, refusals, values, handles, collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.distributed import run_distributed
from tools.nullcuda import counters, memory
from tools.nullcuda.memory import LIMIT

pytestmark = pytest.mark.nullcuda


def test_memory_has_a_limit_and_a_peak() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    big = torch.empty(40 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
    del big
    assert torch.cuda.max_memory_allocated() - before == 40 << 30


def test_waits_are_counted_by_call_site() -> None:
    value = torch.arange(8.0, device="cuda")
    with counters.counting(sites=True) as counts:
        total = value.sum()
        assert counts.syncs == 0  # filled in at the end
        assert total.item() == 28
        assert (value > 3).nonzero().numel() == 4
    assert counts.stream_syncs == 2
    assert counts.launches == 2
    assert counts.d2h == 1
    assert all(kind == "stream" and "test_counters" in site for kind, site in counts.sites)


def test_large_tensors_have_no_values_and_small_results_are_zero() -> None:
    large = torch.ones(LIMIT + 1, device="cuda")
    assert large.sum().item() == 0
    assert torch.ones(1000, device="cuda").sum().item() == 1000


def test_integers_have_values_up_to_their_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LIMIT_OF_INDICES", LIMIT + 1)
    for count, kind in ((LIMIT + 1, torch.int32), (0, torch.float32)):
        assert torch.ones(LIMIT + 1, dtype=kind, device="cuda").sum().item() == count


def test_products_are_counted_and_true() -> None:
    left, right = torch.randn(64, 32), torch.randn(32, 16)
    with counters.counting() as counts:
        product = left.cuda() @ right.cuda()
    assert counts.gemm_flops == 2 * 64 * 32 * 16
    torch.testing.assert_close(product.cpu(), left @ right)


def test_values_under_a_mask_have_no_gradient() -> None:
    table = torch.ones(4, 3, device="cuda", requires_grad=True)
    rows = table * 2
    rows[torch.tensor([True, False, True, False], device="cuda"), :] = 0.0
    rows.sum().backward()
    assert table.grad is not None and table.grad.sum(1).tolist() == [0, 6, 0, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_attention_has_values(dtype: torch.dtype) -> None:
    inputs = torch.randn(3, 1, 4, 8, 16, dtype=dtype)
    found, expected = (
        torch.nn.functional.scaled_dot_product_attention(*place, is_causal=True).cpu()
        for place in (inputs.cuda(), inputs)
    )
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_random_state_repeats_its_draws() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.rand(5, device="cuda")
    assert not torch.equal(first, torch.rand(5, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(5, device="cuda"))


def collectives(rank: int, size: int) -> dict[str, Any]:
    """The result of each collective; inputs differ by rank."""
    mine = torch.tensor([rank + 1.0, 10.0 * rank], device="cuda")
    total, best = mine.clone(), mine.clone().bfloat16()
    dist.all_reduce(total)
    dist.all_reduce(best, dist.ReduceOp.MAX)
    gathered = torch.empty(2 * size, device="cuda")
    dist.all_gather_into_tensor(gathered, mine)
    share = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(share, torch.arange(float(size), device="cuda") + rank)
    exchanged = torch.empty(size, dtype=torch.int64, device="cuda")
    dist.all_to_all_single(exchanged, torch.arange(size, device="cuda") + 10 * rank)
    uneven = torch.empty(sum(range(size)) + size if rank == 0 else 0, device="cuda")
    sizes = [source + 1 for source in range(size)] if rank == 0 else [0] * size
    sent = torch.full((rank + 1,), float(rank), device="cuda")
    dist.all_to_all_single(uneven, sent, sizes, [rank + 1] + [0] * (size - 1))
    arrived = torch.empty(2, device="cuda")
    work = [
        dist.P2POp(dist.isend, mine, (rank + 1) % size),
        dist.P2POp(dist.irecv, arrived, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(work):
        request.wait()
    root = mine.clone()
    dist.broadcast(root, size - 1)
    found = (total, best, gathered, share, exchanged, uneven, arrived, root)
    return [tensor.tolist() for tensor in found]


def test_collectives_between_processes_are_real() -> None:
    ranks = run_distributed(collectives, 3, backend="nccl")
    for rank, (total, best, gathered, share, exchanged, uneven, arrived, root) in enumerate(ranks):
        assert total == [6, 30]
        assert best == [3, 20]
        assert gathered == [1, 0, 2, 10, 3, 20]
        assert share == [3 * rank + 3]
        assert exchanged == [rank, 10 + rank, 20 + rank]
        assert uneven == ([0, 1, 1, 2, 2, 2] if rank == 0 else [])
        assert arrived == [(rank - 1) % 3 + 1, 10 * ((rank - 1) % 3)]
        assert root == [3, 20]


def shared_tensor(rank: int, size: int) -> list[float]:
    """Rank 0's device memory, opened by rank 1 through torch's IPC handle."""
    tensor = torch.arange(6.0, device="cuda")
    rebuild, arguments = torch.multiprocessing.reductions.reduce_tensor(tensor)
    held: list[Any] = [(rebuild, arguments) if rank == 0 else None]
    dist.broadcast_object_list(held)
    if rank == 1:
        rebuild, arguments = held[0]
        opened = rebuild(*arguments)
        opened.mul_(2)
    dist.barrier()
    return tensor.tolist()


def test_another_process_opens_device_memory() -> None:
    first, second = run_distributed(shared_tensor, 2, backend="nccl")
    assert first == [0, 2, 4, 6, 8, 10]
    assert second == [0, 1, 2, 3, 4, 5]


def differing(rank: int, size: int) -> None:
    dist.all_reduce(torch.zeros(2 + rank, device="cuda"))


def test_collectives_of_different_lengths_are_reported() -> None:
    with pytest.raises(RuntimeError, match=r"different collectives|a peer has gone"):
        run_distributed(differing, 2, backend="nccl")
