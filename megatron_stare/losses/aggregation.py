"""Where token losses become one number: the only place that knows a reduction or a denominator.

The batch loss is sum_t coefficient_t * loss_t over all ranks and micro-batches. Denominators are
those of the GLOBAL batch, so the gradient does not depend on micro-batching or data parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.config import UserError
from megatron_stare.numerics.selection import Across
from megatron_stare.records import TokenBatch


def coefficients(
    batch: TokenBatch,
    aggregation: str,
    across: Across,
    kept_T: Tensor | None = None,
    padded_length: int | None = None,
) -> Tensor:
    """coefficient_T of one aggregation; N loss tokens, n of the token's sequence, and G sequences
    with at least one, all global.

    token-mean: 1 / N. seq-mean-token-mean: 1 / (G n). seq-mean-token-sum: 1 / G.
    seq-mean-token-sum-norm: 1 / `padded_length` (Dr.GRPO, arXiv 2503.20783). row-mean: as
    seq-mean-token-mean, but G counts sequences without a loss token too. A batch without a loss
    token gives an empty tensor on every rank, never a division by zero.

    Where `kept_T` is false a token has coefficient 0 and does not count.
    """
    if kept_T is not None:
        return _of_kept(batch, aggregation, across, kept_T, padded_length)
    return _all(
        batch, batch.sequence_tokens_T, batch.advantage_T, aggregation, across, padded_length
    )


def _of_kept(
    batch: TokenBatch, aggregation: str, across: Across, kept_T: Tensor, padded_length: int | None
) -> Tensor:
    count_T = across.sum_by(kept_T.double(), batch.sequence_T, batch.num_sequences)
    found_T = torch.zeros_like(batch.advantage_T)
    template_T = batch.advantage_T[kept_T]
    found_T[kept_T] = _all(batch, count_T[kept_T], template_T, aggregation, across, padded_length)
    return found_T


def _all(
    batch: TokenBatch,
    sequence_tokens_T: Tensor,
    template_T: Tensor,
    aggregation: str,
    across: Across,
    padded_length: int | None,
) -> Tensor:
    if aggregation == "token-mean":
        return torch.full_like(template_T, 1.0 / max(1, across.count(template_T.numel())))
    if aggregation == "seq-mean-token-sum-norm":
        if padded_length is None:
            raise UserError(
                "loss.aggregation=seq-mean-token-sum-norm divides by loss.padded_length; set it"
            )
        return torch.full_like(template_T, 1.0 / padded_length)
    # of its sequence: a sequence's shares add up to 1
    share_T = 1.0 / sequence_tokens_T.double()
    if aggregation == "row-mean":
        return (share_T / max(1, batch.num_sequences)).to(template_T.dtype)
    sequences = max(1, sequences_of(sequence_tokens_T, across))
    if aggregation == "seq-mean-token-sum":
        return torch.full_like(template_T, 1.0 / sequences)
    if aggregation == "seq-mean-token-mean":
        return (share_T / sequences).to(template_T.dtype)
    raise ValueError(f"aggregation {aggregation!r} is unknown")


def sequences_of(sequence_tokens_T: Tensor, across: Across) -> int:
    """How many sequences the loss tokens of all ranks are of; `sequence_tokens_T` is how many of
    them the token's own has.
    """
    return round(across.sum(1.0 / sequence_tokens_T.double()))


def batch_mean(value_T: Tensor, coefficient_T: Tensor, across: Across) -> float:
    """A per-token value averaged as the loss is."""
    return across.sum(value_T.double() * coefficient_T.double())
