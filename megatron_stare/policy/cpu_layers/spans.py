"""Ragged spans of queries and keys as calls of equal shape: which rows go into which call.

A *span* is a run of queries with a run of keys of the same length, of which every query sees its
own and the earlier ones, and a *prefix*: a run of keys before them, all of which every query sees.
Runs of one shape, at even distances, are views; others are gathered by index, and short ones padded
together.

Shape legend: n runs of L rows in one call, H heads, D head width.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_stare.numerics.exchange import to_device

SHORT = 128  # up to here a kernel call costs more than copying spans together and padding them


@dataclass(frozen=True)
class Span:
    """Rows q_start + t * stride, t < length, of the queries; rows k_start + t * stride, t < length,
    of the keys, and before them rows prefix_start + t * stride, t < prefix.
    """

    q_start: int
    k_start: int
    length: int
    stride: int = 1
    prefix_start: int = 0
    prefix: int = 0


@dataclass(frozen=True)
class _Block:
    """A run of queries and a run of keys."""

    q_start: int
    k_start: int
    q_length: int
    k_length: int
    stride: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.q_length, self.k_length, self.stride


@dataclass(frozen=True)
class _Strided:
    """Row of run i, place t: start + i * step + t * stride.
    Reading and writing are views, nothing is copied.
    """

    start: int
    count: int
    step: int
    length: int
    stride: int

    def read(self, x: Tensor) -> Tensor:
        """[rows, ...] -> [n, L, ...]."""
        row = x.stride(0)
        return x.as_strided(
            (self.count, self.length, *x.shape[1:]),
            (self.step * row, self.stride * row, *x.stride()[1:]),
            x.storage_offset() + self.start * row,
        )

    def write(self, x: Tensor, values: Tensor) -> None:
        self.read(x).copy_(values)

    def add(self, x: Tensor, values: Tensor) -> None:
        self.read(x).add_(values)


@dataclass(frozen=True)
class _Indexed:
    """Runs of unlike length, padded with zeros on the right:
    rows_R are the real rows, places_R where they stand.

    Zeros on the right change nothing: no real query sees a later key, and a query whose output
    gradient is zero adds P^T dout = 0 and dS = P (0 - 0) = 0 to the keys it sees.
    """

    rows_R: Tensor
    places_R: Tensor
    count: int
    length: int

    def read(self, x: Tensor) -> Tensor:
        """[rows, ...] -> [n, L, ...]."""
        padded = x.new_zeros(self.count * self.length, *x.shape[1:])
        return padded.index_copy_(0, self.places_R, x.index_select(0, self.rows_R)).unflatten(
            0, (self.count, -1)
        )

    def _real(self, values: Tensor) -> Tensor:
        return values.reshape(-1, *values.shape[2:]).index_select(0, self.places_R)

    def write(self, x: Tensor, values: Tensor) -> None:
        x.index_copy_(0, self.rows_R, self._real(values))

    def add(self, x: Tensor, values: Tensor) -> None:
        x.index_add_(0, self.rows_R, self._real(values))


@dataclass(frozen=True)
class Bundle:
    """Runs of queries and keys that go into one call."""

    queries: _Strided | _Indexed
    keys: _Strided | _Indexed


@dataclass(frozen=True)
class Ragged:
    """The arguments of a varlen kernel. indices: the rows of q, k and v; None where they would be
    0, 1, 2, ... runs: the starts of the queries and of the keys, and the longest run of each.
    """

    indices: tuple[Tensor | None, Tensor | None, Tensor | None]
    runs: tuple[Tensor, Tensor, int, int]


class Spans:
    """A list of spans with what the kernels derive from it, made once and used by every layer."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = tuple(span for span in spans if span.length)
        self.device = device

    @cached_property
    def squares(self) -> list[Bundle]:
        """The spans without their prefixes: long ones in place, equal ones together where their
        rows form a pattern; short ones copied together.
        """
        found: list[Bundle] = []
        short: list[_Block] = []
        for alike in _by_shape(
            _Block(span.q_start, span.k_start, span.length, span.length, span.stride)
            for span in self.spans
        ):
            if alike[0].q_length <= SHORT:
                short += alike
            else:
                found += _in_place(alike)
        return found + [_strided(run) or _indexed(run) for run in _similar(short)]

    @cached_property
    def prefixes(self) -> list[Bundle]:
        """The queries of every span that has a prefix, and the prefix. Spans that follow one
        another and have the same prefix are one run of queries.
        """
        blocks: list[_Block] = []
        for span in self.spans:
            block = _Block(span.q_start, span.prefix_start, span.length, span.prefix, span.stride)
            if not block.k_length:
                continue
            if blocks and _continues(blocks[-1], block):
                longer = blocks[-1].q_length + block.q_length
                blocks[-1] = dataclasses.replace(blocks[-1], q_length=longer)
            else:
                blocks.append(block)
        found: list[Bundle] = []
        for alike in _by_shape(blocks):
            short = alike[0].q_length <= SHORT and _strided(alike) is None
            found += [_indexed(alike)] if short else _in_place(alike)
        return found

    @cached_property
    def ragged(self) -> Ragged:
        spans = self.spans
        q_runs = [(span.q_start, span.length, span.stride) for span in spans]
        k_runs = [
            run
            for span in spans
            for run in (
                (span.prefix_start, span.prefix, span.stride),
                (span.k_start, span.length, span.stride),
            )
        ]
        q_index_N, k_index_U = (self._unless_identity(_rows(runs)) for runs in (q_runs, k_runs))
        queries = [span.length for span in spans]
        keys = [span.prefix + span.length for span in spans]
        runs = (self._starts(queries), self._starts(keys), max(queries), max(keys))
        return Ragged((q_index_N, k_index_U, k_index_U), runs)

    def _starts(self, lengths: list[int]) -> Tensor:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return to_device(ends.to(torch.int32), self.device)

    def _unless_identity(self, index: Tensor) -> Tensor | None:
        same = torch.equal(index, torch.arange(index.numel()))
        return None if same else to_device(index, self.device)


