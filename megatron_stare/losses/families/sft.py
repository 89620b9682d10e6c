"""Supervised fine-tuning: the negative log-likelihood of each demonstrated token."""

from __future__ import annotations

from torch import Tensor

from megatron_stare.losses.registry import policy_loss
from megatron_stare.records import LossTokens


@policy_loss(family="supervised")
def sft(tokens: LossTokens) -> Tensor:
    """L = s = -ln pi(a) [nats]."""
    return tokens.surprisal
