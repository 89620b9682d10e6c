"""Triton kernels against torch, in Triton's interpreter and a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT


def interpreted(module: str, function: str) -> str:
    """The result of `module.function("cpu")`, as text. AssertionError with its output on error."""
    pytest.importorskip("triton")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    script = f"from {module} import {function}; print({function}('cpu'))"
    finished = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()