def _rows(runs: list[tuple[int, int, int]]) -> Tensor:
    """The row numbers of (start, length, stride) runs, one after the other."""
    parts = [torch.arange(start, start + length * stride, stride) for start, length, stride in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)


def _by_shape(blocks: Iterable[_Block]) -> Iterable[list[_Block]]:
    shapes: defaultdict[tuple[int, int, int], list[_Block]] = defaultdict(list)
    for block in blocks:
        shapes[block.shape].append(block)
    return shapes.values()


def _continues(block: _Block, other: _Block) -> bool:
    """Whether the other's queries follow the block's, and their keys are the same."""
    return (
        block.stride == other.stride == 1
        and (other.k_start, other.k_length) == (block.k_start, block.k_length)
        and other.q_start == block.q_start + block.q_length
    )


def _in_place(alike: list[_Block]) -> list[Bundle]:
    """Blocks of one shape as views, in one call if their rows form a pattern."""
    together = _strided(alike)
    if together is not None:
        return [together]
    return [single for block in alike if (single := _strided([block]))]


def _strided(blocks: list[_Block]) -> Bundle | None:
    """One call on views; None where blocks differ in shape or do not start at even distances."""
    first, count = blocks[0], len(blocks)
    q_step = blocks[1].q_start - first.q_start if count > 1 else 1
    k_step = blocks[1].k_start - first.k_start if count > 1 else 1
    if q_step <= 0 or k_step <= 0:  # views that overlap cannot be added to
        return None
    for i, block in enumerate(blocks):
        starts = (first.q_start + i * q_step, first.k_start + i * k_step)
        if block.shape != first.shape or (block.q_start, block.k_start) != starts:
            return None
    return Bundle(
        _Strided(first.q_start, count, q_step, first.q_length, first.stride),
        _Strided(first.k_start, count, k_step, first.k_length, first.stride),
    )


def _indexed(blocks: list[_Block]) -> Bundle:
    """One call on copies. Keys may be padded only where no query sees the padding: all blocks are
    square, or of one shape.
    """

    def side(runs: list[tuple[int, int, int]]) -> _Indexed:
        longest = max(length for _, length, _ in runs)
        places = [(number * longest, length, 1) for number, (_, length, _) in enumerate(runs)]
        return _Indexed(_rows(runs), _rows(places), len(runs), longest)

    return Bundle(
        side([(block.q_start, block.q_length, block.stride) for block in blocks]),
        side([(block.k_start, block.k_length, block.stride) for block in blocks]),
    )


def _similar(blocks: list[_Block]) -> Iterator[list[_Block]]:
    """Square blocks in runs of little padding: the shortest at least 3/4 of the longest, less 8."""
    run: list[_Block] = []
    for block in sorted(blocks, key=lambda block: (-block.q_length, block.q_start)):
        if run and block.q_length < 0.75 * run[0].q_length - 8:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
