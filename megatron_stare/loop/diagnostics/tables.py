"""The tables of a step's diagnostics.

They hold counts and sums over the tokens of all ranks: by surprisal, position, quadrant and
vocabulary id. Each rank fills its own bins; one sum over the ranks makes them everyone's, so the
counts are exact, and the sums are those of fp64.

Shape legend: T loss tokens of this rank, K bins, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.loop.diagnostics.predicted import QUADRANTS, quadrants
from megatron_stare.numerics.selection import Across
from megatron_stare.policy.layout import response_position
from megatron_stare.reporting.diagnostics import (
    Density,
    PositionBins,
    Quadrant,
    SurprisalBins,
    Tables,
    Tally,
    TokenRow,
)

# The same for every step, so that steps can be laid side by side [nats].
SURPRISAL_EDGES = (
    *(0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),
    *(2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0),
)
ADVANTAGE_EDGES = tuple(number / 4 for number in range(-12, 13))
MOST_POSITION_BINS = 32


def position_edges(longest: int) -> tuple[int, ...]:
    """At most MOST_POSITION_BINS stretches of equal length over a response of `longest` tokens."""
    width = -(-longest // MOST_POSITION_BINS)
    return tuple(range(0, longest + width, width))


def tables_of(
    values: Mapping[str, Tensor],
    across: Across,
    *,
    longest: int,
    vocabulary: int,
    rows: int,
    text_of: Callable[[int], str],
    chooses: bool,
) -> Tables:
    """The tables of the flat values of `merged`. `rows` is the length of each table of tokens,
    `text_of` an id's text; `chooses`: tables of L+ and L-, else of tokens with g > 0 and others.
    Collective.
    """
    advantage_T, surprisal_T = values["advantage"], values["surprisal"]
    position = position_edges(longest)
    surprisal_bin_T = _bin(surprisal_T, SURPRISAL_EDGES)
    position_bin_T = _bin(response_position(values["token_index"]), position)
    advantages = len(ADVANTAGE_EDGES) - 1
    density_bin_T = surprisal_bin_T * advantages + _bin(advantage_T, ADVANTAGE_EDGES)
    everywhere_T = torch.ones_like(advantage_T, dtype=torch.bool)
    quadrant_T = quadrants(advantage_T, values["sensitivity"])
    sides = _sides(values, chooses)
    changes = ("change", "plain_change")
    places = ("change", "entropy", "surprisal", "gap", "variance")
    count, cells = len(SURPRISAL_EDGES) - 1, (len(SURPRISAL_EDGES) - 1) * advantages
    zero_T = torch.zeros_like(surprisal_bin_T)
    wanted = [
        (surprisal_bin_T, advantage_T > 0, count, changes),
        (surprisal_bin_T, advantage_T < 0, count, changes),
        (position_bin_T, everywhere_T, len(position) - 1, places),
        (density_bin_T, everywhere_T, cells, ()),
        (zero_T, everywhere_T, 1, changes),
        *((zero_T, mask_T, 1, changes) for mask_T in quadrant_T),
        *((values["id"], mask_T, vocabulary, ("change", "surprisal")) for mask_T in sides.values()),
    ]
    parts = [_binned(values, *each) for each in wanted]
    found = _over_ranks(parts, across)
    positive, negative, by_position, density, whole = found[:5]
    every = [Quadrant(int(each[0, 0]), *each[1:, 0].tolist()) for each in found[5:9]]
    change, plain_change = whole[1:, 0].tolist()
    counts = density[0].long().view(-1, advantages).tolist()
    return Tables(
        change=change,
        plain_change=plain_change,
        quadrants=dict(zip(QUADRANTS, every, strict=True)),
        surprisal_bins=SurprisalBins([*SURPRISAL_EDGES], _tally(positive), _tally(negative)),
        position_bins=_positions(position, by_position),
        density=Density([*SURPRISAL_EDGES], [*ADVANTAGE_EDGES], counts),
        tokens={
            name: _token_rows(each, rows, text_of)
            for name, each in zip(sides, found[9:], strict=True)
        },
    )


def _sides(values: Mapping[str, Tensor], chooses: bool) -> dict[str, Tensor]:
    if chooses:
        chosen_T = values["chosen"]
        return {"chosen_positive": chosen_T > 0, "chosen_negative": chosen_T < 0}
    rising_T = values["sensitivity"] > 0
    return {"rising": rising_T, "falling": ~rising_T}


def _bin(value_T: Tensor, edges: Sequence[float]) -> Tensor:
    """The bin of each value; what lies beyond the outermost edges is in the outermost bins."""
    inner = torch.tensor(edges[1:-1], dtype=value_T.dtype, device=value_T.device)
    return torch.bucketize(value_T, inner, right=True)


def _binned(
    values: Mapping[str, Tensor], bin_T: Tensor, mask_T: Tensor, size: int, names: Sequence[str]
) -> Tensor:
    """[1 + names, size] fp64: per bin the tokens in the mask, and the sums of their values."""
    inside_T = bin_T[mask_T]
    rows = [torch.bincount(inside_T, minlength=size).double()]
    rows += [
        torch.bincount(inside_T, values[name][mask_T].double(), minlength=size) for name in names
    ]
    return torch.stack(rows)


def _over_ranks(parts: Sequence[Tensor], across: Across) -> list[Tensor]:
    """The sums over all ranks, in host memory; one collective."""
    total = torch.cat([part.flatten() for part in parts])
    if across.group is not None:
        dist.all_reduce(total, group=across.group)
    total = total.cpu()
    ends = [0, *itertools.accumulate(part.numel() for part in parts)]
    cut = itertools.pairwise(ends)
    return [total[a:b].view(part.shape) for (a, b), part in zip(cut, parts, strict=True)]


def _tally(found: Tensor) -> Tally:
    return Tally(found[0].long().tolist(), found[1].tolist(), found[2].tolist())


def _positions(edges: Sequence[int], found: Tensor) -> PositionBins:
    count, change, entropy, surprisal, gap, variance = found.tolist()

    def means(sums: list[float]) -> list[float | None]:
        return [one / n if n else None for one, n in zip(sums, count, strict=True)]

    z = [a / math.sqrt(b) if b > 0 else None for a, b in zip(gap, variance, strict=True)]
    counts = [int(n) for n in count]
    return PositionBins([*edges], counts, change, means(entropy), means(surprisal), z)


def _token_rows(found: Tensor, rows: int, text_of: Callable[[int], str]) -> list[TokenRow]:
    """The ids that change most, half of the rows, and of the others the commonest; by how often
    they came.
    """
    count_V, change_V, surprisal_V = found
    seen = int((count_V > 0).sum())
    moved = change_V.abs().topk(min(seen, rows // 2)).indices.tolist()
    common = count_V.topk(min(seen, rows)).indices.tolist()
    ids = [number for number in dict.fromkeys(moved + common) if count_V[number] > 0][:rows]
    ids.sort(key=lambda number: (-float(count_V[number]), number))
    return [
        TokenRow(
            number,
            text_of(number),
            int(count_V[number]),
            float(change_V[number]),
            float(surprisal_V[number] / count_V[number]),
        )
        for number in ids
    ]
