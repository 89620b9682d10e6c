"""Shared parts of the benchmarks: time, peak memory, and the machine."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class PeakMemory:
    """Peak memory while entered, less what was there before:
    the driver's counter, or Linux's VmHWM.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated() - self.before
        elif Path("/proc/self/clear_refs").exists():
            self.bytes = self._status("VmHWM") - self.before

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def timed(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """(wall seconds, processor seconds of all threads)."""
    start, cpu_start = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu_start


def machine(device: torch.device) -> dict[str, str]:
    """The machine and the versions that the figures depend on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu
        )
    accelerator = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    return {
        "cpu": cpu,
        "gpu": accelerator,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
