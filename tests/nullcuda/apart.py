"""Functions in a process of their own: on the device without TransformerEngine, or on the CPU."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tests.paths import ROOT

OF_DEVICE = (f"{ROOT}/.nullcuda", f"{ROOT}/tools/nullcuda")


def on_device(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) on the device, as where TransformerEngine is not installed."""
    return _apart(function, args, os.environ | {"NULLCUDA_WITHOUT_TE": "1"})


def on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a process that tools/nullcuda/run did not start."""
    environment = os.environ | {
        name: ":".join(
            part for part in os.environ[name].split(":") if not part.startswith(OF_DEVICE)
        )
        for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH")
    }
    del environment["NULLCUDA_LIBRARY"]
    return _apart(function, args, environment)


def _apart(function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> Any:
    """What goes in and comes back is pickled. CalledProcessError where the function raises: its
    traceback is on stderr.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((function, args)),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        check=True,
    )
    return pickle.loads(done.stdout)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # what is printed is no part of it
        asked, given = pickle.load(sys.stdin.buffer)
        pickle.dump(asked(*given), answer)
