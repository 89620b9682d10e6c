"""SGLang's deterministic mode (--enable-deterministic-inference) without a GPU.

In that mode a token is drawn by a hash of its request's seed and its place. SGLang refuses the mode
with the attention that a CPU has, finds no kernels for a CPU whose results do not depend on what
else is in a batch, and keeps the hash in a wheel that has no CPU build. `install` says that the
attention is fit for it (it goes sequence by sequence) and multiplies matrices row by row; the
stand-in for that wheel has the hash.
"""

from __future__ import annotations

import torch

FLAG = "--enable-deterministic-inference"
_WORD = 0xFFFFFFFF
_library: torch.library.Library | None = None  # what it registers goes with it


def install() -> None:
    """Before the server reads its arguments."""
    import sglang.srt.batch_invariant_ops as kernels
    from sglang.srt.server_args import add_deterministic_attention_backend_choices

    add_deterministic_attention_backend_choices(["torch_native"])
    kernels.enable_batch_invariant_mode = multiply_row_by_row


def multiply_row_by_row() -> None:
    """From now on a row of a matrix product has the same bits whatever the other rows are."""
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("mm", by_rows, "CPU")
        _library.impl("addmm", added_by_rows, "CPU")


def by_rows(left_RK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """left @ right, every row a product of its own."""
    return torch.bmm(left_RK[:, None], right_KN.expand(len(left_RK), *right_KN.shape))[:, 0]


def added_by_rows(
    bias: torch.Tensor,
    left_RK: torch.Tensor,
    right_KN: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """beta bias + alpha left @ right."""
    return beta * bias + alpha * by_rows(left_RK, right_KN)


def murmur_hash(
    seed_R: torch.Tensor, place_R: torch.Tensor, column_C: torch.Tensor
) -> torch.Tensor:
    """[R, C], uint32: MurmurHash3 (x86, 32 bits, seed 0) of 16 bytes, a row's 64-bit seed, its
    place and the column, little-endian.
    """
    seed_R, place_R, column_C = (value.to(torch.int64) for value in (seed_R, place_R, column_C))
    state_R = torch.zeros_like(seed_R)
    for word_R in (seed_R & _WORD, (seed_R >> 32) & _WORD, place_R & _WORD):
        state_R = _mixed(state_R, word_R)
    state_RC = _mixed(state_R[:, None], column_C[None] & _WORD) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state_RC = (state_RC ^ (state_RC >> shift)) * factor & _WORD
    return (state_RC ^ (state_RC >> 16)).to(torch.uint32)


def _mixed(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _turned(word * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
    return _turned(state ^ word, 13) * 5 + 0xE6546B64 & _WORD


def _turned(word: torch.Tensor, count: int) -> torch.Tensor:
    return (word << count | word >> 32 - count) & _WORD
