"""Prompts and rollouts as bytes, for the journal, checkpoints and other processes.

A frame is MAGIC, the lengths of its two parts, their CRC-32, a line of JSON with every field that
is no array, and then the arrays, little-endian, one after another. Frames follow each other without
a gap; a torn or damaged one does not hide the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from mmap import mmap
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from megatron_stare.records import ROLLOUT_ARRAYS, Group, Prompt, Rollout

MAGIC = b"\xf5STARE\r\n"  # no byte 0xf5 in UTF-8
_LENGTHS = struct.Struct("<IQI")  # of the line, of the arrays; checksum of both
_ARRAYS: dict[type, Mapping[str, type[numpy.generic]]] = {
    Prompt: {"token_ids": numpy.int32},
    Rollout: ROLLOUT_ARRAYS,
}


class Frame(NamedTuple):
    """A record that was read."""

    start: int  # the frame's first byte
    record: Prompt | Rollout
    extra: dict[str, Any]  # values that were written along with the record


class InvalidBytes(NamedTuple):
    """Bytes from `start` on that are not a frame."""

    start: int
    reason: str


def frame(record: Prompt | Rollout, **extra: Any) -> bytes:
    """The frame of a record. `extra`: plain values to write along with it."""
    kinds = _ARRAYS[type(record)]
    stored = [each.name for each in dataclasses.fields(record) if each.init]
    plain = {name: getattr(record, name) for name in stored}
    arrays = [plain.pop(name).astype(_on_disk(kind), copy=False) for name, kind in kinds.items()]
    head = {"is": type(record).__name__, "lengths": [len(array) for array in arrays]}
    line = json.dumps([head, extra, plain]).encode() + b"\n"
    body = b"".join([line, *(array.tobytes() for array in arrays)])
    return MAGIC + _LENGTHS.pack(len(line), len(body) - len(line), zlib.crc32(body)) + body


def read_frames(content: bytes | mmap) -> Iterator[Frame | InvalidBytes]:
    """Every frame and every stretch that is not a frame, in order. Arrays are copied: a view of
    mapped memory would keep its file open.
    """
    place = 0
    while place < len(content):
        try:
            found, end = _frame_at(content, place)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            end = content.find(MAGIC, place + 1)
            yield InvalidBytes(place, str(error))
            end = len(content) if end < 0 else end
        else:
            yield found
        place = end


def group_frames(groups: Iterable[Group], places: Iterable[int] | None = None) -> Tensor:
    """Judged groups as one flat uint8 tensor. Prompts are stored without metadata, messages and
    tools, which training does not need. `places`: each group's place among those of all ranks.
    """
    parts: list[bytes] = []
    for place, group in zip(itertools.count() if places is None else places, groups, strict=False):
        prompt = dataclasses.replace(group.prompt, metadata={}, messages=(), tools=())
        parts.append(frame(prompt, place=place))
        for rollout in group.rollouts:
            assert isinstance(rollout, Rollout), "only the holder of a group stores it"
            parts.append(frame(rollout))
    return as_tensor(parts)


def groups_in(content: Tensor) -> list[Group]:
    """The groups of `group_frames`, of any number of ranks, in the order of their places.
    ValueError: a frame is damaged.
    """
    found: list[tuple[int, Prompt, list[Rollout]]] = []
    for _, record, extra in whole_frames(content):
        if isinstance(record, Prompt):
            found.append((extra.get("place", len(found)), record, []))
        else:
            found[-1][2].append(record)
    found.sort(key=lambda entry: entry[0])
    return [Group(prompt, tuple(rollouts)) for _, prompt, rollouts in found]


def numbered_frames(rollouts: Mapping[int, Rollout]) -> Tensor:
    """Rollouts of one prompt, by number, as one flat uint8 tensor."""
    return as_tensor(frame(rollout, number=number) for number, rollout in rollouts.items())


def whole_frames(content: Tensor) -> Iterator[Frame]:
    """The frames of a tensor of bytes. ValueError: one is damaged."""
    for found in read_frames(content.numpy().tobytes()):
        if isinstance(found, InvalidBytes):
            raise ValueError(f"a frame at byte {found.start} is damaged: {found.reason}")
        yield found


def as_tensor(frames: Iterable[bytes]) -> Tensor:
    """Frames one after another, uint8."""
    return torch.from_numpy(numpy.array(bytearray(b"".join(frames)), numpy.uint8))


def _frame_at(content: bytes | mmap, place: int) -> tuple[Frame, int]:
    """The frame at `place`, and its end. ValueError, TypeError, KeyError, RecursionError: no valid
    frame begins there.
    """
    start = place + len(MAGIC) + _LENGTHS.size
    if content[place : place + len(MAGIC)] != MAGIC or start > len(content):
        raise ValueError("no frame begins here")
    line, size, checksum = _LENGTHS.unpack_from(content, place + len(MAGIC))
    end = start + line + size
    with memoryview(content) as view:
        if end > len(content) or zlib.crc32(view[start:end]) != checksum:
            raise ValueError("torn, or its checksum does not match")
    head, extra, plain = json.loads(content[start : start + line])
    made = {kind.__name__: kind for kind in _ARRAYS}[head["is"]]
    arrays, at = {}, start + line
    for (name, kind), length in zip(_ARRAYS[made].items(), head["lengths"], strict=True):
        values = numpy.frombuffer(content, _on_disk(kind), length, at).astype(kind)
        values.flags.writeable = False
        arrays[name], at = values, at + length * _on_disk(kind).itemsize
    if at != end:
        raise ValueError("its arrays are not as long as it says")
    tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
    return Frame(place, made(**tuples, **arrays), extra), end


def _on_disk(kind: type[numpy.generic]) -> numpy.dtype:
    return numpy.dtype(kind).newbyteorder("<")
