"""The changes between two versions of a tensor, in few bytes, and exact to the bit.

A tensor is taken for what it is in memory: words of 8, 16, 32 or 64 bits. So -0.0 and 0.0 differ,
and a NaN keeps its payload. It is cut into blocks, and each block is written in one of four ways:

    same  nothing
    gaps  how many words lie between two that changed, then how far each of those moved
    mask  one bit for every word, then how far
    full  the words

How far is the difference of the words as integers, modulo 2^bits, folded so that small ones of both
signs are small: 0, -1, 1, -2 are 0, 1, 2, 3. In a step of training a weight of bf16 mostly moves to
a neighbour, which is 1 or 2; the XOR of neighbours would be 1, 3, 7, ..., of twice the entropy.
`zlib` at level 1, byte plane by byte plane, packs both lists. Of the two lists of places gaps are
the shorter one up to about one word in eight; `full` is taken where no other way is shorter.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Literal, NamedTuple, cast

import numpy
import torch
from torch import Tensor

from megatron_stare import system

Words = numpy.ndarray[Any, numpy.dtype[numpy.unsignedinteger[Any]]]
Coding = Literal["same", "gaps", "mask", "full"]

BLOCK_WORDS = 1 << 22  # bounds what is held next to a tensor, and lets blocks be packed at once
MOST_FOR_GAPS = 1 / 8  # of a block's words
_WORDS = {1: numpy.uint8, 2: numpy.uint16, 4: numpy.uint32, 8: numpy.uint64}
_GAPS = (1, 2, 4)  # bytes; none is larger than a block
_HEAD = struct.Struct("<QQB")  # changed words, bytes of the packed places, bytes of a gap
_LEVEL = 1


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
    packed = _packed(gaps)
    payload = _HEAD.pack(count, len(packed), gaps.itemsize) + packed
    payload += _packed(_folded(new[places] - old[places]))
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
        gaps = _unpacked(listed, count, numpy.dtype(_WORDS[width]))
        places = numpy.cumsum(gaps.astype(numpy.int64) + 1) - 1
    else:
        mask = _unpacked(listed, -(-len(words) // 8), numpy.dtype(numpy.uint8))
        places = numpy.flatnonzero(numpy.unpackbits(mask, count=len(words)))
    if len(places) != count or (count and not 0 <= places[-1] < len(words)):
        raise Damaged(f"its {count} changes lie outside the {len(words)} words of their block")
    words[places] += _unfolded(_unpacked(moves, count, words.dtype))


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


def _packed(words: Words) -> bytes:
    """All first bytes, then all second ones, and so on, compressed."""
    planes = words.view(numpy.uint8).reshape(-1, words.itemsize).T
    return zlib.compress(numpy.ascontiguousarray(planes), _LEVEL)


def _unpacked(content: bytes | memoryview, count: int, kind: numpy.dtype[Any]) -> Words:
    """`count` words of what `_packed` made. Never holds more than they take."""
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
