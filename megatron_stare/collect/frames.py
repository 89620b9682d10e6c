"""Prompts and rollouts as bytes: what the journal, a checkpoint and other ranks are given of them.

A frame is MAGIC, the lengths of its two parts, their CRC-32, then a line of JSON with every field
that is no array, and the arrays behind one another, little-endian, as they lie in memory. Frames
follow one another without anything between them; one that is torn or spoilt does not hide the next.
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
    """A record, what was noted beside it, and where it begins."""

    start: int
    record: Prompt | Rollout
    beside: dict[str, Any]


class Spoilt(NamedTuple):
    """Bytes from `start` on that are no frame."""

    start: int
    reason: str


def frame(record: Prompt | Rollout, **beside: Any) -> bytes:
    """The frame of a record. `beside`: plain values that are noted with it."""
    kinds = _ARRAYS[type(record)]
    stored = [each.name for each in dataclasses.fields(record) if each.init]
    plain = {name: getattr(record, name) for name in stored}
    arrays = [plain.pop(name).astype(_on_disk(kind), copy=False) for name, kind in kinds.items()]
    head = {"is": type(record).__name__, "lengths": [len(array) for array in arrays]}
    line = json.dumps([head, beside, plain]).encode() + b"\n"
    body = b"".join([line, *(array.tobytes() for array in arrays)])
    return MAGIC + _LENGTHS.pack(len(line), len(body) - len(line), zlib.crc32(body)) + body


def read_frames(content: bytes | mmap, copy: bool = True) -> Iterator[Frame | Spoilt]:
    """Every frame in order, and in its place every stretch that is none. Without `copy` the arrays
    are views of `content`, which nobody may write to as long as they live.
    """
    place = 0
    while place < len(content):
        try:
            found, end = _frame_at(content, place, copy)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            end = content.find(MAGIC, place + 1)
            yield Spoilt(place, str(error))
            end = len(content) if end < 0 else end
        else:
            yield found
        place = end


def group_frames(groups: Iterable[Group], places: Iterable[int] | None = None) -> Tensor:
    """Judged groups as one flat uint8 tensor. Of a prompt it has what training needs, and not what
    its verifier and its environment were given. `places`: of each among all, where others have the
    rest.
    """
    parts: list[bytes] = []
    for place, group in zip(itertools.count() if places is None else places, groups, strict=False):
        prompt = dataclasses.replace(group.prompt, metadata={}, messages=(), tools=())
        parts.append(frame(prompt, place=place))
        for rollout in group.rollouts:
            assert isinstance(rollout, Rollout), "groups are kept where they are whole"
            parts.append(frame(rollout))
    return as_tensor(parts)


def groups_in(content: Tensor | list[dict[str, Any]]) -> list[Group]:
    """The groups of `group_frames`, in the order of their places, whichever ranks' come first; or
    of a checkpoint of version 0.1.0, which has them as lists of numbers. ValueError: spoilt.
    """
    if isinstance(content, list):
        return [
            Group(Prompt(**group["prompt"]), tuple(Rollout(**each) for each in group["rollouts"]))
            for group in content
        ]
    found: list[tuple[int, Prompt, list[Rollout]]] = []
    for _, record, beside in whole_frames(content):
        if isinstance(record, Prompt):
            found.append((beside.get("place", len(found)), record, []))
        else:
            found[-1][2].append(record)
    found.sort(key=lambda entry: entry[0])
    return [Group(prompt, tuple(rollouts)) for _, prompt, rollouts in found]


def numbered_frames(rollouts: Mapping[int, Rollout]) -> Tensor:
    """Rollouts of one prompt by their numbers, uint8."""
    return as_tensor(frame(rollout, number=number) for number, rollout in rollouts.items())


def whole_frames(content: Tensor) -> Iterator[Frame]:
    """The frames of a tensor of bytes. ValueError: one is spoilt."""
    for found in read_frames(content.numpy().tobytes()):
        if isinstance(found, Spoilt):
            raise ValueError(f"a frame at byte {found.start} is spoilt: {found.reason}")
        yield found


def as_tensor(frames: Iterable[bytes]) -> Tensor:
    """Frames behind one another, uint8."""
    return torch.from_numpy(numpy.array(bytearray(b"".join(frames)), numpy.uint8))


def _frame_at(content: bytes | mmap, place: int, copy: bool) -> tuple[Frame, int]:
    """The frame that begins there, and where it ends. ValueError, TypeError, KeyError,
    RecursionError: there is none.
    """
    start = place + len(MAGIC) + _LENGTHS.size
    if content[place : place + len(MAGIC)] != MAGIC or start > len(content):
        raise ValueError("no frame begins here")
    line, size, checksum = _LENGTHS.unpack_from(content, place + len(MAGIC))
    end = start + line + size
    with memoryview(content) as view:
        if end > len(content) or zlib.crc32(view[start:end]) != checksum:
            raise ValueError("torn, or its checksum is another")
    head, beside, plain = json.loads(content[start : start + line])
    made = {kind.__name__: kind for kind in _ARRAYS}[head["is"]]
    arrays, at = {}, start + line
    lengths = head["lengths"]
    if "routing" in _ARRAYS[made] and len(lengths) == len(_ARRAYS[made]) - 1:
        lengths = [*lengths, 0]  # written before rollouts had one
    for (name, kind), length in zip(_ARRAYS[made].items(), lengths, strict=True):
        # copied, so that the file's bytes can go
        values = numpy.frombuffer(content, _on_disk(kind), length, at).astype(kind, copy=copy)
        values.flags.writeable = False
        arrays[name], at = values, at + length * _on_disk(kind).itemsize
    if at != end:
        raise ValueError("its arrays are not as long as it says")
    tuples = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
    return Frame(place, made(**tuples, **arrays), beside), end


def _on_disk(kind: type[numpy.generic]) -> numpy.dtype:
    return numpy.dtype(kind).newbyteorder("<")
