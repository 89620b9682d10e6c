"""K0: what must fit together on a node: driver, torch, NCCL, compilers, network."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_stare.commands.gpuday.rows import Day, Measurement, holds
from megatron_stare.commands.gpuday.stages import checkout
from megatron_stare.config import Config, override
from megatron_stare.debug.doctor import examine
from megatron_stare.system import LEAST_DRIVER, nvidia_driver

NEEDED = ("TransformerEngine", "CUDA", "SGLang", "servers' NCCL")  # of what doctor warns of


def run(day: Day) -> Iterator[Measurement]:
    """The driver, every check of `doctor` for a run with SGLang servers, those of Slurm's health
    check, and a first use of what must compile.
    """
    version, least = nvidia_driver(), LEAST_DRIVER["13"]
    major = version.partition(".")[0]
    none = "no /proc/driver/nvidia and no nvidia-smi; install NVIDIA's driver"
    row = holds("driver", major.isdigit() and int(major) >= least, version or none)
    yield dataclasses.replace(row, expected=f">= {least}")
    settings = ["rollout.engine=sglang", f"run.dir={day.path}/run", *day.overrides]
    for finding in examine(override(Config(), settings)):
        found = f"{finding.found}; {finding.remedy}".removesuffix("; ")
        # What is only a warning for a laptop ends a day on GPUs.
        missing = "not installed" in finding.found or "no GPU" in finding.found
        is_fault = finding.level == "WARN" and finding.what in NEEDED and missing
        yield Measurement(finding.what, found, verdict="FAIL" if is_fault else finding.level)
    yield from _node(day)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield Measurement("devices", f"torch sees {torch.cuda.device_count()} GPUs")
    yield _tried("torch.compile", _compiled, device, "install gcc, g++ and python3-dev")
    yield _tried("TransformerEngine layer", _layer, device, "`make gpu`")
    if smi := shutil.which("nvidia-smi"):
        said = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=60)
        (day.path / "topology.txt").write_text(said.stdout)
        yield Measurement("topology", "topology.txt" if said.returncode == 0 else said.stderr[:200])


def _node(day: Day) -> Iterator[Measurement]:
    """Slurm's health check of a node, where the checkout has it; each of its lines is a fault."""
    root = checkout()
    if root is None or not shutil.which("bash"):
        yield holds("node", False, "not checked: slurm/health_check.sh does not exist", "WARN")
        return
    python = Path(sys.executable)
    environment = os.environ | {
        "LOGS": str(day.path),
        "GPUS_PER_NODE": str(day.gpus),
        "VENV": str(python.parent.parent) if python.parent.name == "bin" else "",
    }
    script = ["bash", str(root / "slurm" / "health_check.sh")]
    said = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    # bash itself may warn there, for example of a locale that is not installed
    faults = said.stderr.splitlines() if said.returncode else []
    yield holds("node", said.returncode == 0, f"{len(faults)} faults of slurm/health_check.sh")
    yield from (Measurement("node", line, verdict="FAIL") for line in faults)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    yield holds("Python.h", header.is_file(), str(header))


def _tried(what: str, look: Callable[[str], str], device: str, remedy: str) -> Measurement:
    try:
        return holds(what, True, look(device))
    except Exception as error:  # a broken installation may raise anything
        first = str(error).strip().partition("\n")[0]
        return holds(what, False, f"{type(error).__name__}: {first[:200]}; {remedy}")


def _compiled(device: str) -> str:
    """Compile a function: Triton needs gcc and Python.h on a GPU, and g++ without one."""
    import torch

    values = torch.arange(1024.0, device=device)
    found = torch.compile(lambda x: (x * 2 + 1).sum())(values)
    error = abs(found.item() - (1023 * 1024 + 1024))
    if error > 64:
        raise ValueError(f"a compiled sum is {error} away from its value")
    return f"runs on {device}"


def _layer(device: str) -> str:
    """One layer of TransformerEngine, forward and backward."""
    import torch
    import transformer_engine.pytorch as te

    layer = te.LayerNormLinear(256, 256, bias=False, params_dtype=torch.bfloat16, device=device)
    values = torch.randn(64, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    layer(values).float().square().mean().backward()
    if values.grad is None or not torch.isfinite(values.grad).all():
        raise ValueError("its gradient is not finite")
    return "forward and backward are finite"
