"""The stages that start ranks: K2, training steps on the GPU against the CPU, layouts against one
rank, repeated bits; K5, the bandwidth of every collective, and the memory of a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy
import torch
import torch.distributed as dist

from megatron_stare.commands.gpuday.models import SMALL, made_up_groups, random_model
from megatron_stare.commands.gpuday.rows import Day, Measurement, at_least, holds, within
from megatron_stare.commands.gpuday.stages import ON_CPU, on_ranks
from megatron_stare.config import Config, PolicyConfig, override
from megatron_stare.debug.cluster import ceiling, slowest_seconds
from megatron_stare.loop.learn import Learner
from megatron_stare.loop.metrics import Stopwatch
from megatron_stare.losses import find_objective
from megatron_stare.planning.machine import H100
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.actor import Actor
from megatron_stare.policy.runtime import device

COMPARED = ("loss", "grad_norm", "entropy", "surprisal", "chosen_positive")
TP = ("tensor_model_parallel_size=2", "sequence_parallel=true")
# name: ranks, model, fields of `policy`
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "one rank, padded": (1, "tiny", ("packed_sequences=false",)),
    "one rank, packed": (1, "tiny", ()),
    "one rank, shared prompts": (1, "tiny", ("shared_prompts=true",)),
    "TP2 SP packed": (2, "tiny", TP),
    "experts": (1, "tiny-experts", ()),
    "CP2 packed": (2, "tiny", ("context_parallel_size=2",)),
    "PP2 packed": (2, "tiny", ("pipeline_model_parallel_size=2",)),
    "TP2 EP2 experts": (2, "tiny-experts", (*TP, "expert_model_parallel_size=2")),
    "CP4 packed": (4, "tiny", ("context_parallel_size=4",)),
}
REHEARSED = ("one rank, shared prompts", "TP2 SP packed")
BF16, DETERMINISTIC = "dtype=bf16", "deterministic=true"
FP32, HALF = 2e-4, 5e-2  # relative, of metrics after three updates
# TransformerEngine multiplies fp32 on a GPU with 10 bits of mantissa otherwise.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
Steps = list[dict[str, float]]  # metrics


def equal(day: Day) -> Iterator[Measurement]:
    """K2: metrics of three updates of a tiny random model against those of one rank on the CPU in
    fp32. Every run has processes of its own.
    """

    def steps(count: int, model: str, fields: tuple[str, ...], variables: dict[str, str]) -> Steps:
        print(f"--- {count} ranks, {model}, {fields}, {variables}", flush=True)
        settings = [f"hf_checkpoint={random_model(day, model)}", *fields]
        return on_ranks(count, variables, updates, [f"policy.{each}" for each in settings])

    padded = CASES["one rank, padded"][2]
    models = list(SMALL)[: 1 if day.rehearsal else None]
    cpu = {model: steps(1, model, padded, ON_CPU) for model in models}
    for name, (count, model, fields) in CASES.items():
        if name in REHEARSED if day.rehearsal else count <= max(1, day.gpus):
            found = steps(count, model, fields, EXACT)
            yield from _compared(f"{name}, fp32", found, cpu[model], FP32)
    yield from _compared("bf16", steps(1, "tiny", (BF16,), {}), cpu["tiny"], HALF)
    # Races and atomics show in two runs, with launches that the host waits for and without.
    repeated = {"as shipped": (), "policy.deterministic": (DETERMINISTIC,)}
    for name, fields in list(repeated.items())[day.rehearsal :]:
        first, second = (
            steps(1, "tiny", (BF16, *fields), {"CUDA_LAUNCH_BLOCKING": blocking})
            for blocking in "10"
        )
        what = f"{name}: bits of two runs are equal"
        yield holds(what, first == second, otherwise="FAIL" if fields else "WARN")


def _compared(name: str, found: Steps, reference: Steps, limit: float) -> Iterator[Measurement]:
    for key in COMPARED:
        if key in reference[0]:
            far = [
                abs(one[key] - other[key]) / max(abs(other[key]), 1e-3)
                for one, other in zip(found, reference, strict=True)
            ]
            yield within(f"{name}: {key} against the CPU", float(numpy.max(far)), limit)


def updates(settings: list[str]) -> Steps:
    """The metrics of three updates on this rank."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    common = ["policy.dtype=fp32", "policy.max_tokens_per_gpu=128", "optimizer.lr=1e-3"]
    common += ["policy.packed_sequences=true", "loss.name=stare"]
    config = override(Config(), [*common, *settings])
    with topologies.session(config.policy, config.run.seed) as topology:
        actor = Actor(config, topology, 10)
        learner = Learner(config, find_objective(config.loss.name), actor)
        found = []
        for _ in range(3):
            result = learner.step(made_up_groups(4, 15, (49, 30)), 0, True, Stopwatch())
            if result.error:
                raise result.error
            found.append(result.metrics)
            actor.make_room()
    return found


def collectives(day: Day) -> Iterator[Measurement]:
    """K5: bus bandwidth of each collective: bytes that cross a rank's link, per second (NCCL's
    tests).

    all-reduce 2 (n - 1) / n, all-gather, reduce-scatter and all-to-all (n - 1) / n of the whole
    tensor, a ring of sends all of it.
    """
    count = 2 if day.rehearsal else day.gpus
    rates, communicator = on_ranks(count, {}, measure, 1 << (16 if day.rehearsal else 29))
    expected = ceiling(count) * H100.link_share
    for name, rate in rates.items():
        yield at_least(f"{name}, {count} ranks", rate / 1e9, expected / 1e9, "GB/s")
    share = rates["all-reduce"] / ceiling(count)
    yield at_least("all-reduce", share, H100.link_share, "of the links", "link_share")
    yield Measurement("memory of a communicator", communicator / 2**20, "", "MiB")


def measure(size: int) -> tuple[dict[str, float], float]:
    """The rates [bytes/s] of a tensor of `size` bytes, and the bytes of GPU memory that a further
    group takes at its first collective; 0 on a CPU.
    """
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
        if not whole.is_cuda:
            return rates, 0.0
        before = torch.cuda.mem_get_info()[0]
        dist.all_reduce(whole[:1024], group=dist.new_group(backend="nccl"))
        torch.cuda.synchronize()
        return rates, float(before - torch.cuda.mem_get_info()[0])
