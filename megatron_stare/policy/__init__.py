"""The Megatron-Core model that learns:
topology, build, attention, head, HF names and weights, packing, actor.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

import torch  # loads what cuDNN needs of CUDA


def _load_torchs_cudnn() -> None:
    """Load the cuDNN that torch was installed with before TransformerEngine, if that is installed,
    loads another one: it prefers that of a CUDA toolkit. Two versions in one process fail, and one
    before 9.18 computes NaN in the backward pass of packed attention.
    """
    nvidia = importlib.util.find_spec("nvidia")
    if nvidia is None or importlib.util.find_spec("transformer_engine") is None:
        return
    for root in map(Path, nvidia.submodule_search_locations or ()):
        for library in sorted(root.glob("cudnn/lib/libcudnn*.so.*")):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            os.environ.setdefault("CUDNN_HOME", str(root / "cudnn"))


if torch.version.cuda:
    _load_torchs_cudnn()
