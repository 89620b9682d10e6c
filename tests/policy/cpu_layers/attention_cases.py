"""Inputs, the naive twin and comparisons that the tests of the attention share."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_stare.policy import runtime
from megatron_stare.policy.cpu_layers.attention import CoreAttention
from megatron_stare.policy.cpu_layers.spans import SHORT

MIXED = [1, 70, 33, 33, 2, 64, 1, 17, 33, 5, 69]


EQUAL = [24] * 5


LONG = [SHORT + 60, SHORT + 60, 3 * SHORT, SHORT + 60, 7]


PACKS = {"mixed": MIXED, "equal": EQUAL, "long": LONG, "alone": [301], "ones": [1, 1, 1]}


EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}


def packed_params(
    starts: list[int], padded: list[int] | None = None, device: str = "cpu", **fields: Any
) -> Any:
    runtime.prepare()
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = torch.tensor(starts, dtype=torch.int32, device=device)
    slots = None if padded is None else torch.tensor(padded, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in itertools.pairwise(padded or starts))
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "cu_seqlens_q_padded": slots}
    given |= {"cu_seqlens_kv_padded": slots, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return PackedSeqParams(**({"qkv_format": "thd"} | given | fields))


def starts_of(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def core(width: int, cp_group: Any = None, **overrides: Any) -> CoreAttention:
    size = 1 if cp_group is None else cp_group.size()
    config = SimpleNamespace(context_parallel_size=size, kv_channels=width, attention_dropout=0.0)
    arguments: dict[str, Any] = {"attn_mask_type": "causal", "attention_type": "self"}
    arguments |= {"pg_collection": SimpleNamespace(cp=cp_group)}
    return CoreAttention(config, 1, **(arguments | overrides))


def random_qkv(
    tokens: tuple[int, ...], heads: int, groups: int, width: int, seed: int = 0
) -> list[Tensor]:
    """q, k, v and a gradient of out, float64;
    keys large enough that the softmax is far from uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*tokens, count, width) for count in (heads, groups, groups, heads)]
    return [2 * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def naive(q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor) -> Tensor:
    """One sequence, written from the definition: [S, H * D]."""
    length, heads, width = q_SHD.shape
    k_SHD, v_SHD = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_SGD, v_SGD))
    scores_HSS = torch.einsum("qhd,khd->hqk", q_SHD, k_SHD) / math.sqrt(width)
    future_SS = torch.ones(length, length, dtype=torch.bool, device=q_SHD.device).triu(1)
    weights_HSS = scores_HSS.masked_fill(future_SS, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights_HSS, v_SHD).flatten(1)


def naive_packed(lengths: list[int]) -> Callable[..., Tensor]:
    def run(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths) for x in (q_THD, k_TGD, v_TGD)), strict=True)
        return torch.cat([naive(*part) for part in parts])

    return run


# Lengths of sequences, and the first row and number of the earlier rows that each one sees.
SHARED = (
    [9, 3, 0, 5, SHORT + 7, 6, 4, SHORT + 2, 1],
    [(0, 0), (0, 6), (0, 6), (0, 6), (0, 6), (0, 0), (145, 5), (145, 5), (145, 5)],
)


def naive_shared(lengths: list[int], prefixes: list[tuple[int, int]]) -> Callable[..., Tensor]:
    def run(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        parts = []
        for start, length, (first, count) in zip(
            starts_of(lengths), lengths, prefixes, strict=False
        ):
            rows = [*range(first, first + count), *range(start, start + length)]
            parts.append(naive(q_THD[rows], k_TGD[rows], v_TGD[rows])[count:])
        return torch.cat(parts)

    return run


def naive_padded(q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor) -> Tensor:
    columns = zip(*(x.unbind(1) for x in (q_SBHD, k_SBGD, v_SBGD)), strict=True)
    return torch.stack([naive(*column) for column in columns], 1)


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """[out, dq, dk, dv] for inputs q, k, v and the gradient of out."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].reshape(out.shape))]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference over out, dq, dk and dv, each in units of its largest wanted value.

    Where all of one are 0 (dq and dk of lone tokens, differences of equal terms), in units of the
    largest of any.
    """
    worst, largest = 0.0, max(float(theirs.abs().max()) for theirs in wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape == theirs.shape
        assert torch.isfinite(mine).all()
        worst = max(
            worst, float((mine.double() - theirs).abs().max() / (theirs.abs().max() or largest))
        )
    return worst


@contextlib.contextmanager
def saved_storages() -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd keeps alive, by address."""
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept


def linear_bytes(tokens: int, heads: int, groups: int, width: int, size: int = 4) -> int:
    """q, out, k, v and the log-sum-exp."""
    return tokens * size * (2 * heads * width + 2 * groups * width + heads)
