"""The changes between two versions of a tensor, in few bytes, and exact to the bit.

A tensor is taken for what it is in memory: words of 8, 16, 32 or 64 bits. So -0.0 and 0.0 differ,
and a NaN keeps its payload. It is cut into blocks, and each block is written in one of four ways:

    same  nothing
    gaps  the number of words between every two that changed, then the changes
    mask  one bit for every word, then the changes
    full  the words

A change is the difference of two words as integers, modulo 2^bits, folded so that small differences
of both signs are small: 0, -1, 1, -2 become 0, 1, 2, 3. In a training step a weight of bf16 mostly
moves to a neighbour, which is 1 or 2; the XOR of neighbours would be 1, 3, 7, ..., of twice the
entropy. `zlib` at level 1 compresses both lists, byte plane by byte plane. Gaps are shorter than a
mask up to about one changed word in eight; `full` is used where no other way is shorter.

A message is a part of an update on its way to a relay: a table in JSON, and the blocks that it
lists.

    8 bytes, little endian: the table's length | the table | the blocks, one after another
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, cast

import numpy
import orjson
import torch
from torch import Tensor

from megatron_stare import system
from megatron_stare.rollout.sglang.weights import results

Words = numpy.ndarray[Any, numpy.dtype[numpy.unsignedinteger[Any]]]
Coding = Literal["same", "gaps", "mask", "full"]

BLOCK_WORDS = 1 << 22  # bounds what is held next to a tensor, and lets blocks be packed at once
MOST_FOR_GAPS = 1 / 8  # of a block's words
_WORDS = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}
_GAPS = (1, 2, 4)  # bytes; none is larger than a block
_HEAD = struct.Struct("<QQB")  # changed words, bytes of the packed places, bytes of a gap
_LEVEL = 1
_LENGTH = struct.Struct("<Q")
# Bytes of an element, by dtype.
SIZES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_MOST_THREADS = 8  # comparing, packing and hashing leave Python's lock


class Damaged(ValueError):
    """A block's bytes are not what `encode` makes."""


class Block(NamedTuple):
    """A block as it travels, and how many of its words changed."""

    coding: Coding
    payload: bytes
    changed: int


def words_of(tensor: Tensor) -> Words:
    """The tensor's words, flat, in host memory: its own where it lies there, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return cast(Words, flat.view(torch.uint8).numpy().view(_WORDS[tensor.element_size()]))


def words_in(content: bytes | bytearray | memoryview, size: int) -> Words:
    """The words of `size` bytes that lie in a buffer. Damaged: they do not fill it."""
    if len(content) % size:
        raise Damaged(f"{len(content)} bytes are no words of {size}")
    return cast(Words, numpy.frombuffer(content, dtype=_WORDS[size]))


def digest(words: Words) -> str:
    """The SHA-256 of the words' bytes, in hexadecimal digits."""
    return system.digest(memoryview(words.view(numpy.uint8)))


def encode(old: Words, new: Words) -> Block:
    """The encoded way from `old` to `new`, two blocks of the same words' size and number."""
    differ = old != new
    places = numpy.flatnonzero(differ)
    count = len(places)
    if not count:
        return Block("same", b"", 0)
    few = count <= MOST_FOR_GAPS * len(new)
    gaps = _narrow(numpy.diff(places, prepend=-1) - 1) if few else numpy.packbits(differ)
    packed = _compressed(gaps)
    payload = _HEAD.pack(count, len(packed), gaps.itemsize) + packed
    payload += _compressed(_folded(new[places] - old[places]))
    if len(payload) >= new.nbytes:
        return Block("full", new.tobytes(), count)
    return Block("gaps" if few else "mask", payload, count)


