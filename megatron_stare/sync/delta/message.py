"""A part of an update on its way to a relay: a table in JSON, and the bytes that it speaks of.

8 bytes, little endian: the table's length | the table | the blocks, one after another
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import orjson

from megatron_stare.sync.delta.encoding import Damaged

_LENGTH = struct.Struct("<Q")
# Bytes of an element, by dtype.
SIZES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. `before`, `after`: the digests of what it is made from and of what it becomes;
    "" before a tensor that is sent whole. `blocks`: coding and bytes of each, in their order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    before: str
    after: str
    blocks: Sequence[tuple[str, int]]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor itself."""
        return prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Table:
    """The contents of a message. The parts of `update` are numbered from 0; `base` is the update
    whose weights they change, "" where they bring all of them. `files` (base64): the other files.
    """

    update: str
    base: str
    number: int
    last: bool
    entries: list[TensorEntry]
    files: dict[str, str] = field(default_factory=dict)


def packed(table: Table, blocks: Sequence[bytes | memoryview]) -> bytes:
    """The message."""
    head = orjson.dumps(asdict(table))
    return b"".join([_LENGTH.pack(len(head)), head, *blocks])


def unpacked(content: bytes) -> tuple[Table, list[list[memoryview]]]:
    """The table, and for each of its entries the bytes of its blocks. Damaged: it is not a
    whole message.
    """
    try:
        (length,) = _LENGTH.unpack_from(content)
        start = _LENGTH.size + length
        fields = orjson.loads(content[_LENGTH.size : start])
        entries = [_entry(entry) for entry in fields.pop("entries")]
        table = Table(entries=entries, **fields)
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"a message without a table ({error})") from None
    expected = start + sum(size for entry in entries for _, size in entry.blocks)
    if len(content) != expected:
        raise Damaged(f"a message of {len(content)} bytes, not {expected}")
    whole, blocks = memoryview(content), []
    for entry in entries:
        blocks.append(list[memoryview]())
        for _, size in entry.blocks:
            blocks[-1].append(whole[start : start + size])
            start += size
    return table, blocks


def _entry(fields: dict[str, Any]) -> TensorEntry:
    entry = TensorEntry(**fields | {"shape": tuple(fields["shape"])})
    if entry.dtype not in SIZES or any(size < 0 for _, size in entry.blocks):
        raise ValueError(f"{entry.name} has dtype {entry.dtype!r}, or a block of no size")
    return entry
