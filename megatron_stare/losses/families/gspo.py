"""GSPO: group sequence policy optimization (arXiv 2507.18071), in its token form (section 4.3).

With the n loss tokens of a sequence, its advantage A, and sg the stop-gradient:

    s   = exp( 1/n sum_t ln(pi_t / pi_old_t) )           the sequence's ratio, geometric mean
    s_t = sg(s) pi_t / sg(pi_t)                          equals s, its log at most 10
    L_t = max(-A s_t, -A clip(s_t, 1 - eps_clip, 1 + eps_clip_high))

so a sequence is clipped whole or not at all. The stop-gradient moves each token's share of the
gradient to its own loss: under loss.aggregation=seq-mean-token-mean, as published, loss and
gradient are those of the sequence form, mean over sequences of max(-A s, -A clip(s)).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_stare.losses.grpo import pessimistic
from megatron_stare.losses.registry import policy_loss
from megatron_stare.losses.settings import NonNegative
from megatron_stare.records import LossTokens

LARGEST_LOG_RATIO = 10.0


@policy_loss(
    family="sequences", source="2507.18071", head="recompute", aggregation="seq-mean-token-mean"
)
def gspo(
    tokens: LossTokens, *, eps_clip: NonNegative = 3e-4, eps_clip_high: NonNegative = 4e-4
) -> Tensor:
    """GSPO-token. s lies far nearer to 1 than a token's ratio, and the clip with it."""
    mean = tokens.sequence_mean((tokens.old_surprisal - tokens.surprisal).detach())
    own = tokens.surprisal.detach() - tokens.surprisal  # 0, with the gradient of ln pi_t
    ratio = torch.exp(torch.clamp(mean + own, max=LARGEST_LOG_RATIO))
    return pessimistic(ratio, tokens.advantage, eps_clip, eps_clip_high)
