"""The random state of a rank: Python, numpy, torch (CPU and GPU) and Megatron's own generators.

Rollouts and shuffles draw from seeds of their own; this serves whatever else may sample (dropout, a
user's reward).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Plain containers and tensors, as a checkpoint can hold them."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 (what others draw from)
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": _tracker().get_states(),
    }


def restore(states: list[dict[str, Any]], rank: int) -> None:
    """This rank's state of a run on as many ranks;
    on another number of ranks every one keeps its fresh seeds.
    """
    if len(states) != torch.distributed.get_world_size():
        return
    state = states[rank]
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["megatron"])


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
