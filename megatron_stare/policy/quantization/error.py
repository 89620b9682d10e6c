"""How far a quantised policy is from the original,
in the quantities that reinforcement learning cares about.

Over every position of the measuring sequences, p the original's next-token distribution and q the
quantised one's:
KL(p || q) = sum_v p_v (ln p_v - ln q_v) [nats]. For the actual next token a of all positions but
the last, the surprisal shift d = ln p_a - ln q_a [nats]: exp(d) is that token's importance ratio
where q samples and p is trained.

Shape legend: S positions of one sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron_stare.config import UserError

_CHUNK_BYTES = 64 << 20  # of fp64 log-probabilities at a time


@dataclass(frozen=True)
class QuantizationError:
    """Means over `positions` (KL, agreement) and `next_tokens` (surprisal), in nats;
    agreement in [0, 1].
    """

    positions: int
    next_tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    surprisal_original: float
    surprisal_shift_mean: float
    surprisal_shift_mean_abs: float
    top1_agreement: float


@torch.no_grad()
def measure(
    original: PreTrainedModel, quantized: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> QuantizationError:
    """Run both models over each sequence alone, unpadded. UserError: logits that are not finite.

    Memory beyond the two models: two times S x V logits in the models' dtype, and four chunks of 64
    MiB.
    """
    parts = []
    for token_ids in sequences:
        token_1S = torch.tensor([token_ids], device=original.device)
        pair = [model(token_1S, use_cache=False).logits[0] for model in (original, quantized)]
        for logits_SV, which in zip(pair, ("the original", "the quantised"), strict=True):
            if not torch.isfinite(logits_SV).all():
                raise UserError(
                    f"{which} model's logits are not finite; check the checkpoint's weights"
                )
        parts.append(compare(pair[0], pair[1], token_1S[0]))
    kl, agreement, surprisal, shift = (
        torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)
    )
    return QuantizationError(
        positions=kl.size,
        next_tokens=shift.size,
        kl_mean=float(kl.mean()),
        kl_p99=float(numpy.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        surprisal_original=float(surprisal.mean()),
        surprisal_shift_mean=float(shift.mean()),
        surprisal_shift_mean_abs=float(numpy.abs(shift).mean()),
        top1_agreement=float(agreement.mean()),
    )


def compare(
    original_SV: Tensor, quantized_SV: Tensor, token_S: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL [S], top-1 agreement [S], the original's surprisal of the next token [S - 1],
    its shift [S - 1]; all fp64.
    """
    rows = max(1, _CHUNK_BYTES // (8 * original_SV.shape[1]))
    next_S = torch.cat([token_S[1:], token_S[:1]])  # the last position's entry is cut off below
    columns = []
    for start in range(0, len(token_S), rows):
        here = slice(start, start + rows)
        p_nv, q_nv = (
            torch.log_softmax(logits[here].double(), 1) for logits in (original_SV, quantized_SV)
        )
        kl_n = (p_nv.exp() * (p_nv - q_nv)).sum(1)
        agreement_n = (p_nv.argmax(1) == q_nv.argmax(1)).double()
        actual_n1 = next_S[here, None]
        log_p_n, log_q_n = (log.gather(1, actual_n1).squeeze(1) for log in (p_nv, q_nv))
        columns.append((kl_n, agreement_n, -log_p_n, log_p_n - log_q_n))
    kl_S, agreement_S, surprisal_S, shift_S = (
        torch.cat(column) for column in zip(*columns, strict=True)
    )
    return kl_S, agreement_S, surprisal_S[:-1], shift_S[:-1]
