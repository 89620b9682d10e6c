"""`doctor --cluster`: the findings of every rank, and the checks that need all ranks together."""

from __future__ import annotations

import dataclasses
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_stare.config import Config, PolicyConfig, UserError
from megatron_stare.debug.doctor import Finding, Level, examine, judged
from megatron_stare.policy import runtime
from megatron_stare.policy import topology as topologies
from megatron_stare.policy.topology import Topology

MOST_SKEW, WORST_SKEW = 0.5, 30.0  # seconds
ROUNDS = 5
# Bytes of the message, and for a CPU the bytes per second below which the network is suspect.
GPU_SIZE, HOST_SIZE, HOST_LEAST = 1 << 30, 1 << 24, 50e6
NODE_RATE, LEAST_SHARE = 450e9, 0.6  # NVLink of an H100; the share of a ceiling that is usual
INFINIBAND = Path("/sys/class/infiniband")


def examine_cluster(config: Config) -> list[Finding]:
    """The findings of all ranks on rank 0, an empty list on the others. The call is collective:
    every rank makes it, under torchrun or srun. A finding that is OK is reported for the first
    node alone.
    """
    from_slurm(os.environ)
    if "RANK" not in os.environ:
        raise UserError("doctor --cluster needs the ranks of torchrun or srun; start it with one")
    joined = dist.is_initialized()
    topology = topologies.start(PolicyConfig())
    everyone = topology.gather((socket.gethostname(), list(examine(config))))
    between = [_clocks(topology), _bandwidth(topology), _versions(everyone)]
    if not joined:
        topologies.stop()
    return [*_merged(everyone), *between] if topology.is_first else []


def from_slurm(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of srun. Those that torchrun has set stay. UserError:
    Slurm does not name the hosts.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:  # a container has no scontrol
        raise UserError(
            f"doctor --cluster asks `{' '.join(command)}` for the hosts, and it failed ({error}); "
            "start doctor with torchrun instead"
        ) from None
    of_torchrun = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(int(environment["SLURM_NTASKS"]) // len(hosts)),
        "MASTER_ADDR": environment.get("MASTER_ADDR", hosts[0]),
        # A port that depends on the job, because jobs may run side by side on a node.
        "MASTER_PORT": environment.get(
            "MASTER_PORT", str(29400 + int(environment["SLURM_JOB_ID"]) % 1000)
        ),
    }
    environment.update(of_torchrun)


def _merged(everyone: list[tuple[str, list[Finding]]]) -> list[Finding]:
    """The findings of rank 0, and those of every other rank that are not OK, once per host."""
    first, found = everyone[0]
    merged = list(found)
    reported = {(first, one.what) for one in found if one.level != "OK"}
    for host, findings in everyone:
        for one in findings:
            if one.level != "OK" and (host, one.what) not in reported:
                reported.add((host, one.what))
                merged.append(dataclasses.replace(one, what=f"{host}: {one.what}"))
    return merged


def _clocks(topology: Topology) -> Finding:
    """Compare the wall clocks of all ranks, read right after a barrier. Ranks leave a barrier at
    slightly different times, so that the difference is an upper bound of the skew.
    """
    dist.barrier()
    clocks = topology.gather((time.time(), socket.gethostname()))
    early, late = min(clocks), max(clocks)
    skew = late[0] - early[0]
    found = f"within {skew:.3f} s"
    if skew < MOST_SKEW:
        return Finding("OK", "clocks", found)
    found += f", the clock of {early[1]} is earlier than that of {late[1]}"
    level: Level = "WARN" if skew < WORST_SKEW else "FAIL"
    return Finding(level, "clocks", found, "turn on chrony or ntpd")


def _bandwidth(topology: Topology) -> Finding:
    """Measure the bus bandwidth of an all-reduce over all n ranks: 2 (n - 1) / n times the bytes
    of the tensor, per second.
    """
    on_gpu = runtime.device().type == "cuda"
    size = GPU_SIZE if on_gpu else HOST_SIZE
    least = LEAST_SHARE * ceiling(topology.world_size) if on_gpu else HOST_LEAST
    backend = "nccl" if on_gpu else "gloo"
    ranks = topology.world_size
    if ranks == 1:
        return Finding("OK", "bandwidth", "not measured: there is only one rank")
    values = torch.zeros(size // 4, device=runtime.device())
    rate = 2 * (ranks - 1) / ranks * size / slowest_seconds(lambda: dist.all_reduce(values))
    remedy = (
        f"at least {least / 1e9:.3g} is usual; run with NCCL_DEBUG=INFO and look for the network it"
        " chose, set NCCL_SOCKET_IFNAME or NCCL_IB_HCA"
    )
    found = f"{rate / 1e9:.2f} GB/s between {ranks} ranks ({backend})"
    return judged(rate >= least, "bandwidth", found, remedy)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median over `rounds`, after one that warms up, as opening connections."""
    seconds = []
    for _ in range(rounds + 1):
        if dist.is_initialized():
            dist.barrier()
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def slowest_seconds(work: Callable[[], object]) -> float:
    """The median seconds of a collective on the slowest rank. The call is collective."""
    slowest = torch.tensor([median_seconds(work)], device=runtime.device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def ceiling(ranks: int) -> float:
    """Bus bandwidth that the links of this node allow an all-reduce of `ranks` ranks, in bytes per
    second: NVLink on one node; between nodes the active ports of the node together, or 10 Gbit/s
    of Ethernet if there is none.
    """
    if ranks <= int(os.environ.get("LOCAL_WORLD_SIZE", ranks)):
        return NODE_RATE
    rates = [
        float((port / "rate").read_text().split()[0]) * 1e9 / 8  # "400 Gb/sec (4X NDR)"
        for port in INFINIBAND.glob("*/ports/*")
        if "ACTIVE" in (port / "state").read_text()
    ]
    return min(sum(rates), NODE_RATE) or 10e9 / 8


def _versions(everyone: list[tuple[str, list[Finding]]]) -> Finding:
    """Check that all hosts have the same versions of the packages that must agree."""
    names = ("python", "torch", "megatron-core", "transformers", "CUDA", "NCCL")
    first = {one.what: one.found for one in everyone[0][1] if one.what in names}
    for host, findings in everyone:
        for one in findings:
            if one.what in first and one.found != first[one.what]:
                found = f"{host} has {one.what} {one.found}, {everyone[0][0]} {first[one.what]}"
                remedy = "install the same environment on every node"
                return Finding("FAIL", "versions", found, remedy)
    return Finding("OK", "versions", f"the same on {len(everyone)} ranks")
