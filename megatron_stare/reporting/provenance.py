"""`<run.dir>/starts.jsonl`: what ran, one line of JSON for each start of a run.

Time, command, versions, commit and machine. The name of the host is left out, because a report is
made to be passed on. Nothing large is imported to find out, except torch for the names of GPUs.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_stare import __version__
from megatron_stare.config.environment import own_command
from megatron_stare.system import nvidia_driver

STARTS_NAME = "starts.jsonl"
PACKAGES = ("torch", "megatron-core", "transformers")  # their versions decide how a run behaves
_ROOT = Path(__file__).parents[2]


def record_start(directory: Path, ranks: int) -> None:
    """Append this process's line."""
    start = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": own_command(),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "ranks": ranks,
    }
    with (Path(directory) / STARTS_NAME).open("a", encoding="ascii") as file:
        file.write(json.dumps(start) + "\n")


def read_starts(directory: Path) -> list[Mapping[str, Any]]:
    """The starts of a run, the first one first; none of a run of an older version. A line that a
    kill tore is left out.
    """
    path = Path(directory) / STARTS_NAME
    found = []
    for line in path.read_bytes().split(b"\n") if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [start for start in found if isinstance(start, dict)]


def commit() -> str:
    """The commit of a checkout, marked where files were changed; "" for an installation."""
    if not (_ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions() -> dict[str, str]:
    """This package, Python and PACKAGES; "" of a package that is not installed."""
    found = {"megatron_stare": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def machine() -> dict[str, Any]:
    """{"system", "processor", "cores" that this process may use, "memory_gib", "gpus": the names of
    those it sees, "driver"}.
    """
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "driver": nvidia_driver(),
    }


def _processor() -> str:
    """The model of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
