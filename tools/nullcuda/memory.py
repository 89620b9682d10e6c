"""CPU tensors over the memory of the device, which is the host's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Larger tensors have no values; those of whole numbers and flags, which say how many and where to,
# may have some further up.
LIMIT = int(os.environ.get("NULLCUDA_ELEMENTS", 1 << 20))
LIMIT_OF_INDICES = max(LIMIT, int(os.environ.get("NULLCUDA_INDICES", 0)))


def on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def leaves(value: Any) -> Iterator[Any]:
    """The tensors in an operator's arguments or results. torch's own trees know more kinds, and
    cost more than the operators of a small run.
    """
    if isinstance(value, tuple | list):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with the function of every leaf."""
    if isinstance(value, tuple | list):
        kind = getattr(value, "_make", type(value))  # of a named tuple: its fields are arguments
        return kind([mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    return function(value)


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory, with the same shape and strides."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype)
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    held = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    return flat.set_(held, tensor.storage_offset(), tensor.shape, tensor.stride())


def aliases(values: Any) -> Any:
    """The same structure with every tensor of the device as its alias."""
    return mapped(lambda value: alias(value) if on_device(value) else value, values)


def write(tensor: Tensor, value: Tensor) -> None:
    """`value`, a CPU tensor, into a tensor of the device."""
    at = alias(tensor)
    if at.data_ptr() != value.data_ptr() or at.stride() != value.stride():
        at.copy_(value)


def placed(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the device that holds a CPU tensor's values, without a copy that is counted."""
    made = torch.empty(value.shape, dtype=value.dtype, device=device)
    write(made, value)
    return made


def is_small(*tensors: Tensor) -> bool:
    """Whether all of them have values."""
    return all(
        tensor.numel() <= (LIMIT if tensor.dtype.is_floating_point else LIMIT_OF_INDICES)
        for tensor in tensors
    )
