"""The weights as they were last sent, in the trainer's host memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy
from torch import Tensor

from megatron_stare.rollout.sglang.weights import results
from megatron_stare.sync.delta.encoding import (
    BLOCK_WORDS,
    Block,
    Words,
    digest,
    encode,
    words_of,
)
from megatron_stare.sync.delta.message import TensorEntry

_MOST_THREADS = 8  # comparing, packing and hashing leave Python's lock


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
    """`tag` names the version of all kept weights; it is "" while a new version replaces them
    tensor by tensor. `changed`: words that differ between the two versions so far.
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
