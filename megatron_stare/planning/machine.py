"""A machine's ceilings, and the fractions of them that a plan expects to reach.

H100 SXM, from NVIDIA's data sheet: 989e12 bf16 operations a second without sparsity, 3.35e12 bytes
a second of memory, 450e9 over NVLink to GPUs of the node in either direction; one 400 Gbit/s port a
GPU to other nodes. Figures with (c) are fitted to published runs (calibration.py); the others are
assumptions. `gpuday` measures them on your GPUs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_stare.config import UserError
from megatron_stare.config.errors import nearest


@dataclass(frozen=True)
class Machine:
    """One GPU and its links; bytes and seconds."""

    name: str = "H100-80GB"
    memory_bytes: float = 80e9
    reserve: float = 0.06  # fraction for fragmentation and unmodelled memory
    process_bytes: float = 2.5e9  # CUDA context, libraries' workspaces, NCCL's channels
    operations: float = 989e12  # a second, bf16
    memory_rate: float = 3.35e12
    node_rate: float = 450e9
    network_rate: float = 50e9
    gpus_per_node: int = 8
    # expected fractions of the ceilings
    matrix_share: float = 0.42  # (c) matrix products, with launches and the kernels between them
    attention_share: float = 0.42  # (c)
    expert_saturation: float = 3000.0  # (c) width of an expert at which its products lose half
    link_share: float = 0.70
    decode_share: float = 0.75  # memory rate while decoding
    decode_latency: float = 4.5e-3  # (c) seconds of a decoding step in RL: scheduler and sampler
    decode_layer: float = 90e-6  # (c) seconds of a layer of a decoding step for launches
    collective_latency: float = 15e-6  # seconds of one small all-reduce in a node
    network_latency: float = 130e-6  # (c) the same between nodes
    router_skew: float = 0.2  # (c) of a decoding step's choices of experts, the independent part
    static_share: float = 0.85  # of a server's memory for weights and cache (mem-fraction-static)
    server_bytes: float = 8e9  # of a colocated server besides: CUDA graphs, workspaces, context
    # seconds outside the GPUs' work
    layer_launch: float = 2e-4  # a layer of a micro-batch in one pass takes at least this
    host_seconds: float = 5.0  # of a step: packing, metrics, waiting for ranks
    sequence_seconds: float = 5e-3  # (c) of a step for each of its rollouts: text, reward, records
    bucket_seconds: float = 6.5e-3  # (c) a bucket of a broadcast: request and loading by the server
    handle_seconds: float = 24e-3  # (c) a bucket by memory handles: opening and loading them
    host_rate: float = 25e9  # bytes a second between a GPU and pinned memory

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes * (1 - self.reserve)

    def link_rate(self, ranks: float) -> float:
        """Bytes a second that a GPU sends in a group of `ranks` consecutive ranks."""
        within = ranks <= self.gpus_per_node
        return (self.node_rate if within else self.network_rate) * self.link_share


H100 = Machine()


def whole_gpu(memory_bytes: float) -> Machine:
    """An H100 with the memory of a GPU that is here, all of which a plan may use."""
    return dataclasses.replace(H100, memory_bytes=memory_bytes, reserve=0.0)


def read_machine(file: Path) -> Machine:
    """The H100 with the figures of a YAML file of Machine's fields, as `gpuday` writes it.
    UserError: the file is missing, or a figure is unknown or not a positive number.
    """
    try:
        figures = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"--machine {file} cannot be read ({error}); `gpuday` writes one"
        ) from error
    known = vars(H100)
    if not isinstance(figures, dict):
        raise UserError(f"--machine {file} is not a table of figures; `gpuday` writes one")
    for name, value in figures.items():
        if name not in known:
            raise UserError(f"--machine {file}: {name} is unknown{nearest(str(name), known)}")
        if name != "name":
            figures[name] = _positive(file, name, value, whole=isinstance(known[name], int))
    return dataclasses.replace(H100, **figures)


def _positive(file: Path, name: str, value: Any, whole: bool) -> float:
    """A figure as a number; 141e9 is a text to YAML, which asks for 1.41e+11."""
    try:
        number = 0.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < math.inf or (whole and not number.is_integer()):
        kind = "whole number" if whole else "number"
        raise UserError(f"--machine {file}: {name}={value} must be a positive {kind}")
    return int(number) if whole else number
