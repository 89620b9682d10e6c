"""The operations of Megatron's gated delta net in torch, for machines without the kernels of
flash-linear-attention.

A head has a state S, a matrix of keys by values. For the tokens of a sequence in turn, with decay
a = exp(g):

    S <- a S + beta k (v - a S^T k)^T,    o = scale S^T q

(Gated DeltaNet, arXiv 2412.06464, section 3.) Tokens are computed in chunks: inside a chunk the
values that are written solve a triangular system, and only states pass from chunk to chunk
(arXiv 2406.06484, section 3.2). A chunk belongs to one sequence, so that packed sequences do not
mix, and the n-th chunks of all sequences are computed together.

Shape legend: B sequences in rows, S positions of a row, H heads, K and V widths of keys and values,
C chunks, L positions of a chunk, N sequences that have an n-th chunk.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from megatron_stare.numerics.vocab_shard import compute_dtype

CHUNK = 64  # as in the kernels of flash-linear-attention


def normalised(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis, in fp32 at least."""
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """y_t = silu(sum_i weight_i x_(t - taps + 1 + i)) of every channel; positions before the start
    of a sequence count as 0. x [B, S, channels], weight [channels, taps]; `cu_seqlens`: where the
    sequences of a single row begin, and its end.
    """
    taps, length = weight.shape[1], x.shape[1]
    places = torch.arange(length, device=x.device)
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(x.device).long()
        places = places - bounds[torch.bucketize(places, bounds[1:], right=True)]
    total = x * weight[:, -1] if bias is None else x * weight[:, -1] + bias
    for back in range(1, min(taps, length)):
        shifted = nn.functional.pad(x[:, :-back], (0, 0, back, 0))
        known = (places >= back)[:, None]
        total = total + (shifted * weight[:, -1 - back]).where(known, 0.0)
    return (nn.functional.silu(total) if activation else total), None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """o [B, S, H, V] of q, k [B, S, H, K], v [B, S, H, V] and g, beta [B, S, H], in fp32 at least;
    scale is 1 / sqrt(K). `cu_seqlens` as in causal_conv1d. No final states.
    """
    rows, length = q.shape[:2]
    if cu_seqlens is None:
        bounds = [(row * length, (row + 1) * length) for row in range(rows)]
    else:
        bounds = list(itertools.pairwise(cu_seqlens.tolist()))
    token_CL, known_CL, order = _chunks(bounds, q.device)
    given = [x.flatten(0, 1).to(compute_dtype(x)) for x in (q, k, v, g, beta)]
    # Positions after the end of a sequence write nothing and forget nothing.
    q_CHLK, k_CHLK, v_CHLV = (x[token_CL].transpose(1, 2) for x in given[:3])
    g_CHL, beta_CHL = ((x[token_CL] * known_CL[..., None]).transpose(1, 2) for x in given[3:])
    q_CHLK = q_CHLK * q.shape[-1] ** -0.5
    o_CHLV = _through_chunks(q_CHLK, k_CHLK, v_CHLV, g_CHL.cumsum(-1), beta_CHL, order)
    o_CLHV = o_CHLV.transpose(1, 2)
    flat = o_CLHV.new_zeros(rows * length, *o_CLHV.shape[2:])
    flat = flat.index_put((token_CL[known_CL],), o_CLHV[known_CL])
    return flat.unflatten(0, (rows, length)).to(q.dtype), None


def _chunks(
    bounds: list[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor, list[int]]:
    """The tokens of every chunk [C, L] (the last one of a sequence again where it is short), which
    of them count, and how many sequences have a first chunk, a second and so on. First chunks come
    first, in each round those of the longest sequences.
    """
    longest = sorted(bounds, key=lambda bound: bound[0] - bound[1])
    most = -(-max(end - start for start, end in bounds) // CHUNK)
    firsts, lasts, order = [], [], []
    for number in range(most):
        live = [(s + number * CHUNK, e) for s, e in longest if s + number * CHUNK < e]
        order.append(len(live))
        firsts += [start for start, _ in live]
        lasts += [end for _, end in live]
    first_C1 = torch.tensor(firsts, device=device)[:, None]
    last_C1 = torch.tensor(lasts, device=device)[:, None]
    token_CL = first_C1 + torch.arange(CHUNK, device=device)
    return torch.minimum(token_CL, last_C1 - 1), token_CL < last_C1, order


def _through_chunks(
    q_CHLK: Tensor,
    k_CHLK: Tensor,
    v_CHLV: Tensor,
    g_CHL: Tensor,
    beta_CHL: Tensor,
    order: list[int],
) -> Tensor:
    """o [C, H, L, V]; `g_CHL` is the sum of g from the start of the chunk."""
    length = q_CHLK.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=q_CHLK.device).triu(1)
    # exp(g_i - g_j) for j <= i: the difference is at most 0 there, and may overflow elsewhere.
    decay_CHLL = (g_CHL[..., :, None] - g_CHL[..., None, :]).masked_fill(later, -torch.inf).exp()
    alike_CHLL = (k_CHLK @ k_CHLK.mT) * decay_CHLL * beta_CHL[..., None]
    given = torch.cat([v_CHLV, k_CHLK * g_CHL.exp()[..., None]], -1) * beta_CHL[..., None]
    # unitriangular: the diagonal of ones is not read
    solved = torch.linalg.solve_triangular(alike_CHLL, given, upper=False, unitriangular=True)
    value_CHLV, known_CHLK = solved.split([v_CHLV.shape[-1], k_CHLK.shape[-1]], -1)
    score_CHLL = (q_CHLK @ k_CHLK.mT) * decay_CHLL
    query_CHLK = q_CHLK * g_CHL.exp()[..., None]
    last_CH11 = g_CHL[..., -1, None, None]
    key_CHLK = k_CHLK * (last_CH11 - g_CHL[..., None]).exp()
    kept_CH11 = last_CH11.exp()

    _, heads, _, key_width = k_CHLK.shape
    state = v_CHLV.new_zeros(order[0], heads, key_width, v_CHLV.shape[-1])
    found, start = [], 0
    for count in order:
        here = slice(start, start + count)
        state = state[:count]
        written = value_CHLV[here] - known_CHLK[here] @ state
        found.append(query_CHLK[here] @ state + score_CHLL[here] @ written)
        state = kept_CH11[here] * state + key_CHLK[here].mT @ written
        start += count
    return torch.cat(found)
