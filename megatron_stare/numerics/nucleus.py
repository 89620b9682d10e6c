"""Entropy of a distribution's nucleus, from whole logits.

Shape legend: N tokens, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

CANDIDATES = 10_000  # as many leading tokens are looked at, as in the authors' code


def nucleus_entropy(logits_NV: Tensor, p: float, with_crossing: bool = False) -> Tensor:
    """Entropy [nats, N] of the softmax over its nucleus alone, renormalised; differentiable.

    The nucleus is the leading tokens whose cumulative probability is under `p`, and with
    `with_crossing` the one that reaches it too. An empty nucleus has entropy 0. arXiv 2509.25133.
    """
    log_NV = torch.log_softmax(logits_NV, dim=-1)
    leading_NK = torch.topk(log_NV, min(CANDIDATES, log_NV.shape[-1]), dim=-1).values
    mass_NK = leading_NK.detach().exp()
    before_NK = mass_NK.cumsum(-1) - (mass_NK if with_crossing else 0)
    kept_NK = before_NK < p
    inside_NK = torch.where(kept_NK, leading_NK, -torch.inf)
    # an empty nucleus would have NaN slopes: its first token alone has entropy 0 too
    first_NK = torch.where(kept_NK[:, :1], inside_NK[:, :1], leading_NK[:, :1])
    log_NK = torch.log_softmax(torch.cat([first_NK, inside_NK[:, 1:]], dim=-1), dim=-1)
    finite_NK = torch.where(torch.isfinite(log_NK), log_NK, 0.0)
    return -(log_NK.exp() * finite_NK).sum(-1)
