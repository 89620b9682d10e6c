"""One rank's rows of the vocabulary matrix, how work over them is cut into tiles,
and the checks before it starts.

Shape legend: N rows (loss tokens), H hidden width, V rows of this rank's shard (vocabulary / TP,
padding included).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_stare.numerics.exchange import to_device

SCRATCH_ELEMENTS = 1 << 19
_SCRATCH_BUFFERS = 3
_NARROWEST_TILE = 2048
_ALIGNMENT = 64


# The fields of a row's partial sums, in order (vocab_statistics.py); the last two are the collision
# terms.
MAXIMUM, S0, S1, TARGET, S2, Q0, Q1 = range(7)
FIELDS, FIELDS_WITH_COLLISION = 5, 7


class RowMoments(NamedTuple):
    """Statistics of every row for its gradient, over the whole vocabulary: m, S0 and S1/S0."""

    maximum_n: Tensor
    normalizer_n: Tensor
    mean_n: Tensor

    def rows(self, rows: slice | Tensor) -> RowMoments:
        """The same for some of the rows."""
        return RowMoments(self.maximum_n[rows], self.normalizer_n[rows], self.mean_n[rows])


@dataclass(frozen=True)
class VocabShard:
    """Rows [rank * V, rank * V + V) of the output matrix;
    global rows at or beyond `vocab_size` are padding.

    Padding is never multiplied, has probability 0 and gets a zero gradient. `group=None`: the whole
    matrix is here. `fp32_logits`: logits of bf16 or fp16 inputs are not rounded to their dtype.
    """

    weight_VH: Tensor
    group: dist.ProcessGroup | None
    vocab_size: int
    fp32_logits: bool = False

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype in which logits are kept."""
        return compute_dtype(self.weight_VH) if self.fp32_logits else self.weight_VH.dtype

    @property
    def rank(self) -> int:
        """This rank's place in the vocabulary group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """Number of shards."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rows(self) -> int:
        """V: rows held here, padding included; equal on all ranks."""
        return self.weight_VH.shape[0]

    @property
    def start(self) -> int:
        """Global vocabulary index of the first row held here."""
        return self.rank * self.rows

    @property
    def real_rows(self) -> int:
        """Rows held here that are not padding; they come first."""
        return max(0, min(self.rows, self.vocab_size - self.start))

    def gathered(self, tensor: Tensor) -> Tensor:
        """[TP, ...]: every rank's tensor of this shape, in rank order.
        One all-gather (none for an empty tensor).
        """
        if self.group is None or tensor.numel() == 0:
            return tensor.unsqueeze(0)
        everyone = torch.empty(
            self.world_size, *tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        dist.all_gather(list(everyone.unbind(0)), tensor.contiguous(), group=self.group)
        return everyone

    def summed_(self, tensor: Tensor) -> Tensor:
        """The tensor summed over the group, in place."""
        if self.group is not None and tensor.numel() > 0:
            dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclass(frozen=True)
class Tiling:
    """[row_count, column_count] pieces of the [N, V] logits, equal on all ranks of the group."""

    row_count: int
    column_count: int

    @staticmethod
    def full_width(rows: int, columns: int, element_size: int, workspace_bytes: int) -> Tiling:
        """Tiles of as many whole rows as fit the workspace, for a loss that closes each row in the
        forward pass.
        """
        columns = max(1, columns)
        return Tiling(
            _even(rows, _budget(workspace_bytes, columns, element_size) // columns), columns
        )

    @staticmethod
    def blocked(rows: int, columns: int, element_size: int, workspace_bytes: int) -> Tiling:
        """Tiles of as many rows as leave them 2048 columns wide: then weight gradients are written
        as rarely as possible.
        """
        columns = max(1, columns)
        budget = _budget(workspace_bytes, columns, element_size)
        row_count = _even(rows, budget // min(columns, _NARROWEST_TILE))
        return Tiling(row_count, _even(columns, budget // row_count))

    def row_blocks(self, rows: int) -> list[slice]:
        """Slices that cover [0, rows)."""
        return _slices(rows, self.row_count)

    def column_blocks(self, columns: int) -> list[slice]:
        """Slices that cover [0, columns)."""
        return _slices(columns, self.column_count)


def _budget(workspace_bytes: int, columns: int, element_size: int) -> int:
    """Elements for the tile: the workspace less the elementwise scratch,
    or half of it where it is that small.
    """
    scratch = _SCRATCH_BUFFERS * 4 * max(SCRATCH_ELEMENTS, columns)
    return max(workspace_bytes - scratch, workspace_bytes // 2) // element_size


def _even(total: int, most: int) -> int:
    """The block length, at most `most` and at least 1,
    that cuts `total` into the fewest and most equal blocks.
    """
    most = max(1, min(most, total))
    block = -(-total // -(-total // most)) if total else 1
    aligned = -(-block // _ALIGNMENT) * _ALIGNMENT
    return aligned if aligned <= most else block


def _slices(total: int, block: int) -> list[slice]:
    return [slice(first, min(first + block, total)) for first in range(0, total, block)]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """fp64 for fp64 input, fp32 for everything narrower."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


_SHAPE, _DTYPE, _VOCABULARY, _TARGET, _TEMPERATURE = 1, 2, 3, 4, 5
_AGREED = (
    "rows of hidden",
    "hidden width",
    "rows of weight",
    "vocab_size",
    "dtype",
    "target checksum",
)


def checked_inverse_temperature(
    hidden_NH: Tensor, shard: VocabShard, target_N: Tensor, temperature: float | Tensor
) -> Tensor | None:
    """1 / temperature per row [N], None where it is 1 everywhere,
    after all ranks agreed that the input is sound.

    One all-gather of nine int64 per call, read by the host once: nothing else here waits for a
    device. Every rank raises the same ValueError, naming rank, row and value, for a target outside
    [0, vocab_size), a temperature that is not positive and finite, a vocab_size that the shards
    cannot hold, wrong shapes or dtypes, and ranks whose shapes or targets differ.
    """
    weight_VH, device = shard.weight_VH, hidden_NH.device
    stated = [
        hidden_NH.shape[0],
        hidden_NH.shape[-1],
        weight_VH.shape[0],
        shard.vocab_size,
        sum(map(ord, str(hidden_NH.dtype))),
    ]
    fault, value = _stated_fault(hidden_NH, shard, target_N, temperature)
    if fault:
        header = to_device([*stated, 0, fault, -1, _bits(value)], device)
    else:
        found = _value_fault(target_N, temperature, shard.vocab_size)
        header = torch.cat([to_device(stated, device), _checksum(target_N), found])
    everyone = shard.gathered(header).tolist()
    for rank, (*_, rank_fault, rank_row, bits) in enumerate(everyone):
        if rank_fault:
            wrong = _description(
                rank_fault, struct.unpack("<d", struct.pack("<q", bits))[0], shard.vocab_size
            )
            place = f"vocabulary rank {rank}" + (f", row {rank_row}" if rank_row >= 0 else "")
            raise ValueError(f"{place}: {wrong}")
    for rank, entries in enumerate(everyone):
        for name, mine, first in zip(_AGREED, entries, everyone[0], strict=False):
            if mine != first:
                raise ValueError(
                    f"mismatched shards: {name} is {mine} on vocabulary rank {rank} but {first} on "
                    "rank 0"
                )
    if isinstance(temperature, Tensor):
        return (
            temperature.detach()
            .to(compute_dtype(hidden_NH))
            .expand(hidden_NH.shape[0])
            .reciprocal()
        )
    if temperature == 1.0:
        return None
    return torch.full_like(target_N, 1.0 / temperature, dtype=compute_dtype(hidden_NH))


def _stated_fault(
    hidden_NH: Tensor, shard: VocabShard, target_N: Tensor, temperature: float | Tensor
) -> tuple[int, float]:
    """(fault, value) of what this rank's host knows of its input; fault 0 is none."""
    weight_VH = shard.weight_VH
    if hidden_NH.dim() != 2 or weight_VH.dim() != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        return _SHAPE, float(hidden_NH.dim())
    if target_N.shape != hidden_NH.shape[:1]:
        return _SHAPE, float(target_N.numel())
    if (
        target_N.dtype != torch.int64
        or hidden_NH.dtype != weight_VH.dtype
        or not hidden_NH.is_floating_point()
    ):
        return _DTYPE, 0.0
    if not 0 < shard.vocab_size <= shard.rows * shard.world_size:
        return _VOCABULARY, float(shard.vocab_size)
    if isinstance(temperature, Tensor) and temperature.numel() not in (1, target_N.numel()):
        return _SHAPE, float(temperature.numel())
    return 0, 0.0


def _value_fault(target_N: Tensor, temperature: float | Tensor, vocab_size: int) -> Tensor:
    """[3] int64 where the targets are: fault, row and the bits of the value in fp64, of the first
    target or, where these are sound, of the first temperature that is out of range; else zeros.
    """
    device = target_N.device
    outside_N = (target_N < 0) | (target_N >= vocab_size)
    found = _first_fault(_TARGET, outside_N, target_N)
    if isinstance(temperature, Tensor):
        value_N = temperature.detach().to(device, torch.float64).reshape(-1)
        unfit_N = ~((value_N > 0) & torch.isfinite(value_N))
        second = _first_fault(_TEMPERATURE, unfit_N, value_N)
        return torch.where(found[:1] == 0, second, found)
    if not (temperature > 0 and math.isfinite(temperature)):
        second = to_device([_TEMPERATURE, 0, _bits(temperature)], device)
        return torch.where(found[:1] == 0, second, found)
    return found


def _first_fault(fault: int, bad_N: Tensor, value_N: Tensor) -> Tensor:
    if not bad_N.numel():
        return torch.zeros(3, dtype=torch.int64, device=bad_N.device)
    row = bad_N.int().argmax().reshape(1)  # the first of the largest
    bits = value_N.gather(0, row).double().view(torch.int64)
    return torch.cat([torch.full_like(row, fault), row, bits]) * bad_N.any()


def _bits(value: float) -> int:
    """A number's fp64 bits as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _checksum(target_N: Tensor) -> Tensor:
    """[1] int64 that depends on every target and its row; it wraps around, and a collision is
    possible but not by accident.
    """
    place_N = torch.arange(1, target_N.numel() + 1, device=target_N.device)
    return (target_N * (2 * place_N + 1)).sum(0, keepdim=True)


def _description(fault: int, value: float, vocab_size: int) -> str:
    return {
        _SHAPE: "hidden must be [N, H], weight [V/TP, H], target and temperature [N]; "
        f"got a size of {value:g}",
        _DTYPE: "hidden and weight must share one floating-point dtype, and target must be int64",
        _VOCABULARY: f"vocab_size {value:.0f} is not in [1, rows of all shards]",
        _TARGET: f"target {value:.0f} is outside the vocabulary [0, {vocab_size})",
        _TEMPERATURE: f"temperature {value:g} is not positive and finite",
    }[fault]
