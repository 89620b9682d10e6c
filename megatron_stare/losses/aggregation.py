"""Where token losses become one number: the only place that knows a reduction or a denominator.

The batch loss is sum_t coefficient_t * loss_t over all ranks and micro-batches. Denominators are
those of the GLOBAL batch, so the gradient does not depend on micro-batching or data parallelism.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.numerics.selection import Across
from megatron_stare.records import TokenBatch


def coefficients(batch: TokenBatch, aggregation: str, across: Across) -> Tensor:
    """coefficient_T of one aggregation;
    N loss tokens and G sequences with at least one, both global.

    token-mean: 1 / N. seq-mean-token-mean: 1 / (G * tokens of its sequence). seq-mean-token-sum: 1
    / G. A batch without a loss token gives an empty tensor on every rank, never a division by zero.
    """
    template_T = batch.advantage_T
    if aggregation == "token-mean":
        return torch.full_like(template_T, 1.0 / max(1, across.count(template_T.numel())))
    # of its sequence: a sequence's shares add up to 1
    share_T = 1.0 / batch.sequence_tokens_T.double()
    sequences = max(1, round(across.sum(share_T)))
    if aggregation == "seq-mean-token-sum":
        return torch.full_like(template_T, 1.0 / sequences)
    if aggregation == "seq-mean-token-mean":
        return (share_T / sequences).to(template_T.dtype)
    raise ValueError(f"aggregation {aggregation!r} is unknown")


def batch_mean(value_T: Tensor, coefficient_T: Tensor, across: Across) -> float:
    """A per-token value averaged as the loss is."""
    return across.sum(value_T.double() * coefficient_T.double())
