"""Columns of log-probs of the same tokens, compared in pairs, and the table that is printed.

A column holds one value [nats] for each token of every response, or NaN if it has no value there.
The differences of a pair are summarised over all tokens and by position, in intervals that begin at
0, 1, 2, 4, 8, ...: a difference that grows with the position points to attention or RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy
from rich import box
from rich.console import Console
from rich.table import Table

Column = Sequence[numpy.ndarray]


@dataclass(frozen=True)
class LogprobDifference:
    """Statistics of |one - other| [nats] for one pair of columns."""

    pair: str
    tokens: int  # number of tokens compared
    mean: float
    high: float  # 99th percentile
    largest: float
    equal: float  # fraction that is bitwise equal
    by_position: Mapping[int, float]  # first position of an interval -> mean
    first: tuple[int, int] | None  # first difference: (number of the response, position)


@dataclass(frozen=True)
class Parity:
    """All columns of one comparison."""

    columns: Mapping[str, Column]  # by the name of the program or server that computed them
    responses: Sequence[numpy.ndarray]  # the ids that were scored
    pairs: Sequence[tuple[str, str]]  # names of the columns to compare
    # Column -> fraction of positions where its likeliest token is not the trainer's.
    disagree: Mapping[str, float] = field(default_factory=dict)
    operations: Sequence[str] = ()  # lines about single operations

    @property
    def differences(self) -> list[LogprobDifference]:
        """One for each pair."""
        return [
            difference(f"{one} - {other}", self.columns[one], self.columns[other])
            for one, other in self.pairs
        ]


def difference(pair: str, one: Column, other: Column) -> LogprobDifference:
    """Compare two columns over the tokens that both have. ValueError: the columns are of different
    tokens, or have no token in common.
    """
    if [len(each) for each in one] != [len(each) for each in other]:
        raise ValueError(f"{pair}: the columns are not of the same tokens")
    sizes, places = [numpy.zeros(0)], [numpy.zeros(0, int)]
    first: tuple[int, int] | None = None
    for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        both = numpy.flatnonzero(~numpy.isnan(mine) & ~numpy.isnan(theirs))
        size = numpy.abs(mine[both].astype(float) - theirs[both].astype(float))
        if first is None and size.any():
            first = number, int(both[size.astype(bool).argmax()])
        sizes.append(size)
        places.append(both)
    size, place = numpy.concatenate(sizes), numpy.concatenate(places)
    if not len(size):
        raise ValueError(f"{pair}: there is no token to compare")
    return LogprobDifference(
        pair,
        len(size),
        float(size.mean()),
        float(numpy.quantile(size, 0.99)),
        float(size.max()),
        float((size == 0).mean()),
        {
            begin: float(size[(place >= begin) & (place < max(1, 2 * begin))].mean())
            for begin in sorted({0 if p == 0 else 1 << (int(p).bit_length() - 1) for p in place})
        },
        first,
    )


def text(parity: Parity, decode: Callable[[int], str]) -> str:
    """The tables, and a line on each pair. `decode` gives a token's text."""
    found = parity.differences
    console = Console(width=100, highlight=False)
    heads = ("log-probs, in nats", "tokens", "mean", "99%", "max", "bitwise equal")
    over_all = Table(*heads, box=box.MARKDOWN)
    for each in found:
        numbers = [f"{value:.2g}" for value in (each.mean, each.high, each.largest)]
        over_all.add_row(each.pair, str(each.tokens), *numbers, f"{each.equal:.1%}")
    begins = sorted({begin for each in found for begin in each.by_position})
    by_position = Table("mean from position", *map(str, begins), box=box.MARKDOWN)
    for each in found:
        values = [each.by_position.get(begin) for begin in begins]
        cells = ["" if value is None else f"{value:.1g}" for value in values]
        by_position.add_row(each.pair, *cells)
    with console.capture() as captured:
        console.print(over_all)
        console.print(by_position)
    lines = [_first(each, parity.responses, decode) for each in found]
    lines += [
        f"likeliest token, {name} and trainer: another at {share:.2%} of the positions"
        for name, share in parity.disagree.items()
    ]
    return "\n".join([captured.get().rstrip(), *lines, *parity.operations])


def _first(
    found: LogprobDifference, responses: Sequence[numpy.ndarray], decode: Callable[[int], str]
) -> str:
    if found.first is None:
        return f"{found.pair}: bitwise equal everywhere"
    number, position = found.first
    token = int(responses[number][position])
    place = f"response {number}, position {position}"
    return f"{found.pair}: first apart at {place}, id {token} {decode(token)!r}"