def apply(coding: str, payload: bytes | memoryview, words: Words) -> None:
    """Make the new words of the old ones, in place. Damaged: the payload is none of `encode`'s;
    the words are then as they were.
    """
    if coding == "same" and not len(payload):
        return
    if coding == "full" and len(payload) == words.nbytes:
        words[:] = numpy.frombuffer(payload, dtype=words.dtype)
        return
    if coding not in ("gaps", "mask") or len(payload) < _HEAD.size:
        raise Damaged(f"a block of {len(words)} words is not {coding!r} of {len(payload)} bytes")
    count, length, width = _HEAD.unpack(payload[: _HEAD.size])
    if count > len(words) or width not in _GAPS:
        raise Damaged(f"{count} changes, in gaps of {width} bytes, of {len(words)} words")
    listed, moves = payload[_HEAD.size :][:length], payload[_HEAD.size :][length:]
    if coding == "gaps":
        gaps = _decompressed(listed, count, numpy.dtype(_WORDS[width]))
        places = numpy.cumsum(gaps.astype(numpy.int64) + 1) - 1
    else:
        mask = _decompressed(listed, -(-len(words) // 8), numpy.dtype(numpy.uint8))
        places = numpy.flatnonzero(numpy.unpackbits(mask, count=len(words)))
    if len(places) != count or (count and not 0 <= places[-1] < len(words)):
        raise Damaged(f"its {count} changes lie outside the {len(words)} words of their block")
    words[places] += _unfolded(_decompressed(moves, count, words.dtype))


def _folded(moves: Words) -> Words:
    one, sign = moves.dtype.type(1), moves.dtype.type(8 * moves.itemsize - 1)
    return cast(Words, (moves << one) ^ -(moves >> sign))


def _unfolded(folded: Words) -> Words:
    one = folded.dtype.type(1)
    return cast(Words, (folded >> one) ^ -(folded & one))


def _narrow(gaps: Words) -> Words:
    """The same numbers in as few bytes as hold the largest."""
    largest = int(gaps.max())
    size = next(size for size in _GAPS if largest < 1 << 8 * size)
    return cast(Words, gaps.astype(_WORDS[size]))


def _compressed(words: Words) -> bytes:
    """All first bytes, then all second ones, and so on, compressed."""
    planes = words.view(numpy.uint8).reshape(-1, words.itemsize).T
    return zlib.compress(numpy.ascontiguousarray(planes), _LEVEL)


def _decompressed(content: bytes | memoryview, count: int, kind: numpy.dtype[Any]) -> Words:
    """`count` words of what `_compressed` made. Never holds more than they take."""
    size = count * kind.itemsize
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(content, size + 1)
    except zlib.error as error:
        raise Damaged(str(error)) from None
    if len(found) != size or not reader.eof or reader.unused_data:
        raise Damaged(f"{len(found)} bytes where {size} were packed")
    planes = numpy.frombuffer(found, numpy.uint8).reshape(kind.itemsize, count)
    return cast(Words, numpy.ascontiguousarray(planes.T).reshape(-1).view(kind))


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


class KeptTensor(NamedTuple):
    """One tensor."""

    words: Words
    dtype: str
    shape: tuple[int, ...]
    digest: str


class EncodedPart(NamedTuple):
    """The parts of a message."""

    entries: list[TensorEntry]
    blocks: list[bytes | memoryview]


class KeptWeights:
    """The weights as they were last sent, in the trainer's host memory. `tag` names the version of
    all of them; it is "" while a new version replaces them tensor by tensor. `changed`: words that
    differ between the two versions so far.
    """

    def __init__(self) -> None:
        self.tag = ""
        self.changed = 0
        self._tensors: dict[str, KeptTensor] = {}
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="delta")

    @property
    def elements(self) -> int:
        return sum(len(kept.words) for kept in self._tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(kept.words.nbytes for kept in self._tensors.values())

    def replace(self, bucket: Sequence[tuple[str, Tensor]], *, encoding: bool) -> EncodedPart:
        """Keep these tensors instead. The part says how they are made of what was kept, if it is to
        be encoded; nothing otherwise.
        """
        steps = results(
            [self._workers.submit(self._step, name, tensor, encoding) for name, tensor in bucket]
        )
        self.changed += sum(block.changed for _, blocks in steps for block in blocks)
        if not encoding:
            return EncodedPart([], [])
        return EncodedPart(
            [entry for entry, _ in steps],
            [block.payload for _, blocks in steps for block in blocks],
        )

    def whole(self, names: Iterable[str]) -> EncodedPart:
        """Tensors as they are, to be sent in full."""
        part = EncodedPart([], [])
        for name in names:
            words, dtype, shape, after = self._tensors[name]
            part.entries.append(
                TensorEntry(name, dtype, shape, "", after, [("full", words.nbytes)])
            )
            part.blocks.append(memoryview(words.view(numpy.uint8)))
        return part

    def buckets(self, size_bytes: int) -> Iterator[tuple[list[str], bool]]:
        """All names, in parts of up to `size_bytes`, each with whether it is the last."""
        names, filled = list[str](), 0
        for name, kept in self._tensors.items():
            if names and filled + kept.words.nbytes > size_bytes:
                yield names, False
                names, filled = [], 0
            names.append(name)
            filled += kept.words.nbytes
        yield names, True

    def _step(self, name: str, tensor: Tensor, encoding: bool) -> tuple[TensorEntry, list[Block]]:
        new = words_of(tensor)
        kept = self._tensors.get(name)
        if kept is None:
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            kept = self._tensors[name] = KeptTensor(new.copy(), dtype, shape, digest(new))
        before, blocks = kept.digest, list[Block]()
        for start in range(0, len(new), BLOCK_WORDS):
            old, now = (words[start : start + BLOCK_WORDS] for words in (kept.words, new))
            blocks.append(encode(old, now) if encoding else _compared(old, now))
            if blocks[-1].changed:
                old[:] = now
        if any(block.changed for block in blocks):
            kept = self._tensors[name] = kept._replace(digest=digest(new))
        sizes = [(block.coding, len(block.payload)) for block in blocks]
        return TensorEntry(name, kept.dtype, kept.shape, before, kept.digest, sizes), blocks


def _compared(old: Words, new: Words) -> Block:
    """A block that only counts the words that differ; nothing is encoded."""
    return Block("full", b"", int(numpy.count_nonzero(old != new)))
