"""The device's own functions, next to those of CUDA."""

from __future__ import annotations

import ctypes
import functools
import os


@functools.cache
def library() -> ctypes.CDLL:
    """The device of this process. RuntimeError outside tools/nullcuda/run."""
    path = os.environ.get("NULLCUDA_LIBRARY")
    if not path:
        raise RuntimeError("not on the null device: start the command with tools/nullcuda/run")
    loaded = ctypes.CDLL(path)
    loaded.nullcuda_unanswered.restype = ctypes.c_char_p
    loaded.nullcuda_unanswered.argtypes = [ctypes.c_long]
    return loaded


def is_here() -> bool:
    """Whether this process runs on the null device."""
    return bool(os.environ.get("NULLCUDA_LIBRARY"))
