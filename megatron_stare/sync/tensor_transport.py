"""Weights inside an HTTP request: by value,
or as handles to GPU memory that trainer and server share.

Either way a bucket travels as one flat tensor of bytes and a table of what lies where in it
(SGLang's load_format "flattened_bucket"). A server unpickles only what it knows; the table's
entries are plain namespaces with the fields that it reads: name, shape, dtype, start_idx, end_idx,
numel, the last three in bytes.
"""

from __future__ import annotations

import base64
import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

Bucket = list[tuple[str, Tensor]]
# Of the arguments with which torch rebuilds a tensor from a CUDA handle: the number of its device.
_DEVICE_PLACE = 6


def flattened(bucket: Bucket, room: Tensor | None = None) -> Tensor:
    """The bucket's bytes end to end [uint8], where its tensors are;
    or at the start of `room`, wherever that is.
    """
    parts = [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
    if room is None:
        return torch.cat(parts)
    room = room[: sum(part.numel() for part in parts)]
    for place, part in zip(room.split([part.numel() for part in parts]), parts, strict=True):
        place.copy_(part)
    return room


def table_of(bucket: Bucket) -> list[SimpleNamespace]:
    """What lies where in the flattened bucket."""
    table, start = [], 0
    for name, tensor in bucket:
        end = start + tensor.nbytes
        shape = list(tensor.shape)
        place = {"start_idx": start, "end_idx": end, "numel": tensor.nbytes}
        table.append(SimpleNamespace(name=name, shape=shape, dtype=tensor.dtype, **place))
        start = end
    return table


def pickled(flat: Tensor, table: list[SimpleNamespace]) -> bytes:
    """The bucket as a plain pickle:
    a ForkingPickler's file descriptors, sent over HTTP, would end the server.

    Protocol 3, because 2 spells bytes with a function that SGLang 0.5.9 refuses, and 4 names
    functions in two parts.

    Megatron-Core puts a loader of its own in the place of torch's, which servers refuse: the name
    is put back. It stands before the tensor's bytes, so that the first place where it occurs is the
    one that is meant.
    """
    content = pickle.dumps({"flattened_tensor": flat.cpu(), "metadata": table}, protocol=3)
    return content.replace(
        _reference(torch.storage._load_from_bytes), b"ctorch.storage\n_load_from_bytes\n", 1
    )


def pickled_handle(flat: Tensor, table: list[SimpleNamespace]) -> bytes:
    """The bucket as a handle to its GPU memory, which must live until the server has answered."""
    content = io.BytesIO()
    _HandlePickler(content, protocol=3).dump({"flattened_tensor": flat, "metadata": table})
    return content.getvalue()


class _HandlePickler(pickle.Pickler):
    """Writes CUDA tensors as handles, their device by its UUID:
    the server may number the devices otherwise.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_PLACE]).uuid)
        return rebuild, (*arguments[:_DEVICE_PLACE], uuid, *arguments[_DEVICE_PLACE + 1 :])


def encoded(content: bytes) -> str:
    """As JSON carries it."""
    return base64.b64encode(content).decode()


def _reference(function: Any) -> bytes:
    """How protocol 3 spells a function."""
    return f"c{function.__module__}\n{function.__qualname__}\n".encode()
