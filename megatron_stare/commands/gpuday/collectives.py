"""K5: bandwidth of every collective over all GPUs of the node, and the memory of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.commands.gpuday.results import Day, Measurement, Skipped, at_least
from megatron_stare.commands.gpuday.stages import on_ranks
from megatron_stare.config import PolicyConfig
from megatron_stare.debug.cluster import ceiling, slowest_seconds
from megatron_stare.planning.machine import H100
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.runtime import device

LARGE, SMALL = 1 << 29, 1 << 16  # bytes that a rank holds


def run(day: Day) -> Iterator[Measurement]:
    """Bus bandwidth of each collective: bytes that cross a rank's link, per second (NCCL's tests).

    all-reduce 2 (n - 1) / n, all-gather, reduce-scatter and all-to-all (n - 1) / n of the whole
    tensor, a ring of sends all of it.
    """
    count = 2 if day.rehearsal else day.gpus
    if count < 2:
        raise Skipped("needs 2 GPUs; 1 is seen")
    rates, communicator = on_ranks(count, {}, measure, SMALL if day.rehearsal else LARGE)
    expected = ceiling(count) * H100.link_share
    for name, rate in rates.items():
        yield at_least(f"{name}, {count} ranks", rate / 1e9, expected / 1e9, "GB/s")
    share = rates["all-reduce"] / ceiling(count)
    yield at_least("all-reduce", share, H100.link_share, "of the links", "link_share")
    yield Measurement("memory of a communicator", communicator / 2**20, "", "MiB")


def measure(size: int) -> tuple[dict[str, float], float]:
    """The rates [bytes/s] of this rank, and bytes that nvidia's driver lost to a new group."""
    with topologies.session(PolicyConfig()):
        count, rank = dist.get_world_size(), dist.get_rank()
        whole = torch.ones(size // 4 // count * count, device=device())
        part, others = torch.empty_like(whole[: whole.numel() // count]), torch.empty_like(whole)
        ring = [
            dist.P2POp(dist.isend, whole, (rank + 1) % count),
            dist.P2POp(dist.irecv, others, (rank - 1) % count),
        ]

        def sent() -> None:
            for work in dist.batch_isend_irecv(ring):
                work.wait()

        share = (count - 1) / count
        works: dict[str, tuple[float, Callable[[], object]]] = {
            "all-reduce": (2 * share, lambda: dist.all_reduce(whole)),
            "all-gather": (share, lambda: dist.all_gather_into_tensor(others, part)),
            "reduce-scatter": (share, lambda: dist.reduce_scatter_tensor(part, whole)),
            "all-to-all": (share, lambda: dist.all_to_all_single(others, whole)),
            "ring of sends": (1.0, sent),
        }
        rates = {
            name: factor * whole.nbytes / slowest_seconds(work)
            for name, (factor, work) in works.items()
        }
        return rates, _communicator(whole)


def _communicator(values: Tensor) -> float:
    """Bytes of GPU memory that a further group takes at its first collective; 0 on a CPU."""
    if not values.is_cuda:
        return 0.0
    before = torch.cuda.mem_get_info()[0]
    dist.all_reduce(values[:1024], group=dist.new_group(backend="nccl"))
    torch.cuda.synchronize()
    return float(before - torch.cuda.mem_get_info()[0])
