"""A machine's ceilings, and the fractions of them that a plan expects to reach.

H100 SXM, from NVIDIA's data sheet: 989e12 bf16 operations a second without sparsity, 3.35e12 bytes
a second of memory, 450e9 over NVLink to GPUs of the node in either direction; one 400 Gbit/s port a
GPU to other nodes. The fractions are uncalibrated assumptions: this project had no H100 to measure
them on. Correct them by the timings in your own metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

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
    matrix_share: float = 0.60  # large matrix products
    attention_share: float = 0.45
    link_share: float = 0.70
    decode_share: float = 0.60  # memory rate while decoding
    decode_latency: float = 4e-3  # seconds of a decoding step for launches and sampling

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes * (1 - self.reserve)

    def link_rate(self, ranks: float) -> float:
        """Bytes a second that a GPU sends in a group of `ranks` consecutive ranks."""
        within = ranks <= self.gpus_per_node
        return (self.node_rate if within else self.network_rate) * self.link_share


H100 = Machine()


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
        raise UserError(f"--machine {file} is no table of figures; `gpuday` writes one")
    for name, value in figures.items():
        if name not in known:
            raise UserError(f"--machine {file}: {name} is unknown{nearest(str(name), known)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if name != "name" and not is_number:
            raise UserError(f"--machine {file}: {name}={value} must be a positive number")
    return dataclasses.replace(H100, **figures)
