"""slurm/health_check.sh on a node whose programs are substitutes: a healthy one says nothing, and
each fault is one line that names its remedy.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

SMI = """rows() { case "$*" in
    *index*) printf '0\\n1\\n' ;;
    *driver_version*) echo "${DRIVER:-580.65.06}" ;;
    *ecc*) printf '0\\n%s\\n' "${ECC:-0}" ;;
    *pending*) printf '0\\n%s\\n' "${REMAP:-0}" ;;
    *memory.used*) printf '4\\n%s\\n' "${USED:-4}" ;;
    -q) printf '    Fabric\\n        State                 : %s\\n' "${FABRIC:-Completed}" ;;
esac; }
case "$*" in *--id=0*) rows "$@" | head -n 1 ;; *) rows "$@" ;; esac"""
PYTHON = """case "$*" in *device_count*) echo "${TORCH:-2} 13.0" ;; esac"""
PROGRAMS = {
    "nvidia-smi": SMI,
    "python": PYTHON,
    "hostname": "echo node7",
    "getent": 'echo "${ADDRESS:-10.0.0.7} STREAM node7"',
}
FAULTS = {
    "driver": ({"TORCH": "0", "DRIVER": "550.54.15"}, "needs driver 580 or newer"),
    "gpus": ({"GPUS_PER_NODE": "8"}, "nvidia-smi sees 2 GPUs, not 8; drain"),
    "ecc": ({"ECC": "3"}, "uncorrected ECC errors"),
    "remap": ({"REMAP": "1"}, "rows to remap"),
    "leftovers": ({"USED": "40000"}, "40000 MiB of a GPU are in use"),
    "fabric": ({"FABRIC": "In Progress"}, "start nvidia-fabricmanager"),
    "name": ({"ADDRESS": "127.0.1.1", "SLURM_NNODES": "2"}, "node7 resolves to 127.0.1.1"),
    "compiler": ({"CC": "no_such_compiler"}, "no C compiler, which Triton needs"),
    "memlock": ({"MEMLOCK": "64"}, "ulimit -l is 64"),
}


def check(folder: Path, state: str = "4: ACTIVE", **environment: str) -> tuple[int, str]:
    programs = folder / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    port = folder / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    (port / "link_layer").write_text("InfiniBand")
    node = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LOGS": str(folder),
        "VENV": "",
        "GPUS_PER_NODE": "2",
        "SYSFS": str(folder / "sys"),
        "CC": "bash",
        "LEAST_SHM_MIB": "1",
    } | environment
    # No test can raise its own limits.
    limits = (
        'ulimit() { if [ "$1" = -l ]; then echo "${MEMLOCK:-unlimited}"; else echo 65536; fi; }'
    )
    script = f"{limits}; export -f ulimit; exec bash {ROOT}/slurm/health_check.sh"
    done = subprocess.run(
        ["bash", "-c", script], env=node, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


def test_a_healthy_node_says_nothing(tmp_path: Path) -> None:
    assert check(tmp_path) == (0, "")


def test_gpus_that_the_job_may_not_use_are_no_fault(tmp_path: Path) -> None:
    """Where no cgroup hides them, nvidia-smi shows the GPUs of other jobs."""
    mine = {"CUDA_VISIBLE_DEVICES": "0", "GPUS_PER_NODE": "1", "TORCH": "1"}
    assert check(tmp_path, **mine, USED="40000", ECC="3") == (0, "")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_line_with_its_remedy(fault: str, tmp_path: Path) -> None:
    environment, words = FAULTS[fault]
    code, said = check(tmp_path, **environment)
    assert code == 1 and words in said and said.count("\n") == 1, said


def test_a_port_that_is_down_is_named_unless_adapters_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "down").mkdir()
    (tmp_path / "chosen").mkdir()
    code, said = check(tmp_path / "down", state="1: DOWN")
    assert code == 1 and "InfiniBand port mlx5_0:1 is not active" in said
    assert check(tmp_path / "chosen", state="1: DOWN", NCCL_IB_HCA="mlx5_1") == (0, "")
