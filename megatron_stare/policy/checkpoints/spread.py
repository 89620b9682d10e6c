"""Bytes that lie on several ranks, in a checkpoint: each rank writes its own part, and every rank
that loads reads the whole, however many there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PREFIX = "loop."


@dataclass(frozen=True, eq=False)
class Spread:
    """This rank's `part` [n] of `size` bytes, uint8: those from `begin` on. Parts overlap nowhere
    and leave nothing out.
    """

    part: Tensor
    begin: int
    size: int


def described(state: Mapping[str, Any], prefix: str = PREFIX) -> dict[str, Any]:
    """The loop's state with Megatron's description in the place of every Spread; of one of which
    this rank holds nothing there is none.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Spread):
            if len(value.part):
                found[name] = _piece(prefix + name, value.part, value.size, value.begin)
        else:
            found[name] = described(value, f"{prefix}{name}.") if _is_state(value) else value
    return found


def room(keys: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What to load for every Spread of a checkpoint with these keys: the whole, on every rank."""
    found: dict[str, Any] = {}
    for key, stored in keys.items():
        if key.startswith(PREFIX):
            *parents, last = key.removeprefix(PREFIX).split(".")
            inside = found
            for parent in parents:
                inside = inside.setdefault(parent, {})
            (size,) = stored.size
            inside[last] = _piece(key, torch.empty(size, dtype=torch.uint8), size, 0, rank)
    return found


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _piece(key: str, part: Tensor, size: int, begin: int, replica: int = 0) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor(
        key=key,
        data=part,
        dtype=part.dtype,
        local_shape=tuple(part.shape),
        global_shape=(size,),
        global_offset=(begin,),
        axis_fragmentations=None,  # parts of any length
        replica_id=replica,
    )
