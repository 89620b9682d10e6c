"""Counters of the device: launches, waits of the host, copies, products, collectives, memory.

with counting() as counts:
    ...
counts.launches, counts.stream_syncs, counts.collectives["all_reduce", "TENSOR_MODEL..."]
"""

from __future__ import annotations

import collections
import ctypes
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

from tools.nullcuda.library import library

ROOT = Path(__file__).resolve().parents[2]
WAITS = ("stream", "device", "event", "copy")
OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one group: how often, and how many bytes a rank put in."""

    calls: int
    bytes: int


@dataclass
class Counts:
    """Since the last `reset`. `peak_bytes` is device memory taken from the driver, over all
    devices: torch.cuda.max_memory_reserved and what NCCL asks for.
    """

    launches: int = 0
    bad_launches: int = 0  # refused: a grid or a block beyond the device's limits
    stream_syncs: int = 0  # the host waited: .item(), .cpu(), nonzero ...
    device_syncs: int = 0
    event_syncs: int = 0
    copy_syncs: int = 0  # cudaMemcpy, which waits by itself
    d2h: int = 0
    d2h_bytes: int = 0
    h2d: int = 0
    h2d_bytes: int = 0
    d2d: int = 0
    d2d_bytes: int = 0
    gemms: int = 0
    collective_calls: int = 0
    collective_bytes: int = 0
    communicators: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    gemm_flops: float = 0.0
    # (operation, torch's name of the group, its ranks) -> calls and bytes
    collectives: dict[tuple[str, str, int], Traffic] = field(default_factory=dict)
    # (kind of wait, call site) -> how often; only where `counting(sites=True)`
    sites: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)

    @property
    def syncs(self) -> int:
        """Waits of the host, of every kind."""
        return self.stream_syncs + self.device_syncs + self.event_syncs + self.copy_syncs


class _Counters(ctypes.Structure):
    """counters_t of device/device.h, whose order `Counts` keeps."""

    _fields_ = [
        (field.name, ctypes.c_double if field.type == "float" else ctypes.c_long)
        for field in fields(Counts)
        if field.type in ("int", "float")
    ]


def read() -> Counts:
    """The counts since the last `reset`, and the collectives since the last `read`."""
    raw = _Counters()
    library().nullcuda_read(ctypes.byref(raw))
    counts = Counts(**{name: getattr(raw, name) for name, _ in _Counters._fields_})
    counts.collectives = _collectives()
    return counts


def reset() -> None:
    """Begin again from zero."""
    library().nullcuda_reset()
    _collectives()


@contextmanager
def counting(sites: bool = False) -> Iterator[Counts]:
    """Counts of a block, filled in at its end; `sites`: who made the host wait, too."""
    counts = Counts()
    reset()
    watching = _watch(counts.sites) if sites else None
    try:
        yield counts
    finally:
        if watching:
            library().nullcuda_watch(None)
        seen = counts.sites
        counts.__dict__.update(read().__dict__)
        counts.sites = seen


def unanswered() -> set[str]:
    """CUDA functions that were called and that the device does not answer: it said success."""
    found, index = set(), 0
    while name := library().nullcuda_unanswered(index):
        found.add(name.decode())
        index += 1
    return found


def _collectives() -> dict[tuple[str, str, int], Traffic]:
    name, ranks = ctypes.create_string_buffer(48), ctypes.c_int()
    calls, sizes = (ctypes.c_long * len(OPERATIONS))(), (ctypes.c_long * len(OPERATIONS))()
    totals: collections.Counter = collections.Counter()
    found: dict[tuple[str, str, int], Traffic] = {}
    index = 0
    while library().nullcuda_collectives(
        ctypes.c_long(index), name, ctypes.byref(ranks), calls, sizes
    ):
        for operation, count, size in zip(OPERATIONS, calls, sizes, strict=True):
            if count:
                key = (operation, name.value.decode(), ranks.value)
                totals[key, "calls"] += count
                totals[key, "bytes"] += size
                found[key] = Traffic(totals[key, "calls"], totals[key, "bytes"])
        index += 1
    return found


_WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_held: list[object] = []  # C keeps no reference


def _watch(seen: collections.Counter[tuple[str, str]]) -> object:
    lock = threading.Lock()

    def waited(kind: int) -> None:
        with lock:
            seen[WAITS[kind], call_site(sys._getframe(1))] += 1

    function = _WATCHER(waited)
    _held.append(function)
    library().nullcuda_watch(function)
    return function


def call_site(frame: types.FrameType | None) -> str:
    """`path:line` of the innermost frame in megatron_stare, or failing that of the innermost one
    outside torch and this folder.
    """
    innermost = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "megatron_stare"):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        inside = "torch" in path.parts or path.is_relative_to(Path(__file__).parent)
        if not innermost and not inside:
            innermost = f"{'/'.join(path.parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost or "?"
