"""Runs on the device, and the same runs on the CPU: in another process, which has no device."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.paths import ROOT

_RUN = """
import pickle, sys
from tests.nullcuda.runs import call
call(sys.argv[1])
"""


def on_cpu(function: Callable[..., Any], *args: Any, folder: Path) -> Any:
    """`function(*args)` in a process without the device; its result."""
    task = folder / f"{function.__name__}.task"
    task.write_bytes(pickle.dumps((function, args)))
    dropped = {"LD_PRELOAD", "NULLCUDA_LIBRARY", "PYTHONPATH", "LD_LIBRARY_PATH"}
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(task)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return pickle.loads(task.with_suffix(".result").read_bytes())


def call(task: str) -> None:
    """The other side of `on_cpu`."""
    assert not torch.cuda.is_available()
    function, args = pickle.loads(Path(task).read_bytes())
    result = function(*args)
    Path(task).with_suffix(".result").write_bytes(pickle.dumps(result))


def to_host(values: Any) -> Any:
    """The same structure with its tensors in host memory, as pickles between processes need."""
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, values)
