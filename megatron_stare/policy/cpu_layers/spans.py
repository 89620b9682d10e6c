"""Ragged spans of queries and keys as calls of equal shape: which rows go into which call.

A *span* is a run of queries that are the last ones of a run of keys. Spans of one shape, at even
distances, are views; others are gathered by index, and short ones padded together.

Shape legend: n spans of L rows in one call, H heads, D head width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_stare.numerics.transfer import to_device

SHORT = 128  # up to here a kernel call costs more than copying spans together and padding them


@dataclass(frozen=True)
class Span:
    """Rows q_start + t * stride, t < q_length, of the queries;
    k_start + t * stride, t < k_length, of the keys.
    """

    q_start: int
    k_start: int
    q_length: int
    k_length: int
    stride: int = 1


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
    """Spans that run in one call."""

    queries: _Strided | _Indexed
    keys: _Strided | _Indexed


@dataclass(frozen=True)
class Ragged:
    """What a varlen kernel wants. The indices are None where they would be 0, 1, 2, ..."""

    q_index_N: Tensor | None
    k_index_U: Tensor | None
    q_starts: Tensor
    k_starts: Tensor
    longest_q: int
    longest_k: int


class Spans:
    """A list of spans with what the kernels derive from it, made once and used by every layer."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.spans = tuple(span for span in spans if span.q_length)
        self.device = device

    @property
    def square(self) -> bool:
        """Whether every span has as many keys as queries; if so no key belongs to two spans."""
        return all(span.q_length == span.k_length for span in self.spans)

    @cached_property
    def bundles(self) -> list[Bundle]:
        """Long spans in place, equal ones together where their rows form a pattern;
        short ones copied together.
        """
        shapes: defaultdict[tuple[int, int, int], list[Span]] = defaultdict(list)
        for span in self.spans:
            shapes[span.q_length, span.k_length, span.stride].append(span)
        found: list[Bundle] = []
        short: list[Span] = []
        for (q_length, k_length, _), alike in shapes.items():
            bundle = _strided(alike)
            if q_length == k_length <= SHORT:
                short += alike
            elif bundle is not None:
                found.append(bundle)
            elif q_length <= SHORT:
                found.append(_indexed(alike))
            else:
                found += [single for span in alike if (single := _strided([span]))]
        return found + [_strided(run) or _indexed(run) for run in _similar(short)]

    @cached_property
    def ragged(self) -> Ragged:
        spans = self.spans
        q_index_N = _rows([(span.q_start, span.q_length, span.stride) for span in spans])
        k_index_U = _rows([(span.k_start, span.k_length, span.stride) for span in spans])
        return Ragged(
            q_index_N=self._unless_identity(q_index_N),
            k_index_U=self._unless_identity(k_index_U),
            q_starts=self._starts([span.q_length for span in spans]),
            k_starts=self._starts([span.k_length for span in spans]),
            longest_q=max(span.q_length for span in spans),
            longest_k=max(span.k_length for span in spans),
        )

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


def _strided(spans: list[Span]) -> Bundle | None:
    """One call on views, or None where the spans differ in shape
    or do not start at even distances.
    """
    first, count = spans[0], len(spans)
    second = spans[1] if count > 1 else first
    q_step, k_step = second.q_start - first.q_start, second.k_start - first.k_start
    for i, span in enumerate(spans):
        if (span.q_length, span.k_length, span.stride) != (
            first.q_length,
            first.k_length,
            first.stride,
        ):
            return None
        if (span.q_start, span.k_start) != (first.q_start + i * q_step, first.k_start + i * k_step):
            return None
    if q_step < 0 or k_step < 0:
        return None
    return Bundle(
        _Strided(first.q_start, count, q_step, first.q_length, first.stride),
        _Strided(first.k_start, count, k_step, first.k_length, first.stride),
    )


def _indexed(spans: list[Span]) -> Bundle:
    """One call on copies. Keys may be padded only where no query precedes them:
    all spans square or of one shape.
    """

    def side(runs: list[tuple[int, int, int]]) -> _Indexed:
        longest = max(length for _, length, _ in runs)
        places = [(number * longest, length, 1) for number, (_, length, _) in enumerate(runs)]
        return _Indexed(_rows(runs), _rows(places), len(runs), longest)

    return Bundle(
        side([(span.q_start, span.q_length, span.stride) for span in spans]),
        side([(span.k_start, span.k_length, span.stride) for span in spans]),
    )


def _similar(spans: list[Span]) -> Iterator[list[Span]]:
    """Square spans in runs whose shortest member is at least 3/4 of the longest, less 8:
    little padding.
    """
    run: list[Span] = []
    for span in sorted(spans, key=lambda span: (-span.q_length, span.q_start)):
        if run and span.q_length < 0.75 * run[0].q_length - 8:
            yield run
            run = []
        run.append(span)
    if run:
        yield run
